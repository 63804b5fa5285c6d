"""Shows how a job goes: two or three lines that are redrawn on a terminal, a flushed line every few seconds in a log file, JSON lines.

Invariant: a job never looks complete before it is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..client import Client, Job
from .output import Out, printable
from .units import counts, duration, size

POLL_S = 0.5
LOG_EVERY_S = 5.0
RESTART_S = 60.0  # watching goes on over a coordinator that is started again


def percent(job: Job) -> str:
    if job.state.startswith("completed"):
        return "100%"
    share = 100 * job.rows.ended / job.rows.total if job.rows.total else 100
    return f"{min(share, 99.9):.1f}%"


def state(job: Job) -> str:
    return f"{job.state} ({job.reason})" if job.reason else job.state


def line(job: Job) -> str:
    """One line of at most about 90 columns: state, rows, what went wrong, speed, time left, and what holds it up."""
    rows = job.rows
    wrong = f" {rows.failed} failed" * bool(rows.failed) + f" {rows.skipped} skipped" * bool(rows.skipped)
    speed = "" if job.ended else f" {job.rates.tokens_per_s:,.0f} tok/s left {duration(job.eta_s)}"
    bound = f" bound by {job.bound}" if job.bound and not job.ended else ""
    return f"{state(job)} {percent(job)} {rows.done}/{rows.total} rows{wrong} {size(job.bytes.committed)}{speed}{bound}"


def log_line(job: Job) -> str:
    """With errors by code and, when it does not move, why."""
    why = f"; {job.message}" if job.message and job.state in ("paused", "failed") else ""
    return f"{line(job)}{f'; {counts(job.errors)}' if job.errors else ''}{why}"


def drawn(job: Job) -> Group:
    """For a terminal of 80 columns and more."""
    top = Table.grid(padding=(0, 1), expand=True)
    for ratio in (None, 1, None, None, None, None):
        top.add_column(no_wrap=True, ratio=ratio)
    moving = not job.ended and job.state != "paused"
    left = f"{duration(job.eta_s)} left" if job.eta_s is not None else ""
    top.add_row(
        Text(state(job), style="bold"),
        ProgressBar(
            total=max(1, job.rows.total),
            completed=job.rows.ended if job.state.startswith("completed") else min(job.rows.ended, job.rows.total * 0.999),
        ),
        percent(job),
        f"{job.rows.ended:,}/{job.rows.total:,}",
        f"{job.rates.tokens_per_s:,.0f} tok/s" if moving else "",
        left if moving else "",
    )
    facts = [f"{size(job.bytes.committed)} of {size(job.bytes.expected)}"]
    facts += [f"bound by {job.bound}"] if job.bound and moving else []
    facts += [f"{job.rows.reused:,} reused"] if job.rows.reused else []
    lines = [Text("  " + ", ".join(facts), no_wrap=True, overflow="ellipsis")]
    if job.errors:
        wrong = [f"{n:,} {what}" for n, what in ((job.rows.failed, "failed"), (job.rows.skipped, "skipped")) if n]
        lines.append(Text(f"  {', '.join(wrong)}: {counts(job.errors)}", no_wrap=True, overflow="ellipsis"))
    if job.message and not job.state.startswith("completed"):
        lines.append(Text("  " + printable(job.message).replace("\n", " "), style="yellow"))
    return Group(top, *lines)


def show(jobs: Iterable[Job], out: Out, *, until: Callable[[Job], bool] = lambda job: job.ended) -> Job | None:
    """Show snapshots until ``until`` holds or there are no more; the last one (None: there was none)."""
    if out.as_json:
        return _each(jobs, until, _json(out))
    if sys.stdout.isatty():
        with Live(Text(""), console=Console(highlight=False), refresh_per_second=4, transient=True) as live:
            return _each(jobs, until, lambda job: live.update(drawn(job)))
    return _each(jobs, until, _log(out))


def _each(jobs: Iterable[Job], until: Callable[[Job], bool], tell: Callable[[Job], None]) -> Job | None:
    last = None
    for last in jobs:
        tell(last)
        if until(last):
            break
    return last


def _json(out: Out) -> Callable[[Job], None]:
    told: list[Job] = []

    def tell(job: Job) -> None:
        if told[-1:] != [job]:  # a heartbeat is nothing new
            told[:] = [job]
            out.item(job.to_dict(), "")

    return tell


def _log(out: Out) -> Callable[[Job], None]:
    last_at, last_state = 0.0, ""

    def tell(job: Job) -> None:
        nonlocal last_at, last_state
        if state(job) != last_state or time.monotonic() - last_at >= LOG_EVERY_S:
            last_at, last_state = time.monotonic(), state(job)
            out.say(f"{job.job_id} {log_line(job)}")

    return tell


def polled(client: Client, job_id: str, tick: Callable[[], None]) -> Iterator[Job]:
    """Snapshots of a job twice a second, with ``tick`` before each: for the command that has to look after the stack meanwhile."""
    while True:
        tick()
        yield client.job(job_id)
        time.sleep(POLL_S)


def person_paused(job: Job) -> bool:
    return job.state == "paused" and job.reason == "user"
