"""Measuring the speed of an extraction by a short probe job.

Invariant: start-up does not count (the rate is taken between the first rows and the last), and the probe job is deleted whatever happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..client import Client, Job, JobOptions
from ..contracts.errors import ErrorCode, RequestError, StatetapError
from .output import Out

PROBE_PATIENCE_S = 60.0


@dataclass(kw_only=True)
class Speed:
    """Tokens a second of a job's steady work, from its snapshots. Feed them as they come."""

    clock: Callable[[], float] = time.monotonic
    _first: tuple[float, int] | None = None
    _last: tuple[float, int] | None = None

    def see(self, job: Job) -> None:
        if job.tokens.done and (self._last is None or job.tokens.done > self._last[1]):
            self._last = self.clock(), job.tokens.done
            self._first = self._first or self._last

    @property
    def steady(self) -> bool:
        """Whether there were two snapshots with work between them."""
        return self._first is not None and self._last is not None and self._last[0] > self._first[0]

    def tokens_per_s(self, end: Job) -> float | None:
        """Between the first and the last snapshot that brought rows; over the whole job when it was too short for two."""
        if self._first is not None and self._last is not None and self.steady:
            return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        if end.tokens.done and end.started_at and end.ended_at and end.ended_at > end.started_at:
            return end.tokens.done / (end.ended_at - end.started_at)
        return None


def run_probe(client: Client, dataset_id: str, rows: int, out: Out, like: JobOptions) -> tuple[float | None, float | None]:
    """Run the first ``rows`` rows as a job of their own, asked for as ``like``, and delete it: (tokens a second, bytes written over those that
    were expected at most). Raises StatetapError."""
    asked: JobOptions = {**like, "rows": rows, "reuse": False, "name": f"probe of {dataset_id}", "priority": 1}
    job = client.submit_job(dataset_id, **asked)
    out.say(f"probe {job.job_id}: the first {job.rows.total} rows")
    try:
        end, speed, steady = measure(client.events(job.job_id, heartbeats=True))
    finally:
        _remove(client, job.job_id, out)
    if end is None or not end.tokens.done:
        why = f"{end.state} {end.reason}: {end.message}" if end is not None else "it vanished"
        raise RequestError(
            ErrorCode.INCOMPLETE, f"the probe brought no row ({why})", next_step="Look at `statetap engines` and `statetap doctor`."
        )
    if not steady:
        out.say("the probe was over at once, so its start counts too: more rows give a better number")
    # Rows that failed have no bytes: what is expected is taken for the tokens that were done.
    expected = end.bytes.expected * end.tokens.done / end.tokens.total if end.tokens.total else 0
    return speed, end.bytes.committed / expected if expected else None


def measure(snapshots: Iterable[Job]) -> tuple[Job | None, float | None, bool]:
    """The last snapshot (of an ended or a paused job), the speed, and whether it is one of steady work alone."""
    speed, last = Speed(), None
    for last in snapshots:
        speed.see(last)
        if last.ended or last.state == "paused":
            break
    return last, speed.tokens_per_s(last) if last is not None else None, speed.steady


def _remove(client: Client, job_id: str, out: Out) -> None:
    """The probe must not stay; that it could not be removed is said and hides no other error."""
    try:
        if not client.job(job_id).ended:
            client.cancel(job_id)
            client.wait(job_id, timeout_s=PROBE_PATIENCE_S)
        client.delete_job(job_id)
    except StatetapError as e:
        out.say(f"the probe could not be removed ({e}): `statetap rm {job_id}`")
