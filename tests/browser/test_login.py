"""The page of a coordinator with keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from playwright.sync_api import Page, expect

from statetap.coordinator.keyfile import Scope, add_key, revoke_key
from tests.support.coordinator import Coordinator, make_dataset, register_engine
from tests.support.redis import RedisServer

expect.set_options(timeout=15_000)


class Keys:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.read, self.write, _ = (add_key(file, name, scope) for name, scope in zip(("reader", "writer", "owner"), Scope, strict=True))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


@pytest.fixture
def guarded(tmp_path: Path, redis_server: RedisServer, redis_client: redis.Redis, keys: Keys) -> Iterator[Coordinator]:
    process = Coordinator(tmp_path, redis_server.url, KEYS_FILE=str(keys.file))
    try:
        process.start()
        register_engine(redis_client)
        make_dataset(process.store, [5] * 10)
        yield process
    finally:
        process.close()


def log_in(page: Page, key: str) -> None:
    page.get_by_label("Key").fill(key)
    page.get_by_role("button", name="Log in").click()


def test_a_key_opens_it_and_its_scope_says_which_buttons_there_are(guarded: Coordinator, keys: Keys, page: Page) -> None:
    """Seen to fail with buttons for a key that may only read."""
    page.goto(str(guarded.http.base_url))
    expect(page.get_by_label("Key")).to_be_focused()
    log_in(page, "st_wrong")
    expect(page.get_by_role("alert")).to_contain_text("not known, or was revoked")
    log_in(page, keys.write)
    expect(page.get_by_text("writer (write)")).to_be_visible()
    body = {"dataset_id": "ds-0000000000000001", "name": "mine"}
    job = guarded.http.post("/v1/jobs", json=body, headers={"Authorization": f"Bearer {keys.write}"}).json()["job_id"]
    page.get_by_role("link", name="mine").click()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_text("You are logged out.")).to_be_visible()
    page.reload()
    expect(page.get_by_label("Key")).to_be_focused()
    log_in(page, keys.read)
    expect(page.get_by_text("reader (read)")).to_be_visible()
    expect(page.get_by_role("heading", name="mine")).to_be_visible()
    expect(page.get_by_text("10 open = 10 rows")).to_be_visible()
    assert page.locator(".actions button:visible").count() == 0
    assert page.evaluate("document.cookie") == "", "no script can read the session"
    assert job in page.url


def test_a_revoked_key_leads_to_the_login(guarded: Coordinator, keys: Keys, page: Page) -> None:
    page.goto(str(guarded.http.base_url))
    log_in(page, keys.read)
    expect(page.get_by_text("reader (read)")).to_be_visible()
    revoke_key(keys.file, "reader")
    expect(page.get_by_text("The session has ended.")).to_be_visible()
    expect(page.get_by_text("reader (read)")).to_be_hidden()
