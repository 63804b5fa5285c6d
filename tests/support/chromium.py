"""A real Chromium, driven by Playwright: the host's, or Debian's package, which root installs where it is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PACKAGES = ("chromium", "fonts-liberation")  # a page without a font has no width
# Without a way out each of these only waits for a refusal.
QUIET = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
    "--disable-gpu",
)


def _found() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def program() -> str:
    """Its path. Skips the test where there is none and nobody may install one."""
    if _found() is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *PACKAGES]):
            done = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True, timeout=400)
            assert done.returncode == 0, f"apt-get {command[0]}: {done.stderr[-2000:]}"
    found = _found()
    if found is None:
        pytest.skip(f"none of {', '.join(PROGRAMS)} on the PATH, and not root on Debian, who could install one")
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Root has no user namespaces in a container: its sandbox would not start.
        made = playwright.chromium.launch(executable_path=program(), chromium_sandbox=os.geteuid() != 0, args=list(QUIET))
        yield made
        made.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh profile. A script's error, a refused resource or a request to elsewhere fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    made = context.new_page()
    wrong: list[str] = []
    made.on("pageerror", lambda e: wrong.append(f"{e}"))
    made.on("console", lambda m: wrong.append(m.text) if m.type == "error" and "Failed to load resource" not in m.text else None)
    made.on("request", lambda r: wrong.append(r.url) if not r.url.startswith(("http://127.0.0.1:", "data:")) else None)
    yield made
    context.close()
    assert not wrong, wrong
