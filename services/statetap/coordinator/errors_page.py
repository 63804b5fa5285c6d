"""Pages of a job's failed and skipped rows, straight from the ledger, batch by batch.

Invariant: a page costs at most SCAN_BATCHES batches of reading whatever the job's size; batches without an error are not parsed.
"""

from __future__ import annotations

from pathlib import Path

from ..contracts.errors import SPECS, ErrorCode, StoreError
from ..contracts.layout import ROWS
from ..contracts.records import JobSpec, RowRecord, RowState
from ..store.fs import store_error
from ..store.ledger import fold, segments_by_batch
from ..store.rows import RowsFile
from . import models
from .catalog import Catalog

SCAN_BATCHES = 256
_MARKS = (b'"failed"', b'"skipped"')


def error_page(catalog: Catalog, spec: JobSpec, *, after: int, limit: int, code: str | None) -> models.RowErrorList:
    """Rows > ``after`` in order. Raises StoreError."""
    plan = catalog.plan(spec.job_id)
    try:
        segments = segments_by_batch(catalog.job_path(spec.job_id))
        found: list[RowRecord] = []
        batch = plan.batch_of(after + 1)
        stop = min(batch + SCAN_BATCHES, len(plan))
        while batch < stop and len(found) <= limit:
            paths = segments.get(batch, [])
            if any(_may_have_errors(p) for p in paths):
                records = fold(paths)
                found += [
                    r for row, r in sorted(records.items()) if row > after and r.state != RowState.DONE and (code is None or r.code == code)
                ]
            batch += 1
    except OSError as e:
        raise store_error(e, f"read the ledger of {spec.job_id}") from e
    if len(found) > limit:
        found = found[:limit]
        cursor: int | None = found[-1].row
    else:
        # The page can end before the job: the next one begins where this one stopped looking.
        cursor = int(plan.starts[batch]) - 1 if batch < len(plan) else None
    return models.RowErrorList(items=_describe(catalog, spec, found), next_cursor=None if cursor is None else str(cursor))


def _may_have_errors(path: Path) -> bool:
    """A look at the bytes, some hundred times faster than parsing; a segment is one batch's, so it is small."""
    data = path.read_bytes()
    return any(mark in data for mark in _MARKS)


def _describe(catalog: Catalog, spec: JobSpec, records: list[RowRecord]) -> list[models.RowError]:
    if not records:
        return []
    try:
        rows: RowsFile | None = RowsFile(catalog.dataset_path(spec.dataset_id) / ROWS)
    except StoreError:
        rows = None  # the dataset was removed after the job: its errors are still worth reading
    try:
        return [_one(r, rows) for r in records]
    finally:
        if rows is not None:
            rows.close()


def _one(record: RowRecord, rows: RowsFile | None) -> models.RowError:
    source = next(iter(rows.read(record.row, record.row + 1)), None) if rows is not None else None
    known = SPECS.get(ErrorCode(record.code)) if record.code in ErrorCode.__members__.values() else None
    return models.RowError(
        row=record.row,
        line=source.line if source else None,
        source_id=source.source_id if source else None,
        state="failed" if record.state == RowState.FAILED else "skipped",
        code=record.code,
        message=record.message,
        retryable=known.retryable if known else False,
        next_step=known.next_step if known else "",
        generation=record.generation,
    )
