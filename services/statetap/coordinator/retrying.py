"""Opening rows of a job again: failed ones by code, damaged ones by number. Runs in a thread; reads the ledger batch by batch, and of it only
segments with an error or with a row that is named.

Invariant: the retry's file is durable before anything says that rows are open; everything after it (COMPLETE, the state, the totals in
Redis) follows from it, and a crash in between is made good by asking again or by the reconciler.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..contracts.errors import ErrorCode, RequestError
from ..contracts.records import Control, JobControl, JobSpec, JobState, PauseReason, Retry, RowRecord, RowState
from ..store.acks import Acks, merge
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


@dataclass(kw_only=True)
class _Found:
    """What a retry opens, and what was open before it."""

    rows: list[int] = field(default_factory=list)
    waiting: int = 0
    highest: int = 0  # generation of the rows' records
    opened: Counter[tuple[str, str]] = field(default_factory=Counter)  # (state, code) -> rows, with those that wait
    tokens: int = 0  # of the done rows
    bytes: int = 0
    others: Counter[str] = field(default_factory=Counter)  # code -> rows without a file that stay as they are

    def look(self, record: RowRecord, is_open: bool, is_asked_for: bool) -> None:
        if is_open:
            self.waiting += 1
        elif is_asked_for:
            self.rows.append(record.row)
            self.highest = max(self.highest, record.generation)
        else:
            self.others[record.code] += record.state != RowState.DONE.value
            return
        self.opened[record.state, record.code] += 1
        self.tokens += record.tokens if record.state == RowState.DONE.value else 0
        self.bytes += record.bytes


def retry_rows(catalog: Catalog, spec: JobSpec, codes: list[str], rows: list[tuple[int, int]] | None = None) -> Reopened:
    """Open the rows that failed, all or those with one of ``codes``, or exactly ``rows``, and put an ended job back to work.

    Raises:
        RequestError: ``conflict`` when no row is to be opened (the message has the counts by code), or the job was cancelled or failed;
            ``invalid_request`` for ranges that are not the job's.
        StoreError: the ledger cannot be read or the retry not be written.
    """
    state = JobState(catalog.control(spec.job_id).state)
    if state not in _RETRYABLE:
        raise RequestError(ErrorCode.CONFLICT, f"the job is {state}: submit its dataset again, rows that are done are taken over")
    path = catalog.job_path(spec.job_id)
    ledger = JobLedger(path)
    found = _by_code(ledger, codes) if rows is None else _by_row(catalog, spec, ledger, codes, rows)
    if not found.rows and rows != [] and not (found.waiting and state.terminal):
        why = f"; other rows without a file: {dict(found.others)}" if found.others else ""
        more = f"; {found.waiting} are open already" if found.waiting else ""
        of = "is done or failed within these ranges" if rows else f"of the job failed{' with ' + ', '.join(codes) if codes else ''}"
        raise RequestError(ErrorCode.CONFLICT, f"no row {of}{more}{why}")
    if found.rows or rows == []:
        # Exactly what was found: a row that ends between the look and the file was not asked for.
        exactly = None if rows is None else [list(r) for r in merge((n, n + 1) for n in found.rows)]
        # Above every retry too: their generations are compared with those of records.
        generation = max([found.highest, *(r.generation for r in ledger.retries)]) + 1
        while not add_retry(path, Retry(generation=generation, codes=codes, rows=exactly, at=round(time.time(), 3))):
            generation += 1  # another request was faster; opening twice does no harm
    return Reopened(rows=len(found.rows), waiting=found.waiting, control=_go_on(catalog, spec, found))


def _by_code(ledger: JobLedger, codes: list[str]) -> _Found:
    wanted, found = Retry(generation=0, codes=codes), _Found()
    for batch in ledger.batches():
        if any(map(may_have_errors, ledger.segments(batch))):
            for record in ledger.last(batch).values():
                if record.state != RowState.DONE.value:
                    found.look(record, bool(opened_by(record, ledger.retries)), opens(wanted, record))
    return found


def _by_row(catalog: Catalog, spec: JobSpec, ledger: JobLedger, codes: list[str], ranges: list[tuple[int, int]]) -> _Found:
    """Rows without a record are open, and those that were acknowledged have no file to repair."""
    wrong = next((r for r in ranges if not 0 <= r[0] <= r[1] <= spec.rows), None)
    if wrong is not None or codes:
        what = "codes and rows are two ways to say it" if codes else f"{list(wrong or ())} is no half-open range within [0, {spec.rows})"
        raise RequestError(ErrorCode.INVALID_REQUEST, f"rows: {what}", field="rows")
    plan, acks, found = catalog.plan(spec.job_id), catalog.acks(spec.job_id), _Found()
    wanted = merge(ranges)
    batches = {b for start, stop in wanted for b in range(plan.batch_of(start), plan.batch_of(stop - 1) + 1)}
    asked = Acks(ranges=wanted)
    for batch in sorted(batches):
        for row, record in ledger.last(batch).items():
            if row in asked and row not in acks:
                found.look(record, bool(opened_by(record, ledger.retries)), True)
    return found


def _go_on(catalog: Catalog, spec: JobSpec, found: _Found) -> JobControl:
    path = catalog.job_path(spec.job_id)

    def change(control: JobControl) -> JobControl:
        """Under the folder's lock, where the end of a job is written too."""
        if JobState(control.state).terminal:
            if control.state not in _RETRYABLE:  # cancelled meanwhile
                return control
            new: dict[str, Any] = {"control": Control.RUN.value, "state": JobState.QUEUED.value, "reason": "", "ended_at": 0.0}
            new |= {"final": _without(control.final, found)}  # what the job's status says until its ledger was folded again
        elif control.reason == PauseReason.CIRCUIT_OPEN.value:
            new = {"control": Control.RUN.value, "state": JobState.QUEUED.value, "reason": ""}
        else:
            return control  # a person's pause stays; a running job needs nothing
        drop_stale_completion(path, last_generation(path))
        return JobControl.from_dict(control.to_dict() | new | {"message": f"{found.opened.total()} rows are open again"})

    return catalog.change_control(spec.job_id, change)


def _without(final: dict[str, Any], found: _Found) -> dict[str, Any]:
    """Sums of an ended job less the rows that are open again."""
    left = {**final, "errors": dict(final.get("errors", {})), "finished": 0}
    left.pop("engines", None)  # told again when the job has completed
    for name, amount in (("tokens", found.tokens), ("bytes", found.bytes)):
        left[name] = max(int(left.get(name, 0)) - amount, 0)
    for (state, code), rows in found.opened.items():
        left[state] = max(int(left.get(state, 0)) - rows, 0)
        left["errors"][code] = left["errors"].get(code, 0) - rows
    left["errors"] = {code: n for code, n in left["errors"].items() if n > 0}
    return left
