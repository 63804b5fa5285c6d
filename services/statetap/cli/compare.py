"""Which files of a job ``statetap parity`` compares: done rows spread over the job, by the manifest (or the ledger of a job that runs)."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from ..contracts.errors import ErrorCode, RequestError
from ..contracts.layout import MANIFEST
from ..engine.lmhead import HeadParity, compare_head
from ..engine.parity import Parity, Reference, compare_files
from ..store.jobs import load_job
from ..store.ledger import JobLedger


def compare_job(job_dir: Path, model: str, *, samples: int, tolerance: float | None = None, trust_remote_code: bool = False) -> Parity:
    """Against transformers. Raises RequestError ``not_found`` when no row is done."""
    chosen, reference = _chosen(job_dir, samples), Reference(model, trust_remote_code=trust_remote_code)
    return compare_files(chosen, load_job(job_dir).capture_profile, reference, tolerance=tolerance)


def compare_job_head(job_dir: Path, model: str, url: str, *, samples: int, tolerance: float | None = None) -> HeadParity:
    """Against what the engine at ``url`` reports. Raises RequestError, EngineError."""
    return compare_head(_chosen(job_dir, samples), load_job(job_dir).capture_profile, Path(model), url, tolerance=tolerance)


def _chosen(job_dir: Path, samples: int) -> list[Path]:
    paths = _done_paths(job_dir)
    if not paths:
        raise RequestError(ErrorCode.NOT_FOUND, f"{job_dir} has no row that is done")
    step = max(1, len(paths) // samples)
    return [job_dir / p for p in paths[::step][:samples]]


def _done_paths(job_dir: Path) -> list[str]:
    if (job_dir / MANIFEST).exists():
        table = pq.read_table(job_dir / MANIFEST, columns=["state", "path"], filters=[("state", "=", "done")])
        return table.column("path").to_pylist()
    ledger = JobLedger(job_dir)
    records = (r for batch in ledger.batches() for r in ledger.records(batch).values())
    return [r.path for r in sorted(records, key=lambda r: r.row) if r.state == "done"]
