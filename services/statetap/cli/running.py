"""``statetap run``: start the stack, submit one dataset, watch the job, stop, and say by the exit code how it ended.

Invariant: calling it again with the same arguments goes on where the last call ended (Slurm requeues); finished rows are not redone.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..contracts.errors import ErrorCode, RequestError
from .api import Api
from .exits import Exit, exit_of
from .stack import Stack, StackConfig
from .watching import ENDED, watch

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
    options: dict[str, Any]  # of the dataset
    max_failed: int = 0
    pause_timeout_s: float = 600.0


def run(config: StackConfig, request: RunRequest, console: Console, say: Any) -> Exit:
    """Raises StatetapError; the stack is stopped in every case."""
    stack = Stack(config=config, say=say)
    stop_on_signals()
    try:
        stack.start()
        api = Api(stack.url, patience_s=RESTART_S)
        job = _submit(stack, api, request, say)
        job = watch(api, job["job_id"], console, tick=stack.tick, until=_until(request.pause_timeout_s))
        _conclude(api, job, say)
        return exit_of(job, request.max_failed)
    except Stopped as e:
        say(f"{e}: stopping; call the same command again to go on")
        return Exit(128 + e.number) if e.number in (signal.SIGTERM, signal.SIGINT) else Exit.ERROR
    finally:
        stack.stop()


def _submit(stack: Stack, api: Api, request: RunRequest, say: Any) -> dict[str, Any]:
    dataset = api.dataset_from_path(request.data.resolve(), request.options)
    spoken = time.monotonic()
    while dataset["state"] == "ingesting" or not stack.ready or not _profiles(api):
        stack.tick()
        if dataset["state"] == "ingesting":
            dataset = api.get(f"/v1/datasets/{dataset['dataset_id']}")
            if time.monotonic() - spoken > DATASET_SAY_EVERY_S:
                spoken = time.monotonic()
                say(f"dataset: {dataset['rows']} rows read ({dataset['bytes_read']} of {dataset['bytes_total']} bytes)")
        if dataset["state"] == "failed":
            break
        time.sleep(POLL_S)
    if dataset["state"] == "failed":
        error = dataset["error"] or {}
        raise RequestError(
            ErrorCode.DATASET_FAILED, f"{request.data}: {error.get('message', 'no row could be used')} {dataset['errors'] or ''}"
        )
    say(
        f"dataset {dataset['dataset_id']}: {dataset['rows']} rows, {dataset['tokens']} tokens ({dataset['supervised_tokens']} supervised), "
        f"{dataset['rejected']} rejected {dataset['errors'] or ''}"
    )
    profile = _profiles(api)[0]
    for job in _jobs(api):
        if job["dataset_id"] == dataset["dataset_id"] and job["profile_id"] == profile and job["state"] not in ("cancelled", "failed"):
            say(f"job {job['job_id']} is there already ({job['state']}): going on with it")
            if job["control"] == "pause":
                api.post(f"/v1/jobs/{job['job_id']}/resume")
            return job
    job = api.post("/v1/jobs", json={"dataset_id": dataset["dataset_id"], "profile_id": profile, "max_failed": request.max_failed})
    say(f"job {job['job_id']}: {job['bytes']['expected']} bytes expected in {job['path']}")
    return job


def _profiles(api: Api) -> list[str]:
    return sorted({e["profile_id"] for e in api.get("/v1/engines")["items"]})


def _jobs(api: Api) -> Any:
    cursor = None
    while True:
        page = api.get("/v1/jobs", cursor=cursor)
        yield from page["items"]
        cursor = page["next_cursor"]
        if not cursor:
            return


def _until(pause_timeout_s: float) -> Any:
    """Ended, or paused for longer than the timeout (a person's pause ends the wait at once)."""
    since: list[float] = []

    def until(job: dict[str, Any]) -> bool:
        if job["state"] in ENDED:
            return True
        if job["state"] != "paused":
            since.clear()
            return False
        since[:] = since or [time.monotonic()]
        return job["reason"] == "user" or time.monotonic() - since[0] > pause_timeout_s

    return until


def _conclude(api: Api, job: dict[str, Any], say: Any) -> None:
    rows = job["rows"]
    say(f"{job['state']}: {rows['done']} done + {rows['failed']} failed + {rows['skipped']} skipped of {rows['total']} rows; {job['path']}")
    if job["reason"]:
        say(f"{job['reason']}: {job['message']}")
    if rows["failed"] + rows["skipped"]:
        page = api.get(f"/v1/jobs/{job['job_id']}/errors", limit=5)
        for e in page["items"]:
            say(f"  row {e['row']} (line {e['line']}): {e['state']}, {e['code']}: {e['message']}")
        say(f"  all of them: {job['errors']}")
