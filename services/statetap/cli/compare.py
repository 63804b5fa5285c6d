"""Which files of a job ``statetap parity`` compares: done rows spread over the job, by the manifest (or the ledger of a job that runs)."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from ..contracts.errors import ErrorCode, RequestError
from ..contracts.layout import MANIFEST
from ..engine.parity import Parity, Reference, compare_files
from ..store.jobs import load_job
from ..store.ledger import JobLedger


def compare_job(job_dir: Path, model: str, *, samples: int, trust_remote_code: bool = False) -> Parity:
    """Raises RequestError ``not_found`` when no row is done."""
    paths = _done_paths(job_dir)
    if not paths:
        raise RequestError(ErrorCode.NOT_FOUND, f"{job_dir} has no row that is done")
    step = max(1, len(paths) // samples)
    chosen = [job_dir / p for p in paths[::step][:samples]]
    return compare_files(chosen, load_job(job_dir).capture_profile, Reference(model, trust_remote_code=trust_remote_code))


def _done_paths(job_dir: Path) -> list[str]:
    if (job_dir / MANIFEST).exists():
        table = pq.read_table(job_dir / MANIFEST, columns=["state", "path"], filters=[("state", "=", "done")])
        return table.column("path").to_pylist()
    ledger = JobLedger(job_dir)
    records = (r for batch in ledger.batches() for r in ledger.records(batch).values())
    return [r.path for r in sorted(records, key=lambda r: r.row) if r.state == "done"]
