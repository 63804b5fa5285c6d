"""Exit codes of the CLI. They are part of its interface: Slurm scripts branch on them."""

from __future__ import annotations

from enum import IntEnum

from ..client import Job


class Exit(IntEnum):
    """2 is typer's own, for wrong usage; 130 and 143 are SIGINT and SIGTERM."""

    COMPLETED = 0
    ERROR = 1  # of the command itself; the message has a code
    USAGE = 2
    COMPLETED_WITH_ERRORS = 3  # more failed and skipped rows than --max-failed
    PAUSED = 4
    FAILED = 5
    CANCELLED = 6
    PROBLEMS_FOUND = 7  # verify, parity or export found some
    INTERRUPTED = 130
    TERMINATED = 143


def exit_of(job: Job, max_failed: int) -> Exit:
    """Exit code for a job's status. ``max_failed`` bounds failed + skipped rows that still count as success."""
    state, rows = job.state, job.rows
    if state == "completed_with_errors":
        return Exit.COMPLETED if rows.failed + rows.skipped <= max_failed else Exit.COMPLETED_WITH_ERRORS
    return {"completed": Exit.COMPLETED, "paused": Exit.PAUSED, "failed": Exit.FAILED, "cancelled": Exit.CANCELLED}.get(state, Exit.ERROR)
