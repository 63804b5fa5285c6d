"""Pages of a job's rows, straight from the ledger, batch by batch.

Invariant: a page costs at most SCAN_BATCHES batches of looking and PARSE_BATCHES of parsing, whatever the job's size; it may end before it
is full, and the next one begins where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Literal, TypeVar

from ..contracts.errors import ErrorCode, RequestError
from ..contracts.records import JobSpec, RowRecord, RowState
from ..store.fs import store_error
from ..store.ledger import JobLedger, may_have_errors
from . import models
from .catalog import Catalog
from .totals import PlanIndex

SCAN_BATCHES = 256
PARSE_BATCHES = 32  # of up to 2,000 rows

State = Literal["done", "failed", "skipped", "open"]
Item = TypeVar("Item", RowRecord, models.Row)


def cursor_row(cursor: str | None, spec: JobSpec) -> int:
    """The row that a cursor says was looked at last; -1 without one. Raises RequestError."""
    if cursor is None:
        return -1
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 20 and int(cursor) < spec.rows):
        raise RequestError(ErrorCode.INVALID_REQUEST, "cursor: not one of this job", field="cursor")
    return int(cursor)


def walk(
    catalog: Catalog, spec: JobSpec, *, after: int, limit: int, read: Callable[[PlanIndex, JobLedger, int], Iterable[Item] | None]
) -> tuple[list[Item], str | None]:
    """Up to ``limit`` items of rows > ``after``, and the next cursor (None: that was the last page).

    ``read`` gives a batch's items in order of their rows, or None where it could pass the batch over without parsing it.

    Raises StoreError.
    """
    plan = catalog.plan(spec.job_id)
    found: list[Item] = []
    try:
        ledger = JobLedger(catalog.job_path(spec.job_id))
        batch = plan.batch_of(after + 1)
        stop, parsed = min(batch + SCAN_BATCHES, len(plan)), 0
        while batch < stop and parsed < PARSE_BATCHES and len(found) <= limit:
            items = read(plan, ledger, batch)
            if items is not None:
                parsed += 1
                found += islice((i for i in items if i.row > after), limit + 1 - len(found))
            batch += 1
    except OSError as e:
        raise store_error(e, f"read the ledger of {spec.job_id}") from e
    if len(found) > limit:
        return found[:limit], str(found[limit - 1].row)
    return found, str(int(plan.starts[batch]) - 1) if batch < len(plan) else None


def row_page(catalog: Catalog, spec: JobSpec, *, after: int, limit: int, state: State | None) -> models.RowList:
    """Rows > ``after`` in this state (None: all). Raises StoreError."""

    def read(plan: PlanIndex, ledger: JobLedger, batch: int) -> Iterable[models.Row] | None:
        segments = ledger.segments(batch)
        if not segments and state not in ("open", None):
            return None
        if state in ("failed", "skipped") and not any(map(may_have_errors, segments)):
            return None
        records = ledger.records(batch)
        rows = range(int(plan.starts[batch]), int(plan.stops[batch]))
        return (_row(row, records.get(row)) for row in rows if state is None or state == _state(records.get(row)))

    items, cursor = walk(catalog, spec, after=after, limit=limit, read=read)
    return models.RowList(items=items, next_cursor=cursor)


def error_records(catalog: Catalog, spec: JobSpec, *, after: int, limit: int, code: str | None) -> tuple[list[RowRecord], str | None]:
    """Records of failed and skipped rows > ``after``, all or with one code. Raises StoreError."""

    def read(_: PlanIndex, ledger: JobLedger, batch: int) -> Iterable[RowRecord] | None:
        if not any(map(may_have_errors, ledger.segments(batch))):
            return None
        records = sorted(ledger.records(batch).items())
        return (r for _, r in records if r.state != RowState.DONE and (code is None or r.code == code))

    return walk(catalog, spec, after=after, limit=limit, read=read)


def _state(record: RowRecord | None) -> str:
    return record.state if record is not None else "open"


def _row(row: int, record: RowRecord | None) -> models.Row:
    return models.Row(row=row, state="open") if record is None else models.Row(**vars(record))
