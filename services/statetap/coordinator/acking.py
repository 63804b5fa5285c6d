"""Readers acknowledge rows of a job with ``retain: until_read``; their files go. Runs in a thread.

Invariant: only rows that have a terminal state can be acknowledged, so nothing that is still to come is ever missed.
"""

from __future__ import annotations

from ..contracts.errors import ErrorCode, RequestError
from ..contracts.records import JobSpec, Retain, RowState
from ..store.acks import Acks, load_acks, merge, save_acks
from ..store.fs import store_error
from ..store.ledger import JobLedger
from ..store.samples import samples_of
from .catalog import Catalog, locked


def acknowledge(catalog: Catalog, spec: JobSpec, rows: list[tuple[int, int]]) -> tuple[int, int]:
    """Free the files of these half-open ranges; (rows, bytes) that this freed. Acknowledging twice does no harm.

    Raises:
        RequestError: ``invalid_request`` for ranges outside the job; ``conflict`` for a job that keeps all its files, or rows that are open.
        StoreError: the acknowledgement cannot be kept; then nothing was freed.
    """
    if spec.retain != Retain.UNTIL_READ:
        raise RequestError(ErrorCode.CONFLICT, "the job keeps its files (retain=all): there is nothing to acknowledge")
    wrong = next((r for r in rows if not 0 <= r[0] <= r[1] <= spec.rows), None)
    if wrong is not None:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"rows: {list(wrong)} is no half-open range within [0, {spec.rows})", field="rows")
    path = catalog.job_path(spec.job_id)
    plan = catalog.plan(spec.job_id)
    with locked(path):
        before = load_acks(path)
        ledger = JobLedger(path)
        freed, size, names = 0, 0, []
        done: list[tuple[int, int]] = []  # not the failed ones: a retry can still bring a file, which nobody has read
        for start, stop in merge(rows):
            row = start
            while row < stop:
                batch = plan.batch_of(row)
                records = ledger.records(batch)
                end = min(stop, int(plan.stops[batch]))
                for number in range(row, end):
                    record = records.get(number)
                    if record is None:
                        raise RequestError(ErrorCode.CONFLICT, f"row {number} is still open: it cannot have been read")
                    if record.state != RowState.DONE.value:
                        continue
                    done.append((number, number + 1))
                    if number not in before:
                        freed, size = freed + 1, size + record.bytes
                    names.append(record.path)  # also of a file that a crash left behind
                row = end
        after = Acks(ranges=merge([*before.ranges, *done]), rows=before.rows + freed, bytes=before.bytes + size)
        if after != before:
            save_acks(path, after)
        samples = samples_of(path, spec)
        try:
            samples.remove_many(names)
        except OSError as e:
            raise store_error(e, "free acknowledged files") from e
    return freed, size
