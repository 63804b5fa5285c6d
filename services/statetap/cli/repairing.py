"""``verify --repair``: rows whose files are damaged are captured anew, and the job is watched until it has ended again.

Invariant: only rows that are named are opened; the coordinator does the rest as for a retry (docs/adr/0009).
"""

from __future__ import annotations

from collections.abc import Sequence

from .options import Api
from .watching import RESTART_S, log_line, person_paused

RANGES_A_REQUEST = 10_000  # the API's limit


def repair_job(api: Api, job_id: str, damaged: Sequence[tuple[int, int]]) -> None:
    """Open the rows of these half-open ranges (none: have the manifest written anew) and wait until the job has ended or a person paused it.

    Raises ApiError: ``not_found`` where the coordinator has no such job, ``conflict`` for one that was cancelled or failed.
    """
    with api.client() as client:
        for at in range(0, max(1, len(damaged)), RANGES_A_REQUEST):
            client.retry(job_id, rows=damaged[at : at + RANGES_A_REQUEST])
    told = ""
    with api.client(RESTART_S) as client:
        for job in client.events(job_id, heartbeats=False):
            if (now := f"{job.state} {job.reason}") != told:
                told = now
                api.out.say(f"{job_id} {log_line(job)}")
            if job.ended or person_paused(job):
                return
