"""Shows how a job goes: one line that is redrawn on a terminal, a flushed line every few seconds in a log file."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from .api import Api

POLL_S = 0.5
LOG_EVERY_S = 10.0
ENDED = ("completed", "completed_with_errors", "cancelled", "failed")


def size(n: float) -> str:
    """Bytes in decimal units, as disks are sold."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    m, s = divmod(round(seconds), 60)
    h, m = divmod(m, 60)
    return f"{h}:{m:02d}:{s:02d}" if h else f"{m}:{s:02d}"


def line(job: dict[str, Any]) -> str:
    """One line of at most about 78 columns: state, rows, what went wrong, speed and time left."""
    rows, rates = job["rows"], job["rates"]
    ended = rows["done"] + rows["failed"] + rows["skipped"]
    share = 100 * ended / rows["total"] if rows["total"] else 100
    # A job in the last moments must not look complete before it is.
    percent = "100" if job["state"].startswith("completed") else f"{min(share, 99.9):.1f}"
    wrong = f" {rows['failed']} failed" * bool(rows["failed"]) + f" {rows['skipped']} skipped" * bool(rows["skipped"])
    state = job["state"] + (f" ({job['reason']})" if job["reason"] else "")
    speed = "" if job["state"] in ENDED else f" {rates['tokens_per_s']:,.0f} tok/s left {duration(job['eta_s'])}"
    return f"{state} {percent}% {rows['done']}/{rows['total']} rows{wrong} {size(job['bytes']['committed'])}{speed}"


def watch(
    api: Api, job_id: str, console: Console, *, tick: Callable[[], None] = lambda: None, until: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Show the job until ``until(status)`` holds; its last status is returned. ``tick`` is called at every look."""
    if console.is_terminal:
        with Live(Text(""), console=console, refresh_per_second=4, transient=True) as live:
            return _loop(api, job_id, tick, until, lambda job, news: live.update(Text(line(job), overflow="ellipsis", no_wrap=True)))
    last = [0.0]

    def log(job: dict[str, Any], news: bool) -> None:
        if news or time.monotonic() - last[0] >= LOG_EVERY_S:
            last[0] = time.monotonic()
            print(time.strftime("%H:%M:%S"), job_id, line(job), flush=True)

    return _loop(api, job_id, tick, until, log)


def _loop(
    api: Api, job_id: str, tick: Callable[[], None], until: Callable[[dict[str, Any]], bool], show: Callable[[dict[str, Any], bool], None]
) -> dict[str, Any]:
    before = None
    while True:
        tick()
        job = api.get(f"/v1/jobs/{job_id}")
        show(job, (job["state"], job["reason"]) != before)
        before = (job["state"], job["reason"])
        if until(job):
            return job
        time.sleep(POLL_S)
