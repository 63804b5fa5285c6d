"""Pages of a job's failed and skipped rows, with where they stand in the source and what to do about them.

Invariant: a page is read as rows_page.py reads; of the dataset only the rows of the page are touched.
"""

from __future__ import annotations

from ..contracts.errors import SPECS, ErrorCode, RequestError, StoreError
from ..contracts.layout import ROWS
from ..contracts.records import JobSpec, RowRecord, RowState
from ..store.rows import RowsFile
from . import models
from .catalog import Catalog
from .rows_page import error_records


def error_page(catalog: Catalog, spec: JobSpec, *, after: int, limit: int, code: str | None) -> models.RowErrorList:
    """Rows > ``after`` in order. Raises StoreError."""
    found, cursor = error_records(catalog, spec, after=after, limit=limit, code=code)
    return models.RowErrorList(items=_describe(catalog, spec, found), next_cursor=cursor)


def _describe(catalog: Catalog, spec: JobSpec, records: list[RowRecord]) -> list[models.RowError]:
    if not records:
        return []
    try:
        labels = catalog.dataset(spec.dataset_id).labels
        rows: RowsFile | None = RowsFile(catalog.dataset_path(spec.dataset_id) / ROWS)
    except (RequestError, StoreError):
        rows, labels = None, []  # the dataset was removed after the job: its errors are still worth reading
    try:
        return [_one(r, rows, labels) for r in records]
    finally:
        if rows is not None:
            rows.close()


def _one(record: RowRecord, rows: RowsFile | None, labels: list[str]) -> models.RowError:
    source = next(iter(rows.read(record.row, record.row + 1)), None) if rows is not None else None
    known = SPECS.get(ErrorCode(record.code)) if record.code in ErrorCode.__members__.values() else None
    return models.RowError(
        row=record.row,
        line=source.line if source else None,
        file=labels[source.source] if source and labels else None,
        source_id=source.source_id if source else None,
        state="failed" if record.state == RowState.FAILED else "skipped",
        code=record.code,
        message=record.message,
        retryable=known.retryable if known else False,
        next_step=known.next_step if known else "",
        generation=record.generation,
    )
