"""Opening failed rows of a job again. Runs in a thread; reads the ledger batch by batch, and of it only segments with an error.

Invariant: the retry's file is durable before anything says that rows are open; everything after it (COMPLETE, the state, the totals in
Redis) follows from it, and a crash in between is made good by asking again or by the reconciler.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..contracts.errors import ErrorCode, RequestError
from ..contracts.records import Control, JobControl, JobSpec, JobState, PauseReason, Retry, RowState
from ..store.complete import drop_stale_completion
from ..store.ledger import JobLedger, may_have_errors
from ..store.retries import add_retry, last_generation, opened_by, opens
from .catalog import Catalog

# A failed or cancelled job is not whole in ways that open rows do not mend: a new job takes what it has (reuse).
_RETRYABLE = (JobState.QUEUED, JobState.RUNNING, JobState.PAUSED, JobState.COMPLETED_WITH_ERRORS, JobState.COMPLETED)


@dataclass(frozen=True, kw_only=True)
class Reopened:
    """``rows``: opened by this retry. ``waiting``: opened by earlier ones and not done yet."""

    rows: int
    waiting: int
    control: JobControl


def retry_rows(catalog: Catalog, spec: JobSpec, codes: list[str]) -> Reopened:
    """Open the rows that failed, all or those with one of ``codes``, and put an ended job back to work.

    Raises:
        RequestError: ``conflict`` when no row is to be opened (the message has the counts by code), or the job was cancelled or failed.
        StoreError: the ledger cannot be read or the retry not be written.
    """
    state = JobState(catalog.control(spec.job_id).state)
    if state not in _RETRYABLE:
        raise RequestError(ErrorCode.CONFLICT, f"the job is {state}: submit its dataset again, rows that are done are taken over")
    path = catalog.job_path(spec.job_id)
    wanted = Retry(generation=0, codes=codes)
    ledger = JobLedger(path)
    rows = waiting = highest = 0
    others: Counter[str] = Counter()
    opened: Counter[tuple[str, str]] = Counter()  # (state, code) -> rows
    for batch in ledger.batches():
        if not any(map(may_have_errors, ledger.segments(batch))):
            continue
        for record in ledger.last(batch).values():
            if record.state == RowState.DONE.value:
                continue
            if opened_by(record, ledger.retries):
                waiting += 1
                opened[record.state, record.code] += 1
            elif opens(wanted, record):
                rows += 1
                opened[record.state, record.code] += 1
                highest = max(highest, record.generation)
            else:
                others[record.code] += 1
    if not rows and not (waiting and state.terminal):
        why = f"; other rows without a file: {dict(others)}" if others else ""
        more = f"; {waiting} are open already" if waiting else ""
        raise RequestError(ErrorCode.CONFLICT, f"no row of the job failed{' with ' + ', '.join(codes) if codes else ''}{more}{why}")
    if rows:
        # Above every retry too: their generations are compared with those of records.
        generation = max([highest, *(r.generation for r in ledger.retries)]) + 1
        while not add_retry(path, Retry(generation=generation, codes=codes, at=round(time.time(), 3))):
            generation += 1  # another request was faster; opening twice does no harm
    return Reopened(rows=rows, waiting=waiting, control=_go_on(catalog, spec, opened))


def _go_on(catalog: Catalog, spec: JobSpec, opened: Counter[tuple[str, str]]) -> JobControl:
    path = catalog.job_path(spec.job_id)

    def change(control: JobControl) -> JobControl:
        """Under the folder's lock, where the end of a job is written too."""
        if JobState(control.state).terminal:
            if control.state not in _RETRYABLE:  # cancelled meanwhile
                return control
            new: dict[str, Any] = {"control": Control.RUN.value, "state": JobState.QUEUED.value, "reason": "", "ended_at": 0.0}
            new |= {"final": _without(control.final, opened)}  # what the job's status says until its ledger was folded again
        elif control.reason == PauseReason.CIRCUIT_OPEN.value:
            new = {"control": Control.RUN.value, "state": JobState.QUEUED.value, "reason": ""}
        else:
            return control  # a person's pause stays; a running job needs nothing
        drop_stale_completion(path, last_generation(path))
        return JobControl.from_dict(control.to_dict() | new | {"message": f"{opened.total()} rows are open again"})

    return catalog.change_control(spec.job_id, change)


def _without(final: dict[str, Any], opened: Counter[tuple[str, str]]) -> dict[str, Any]:
    """Sums of an ended job less the rows that are open again."""
    left = {**final, "errors": dict(final.get("errors", {})), "finished": 0}
    for (state, code), rows in opened.items():
        left[state] = max(int(left.get(state, 0)) - rows, 0)
        left["errors"][code] = left["errors"].get(code, 0) - rows
    left["errors"] = {code: n for code, n in left["errors"].items() if n > 0}
    return left
