"""``statetap run``: start the stack, submit one dataset, watch the job, stop, and say by the exit code how it ended.

Invariant: calling it again with the same arguments goes on where the last call ended (Slurm requeues); finished rows are not redone.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ..client import Client, Dataset, DatasetOptions, Job
from ..contracts.errors import ErrorCode, RequestError
from .exits import Exit, exit_of
from .output import Out
from .stack import Stack, StackConfig
from .units import counts
from .watching import person_paused, polled, show

POLL_S = 0.2
RESTART_S = 60.0  # a coordinator that ended is started again meanwhile
DATASET_SAY_EVERY_S = 10.0


class Stopped(Exception):  # noqa: N818  (not an error: a signal asked for it)
    """SIGTERM or SIGINT came: stop in order."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def stop_on_signals() -> None:
    """Turn SIGTERM, SIGINT and SIGHUP into :class:`Stopped`; a second one while stopping is ignored."""
    taken: list[int] = []

    def handler(number: int, frame: object) -> None:
        if not taken:
            taken.append(number)
            raise Stopped(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, handler)


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    data: Path
    options: DatasetOptions
    max_failed: int = 0
    pause_timeout_s: float = 600.0


def run(config: StackConfig, request: RunRequest, out: Out) -> Exit:
    """Raises StatetapError; the stack is stopped in every case."""
    stack = Stack(config=config, say=out.say)
    stop_on_signals()
    try:
        stack.start()
        with Client(stack.url, patience_s=RESTART_S) as client:
            job = _submit(stack, client, request, out)
            # The stack is looked after before each look at the job.
            job = show(polled(client, job.job_id, stack.tick), out, until=_until(request.pause_timeout_s)) or job
            _conclude(client, job, out)
        return exit_of(job, request.max_failed)
    except Stopped as e:
        out.say(f"{e}: stopping; call the same command again to go on")
        return Exit(128 + e.number) if e.number in (signal.SIGTERM, signal.SIGINT) else Exit.ERROR
    finally:
        stack.stop()


def _submit(stack: Stack, client: Client, request: RunRequest, out: Out) -> Job:
    dataset = _ingested(stack, client, client.dataset_from_path(request.data.resolve(), **request.options), request, out)
    out.say(
        f"dataset {dataset.dataset_id}: {dataset.rows} rows, {dataset.tokens} tokens ({dataset.supervised_tokens} supervised), "
        f"{dataset.rejected} rejected {counts(dataset.errors)}"
    )
    profile = _profiles(client)[0]
    for job in client.jobs():
        if job.dataset_id == dataset.dataset_id and job.profile_id == profile and job.state not in ("cancelled", "failed"):
            out.say(f"job {job.job_id} is there already ({job.state}): going on with it")
            return client.resume(job.job_id) if job.control == "pause" else job
    job = client.submit_job(dataset.dataset_id, profile_id=profile, max_failed=request.max_failed)
    out.say(f"job {job.job_id}: {job.bytes.expected} bytes expected in {job.path}")
    return job


def _ingested(stack: Stack, client: Client, dataset: Dataset, request: RunRequest, out: Out) -> Dataset:
    """The dataset once it is ready and all engines are; the stack is looked after meanwhile."""
    spoken = time.monotonic()
    while dataset.state == "ingesting" or not stack.ready or not _profiles(client):
        stack.tick()
        if dataset.state == "ingesting":
            dataset = client.dataset(dataset.dataset_id)
            if time.monotonic() - spoken > DATASET_SAY_EVERY_S:
                spoken = time.monotonic()
                out.say(f"dataset: {dataset.rows} rows read ({dataset.bytes_read} of {dataset.bytes_total} bytes)")
        if dataset.state == "failed":
            break
        time.sleep(POLL_S)
    if dataset.state == "failed":
        why = (dataset.error or {}).get("message", "no row could be used")
        raise RequestError(ErrorCode.DATASET_FAILED, f"{request.data}: {why} {counts(dataset.errors)}".rstrip())
    return dataset


def _profiles(client: Client) -> list[str]:
    return sorted({e.profile_id for e in client.engines()})


def _until(pause_timeout_s: float) -> Callable[[Job], bool]:
    """Ended, or paused for longer than the timeout (a person's pause ends the wait at once)."""
    since: list[float] = []

    def until(job: Job) -> bool:
        if job.ended:
            return True
        if job.state != "paused":
            since.clear()
            return False
        since[:] = since or [time.monotonic()]
        return person_paused(job) or time.monotonic() - since[0] > pause_timeout_s

    return until


def _conclude(client: Client, job: Job, out: Out) -> None:
    rows = job.rows
    out.say(f"{job.state}: {rows.done} done + {rows.failed} failed + {rows.skipped} skipped of {rows.total} rows; {job.path}")
    if job.reason:
        out.say(f"{job.reason}: {job.message}")
    if rows.failed + rows.skipped:
        for e in islice(client.errors(job.job_id), 5):
            out.say(f"  row {e.row} (line {e.line}): {e.state}, {e.code}: {e.message}")
        out.say(f"  all of them: {counts(job.errors)}")
