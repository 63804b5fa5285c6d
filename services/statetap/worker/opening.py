"""The beginning of an attempt: what is done already, and what an earlier job has done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from ..contracts.records import Batch, JobSpec
from ..store.resume import Resumed, resume_batch
from ..store.reuse import reuse_rows
from ..store.rows import RowsFile
from ..store.samples import Samples
from .settings import WorkerSettings


def open_batch(
    settings: WorkerSettings,
    job_dir: Path,
    spec: JobSpec,
    batch: Batch,
    rows: RowsFile,
    attempt: str,
    samples: Samples,
    stopped: Callable[[], bool],
) -> Resumed:
    """Resume the batch, then take over what earlier jobs have of its open rows, until ``stopped``: objects of a bucket take their time.

    The caller holds the lease. Raises StoreError.
    """
    format = spec.sample_format
    resumed = resume_batch(job_dir, format, batch, rows, attempt, samples)
    todo = resumed.open_rows
    if not (spec.reuse_from and todo):
        return resumed
    # A row that was opened again is captured anew: what an earlier job has may be the same damaged file, by hard link.
    found = takewhile(lambda _: not stopped(), rows.read(min(todo), max(todo) + 1))
    wanted = (r for r in found if todo.get(r.row) == 0 and len(r.input_ids) <= spec.longest)
    limits = {"threads": settings.put_threads, "memory": settings.put_bytes}
    taken = reuse_rows(settings.store, job_dir, format, spec.reuse_from, batch.batch, attempt, wanted, todo, samples, **limits)
    if not taken:
        return resumed
    records = resumed.records | {r.row: r for r in taken}
    return replace(resumed, records=records, open_rows={n: g for n, g in todo.items() if n not in records}, reused=len(taken))
