"""Which files of a job ``statetap parity`` compares: done rows spread over the job, by the manifest (or the ledger of a job that runs)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq

from ..contracts.errors import ErrorCode, RequestError
from ..contracts.layout import MANIFEST
from ..contracts.records import JobSpec
from ..contracts.sample_format import Encoding
from ..contracts.tensors import INPUT_IDS, POSITIONS, state_planes
from ..engine.lmhead import HeadParity, compare_head
from ..engine.parity import TOLERANCE, Parity, Reference, Tensors, compare_files
from ..store.jobs import load_job
from ..store.ledger import JobLedger
from ..store.opened import open_sample
from ..store.samples import samples_of

FP8_TOLERANCE = 5e-2
"""FP8 keeps three mantissa bits: about 2.5 % of a plane's norm."""


def compare_job(job_dir: Path, model: str, *, samples: int, tolerance: float | None = None, trust_remote_code: bool = False) -> Parity:
    """Against transformers. Raises RequestError ``not_found`` when no row is done."""
    spec = load_job(job_dir)
    chosen, format = _chosen(job_dir, samples), spec.sample_format
    if tolerance is None and format.encoding == Encoding.FP8:
        tolerance = max(FP8_TOLERANCE, TOLERANCE[format.kept.dtype])
    reference = Reference(model, trust_remote_code=trust_remote_code)
    return compare_files(chosen, format.kept, reference, tolerance=tolerance, load=_loader(job_dir, spec))


def compare_job_head(job_dir: Path, model: str, url: str, *, samples: int, tolerance: float | None = None) -> HeadParity:
    """Against what the engine at ``url`` reports. Raises RequestError, EngineError."""
    spec = load_job(job_dir)
    format = spec.sample_format
    if tolerance is None and format.encoding == Encoding.FP8:
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            "the files hold FP8 states: log probabilities by them are off by more than a mistake of the engine's would be",
            next_step="Give --tolerance, or compare a job that keeps raw states.",
        )
    if format.thinned:
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"positions: the files hold the states of {format.positions} alone, and the engine's log probabilities are those after every token",
            next_step="Compare a job with positions=all.",
        )
    return compare_head(_chosen(job_dir, samples), format.kept, Path(model), url, tolerance=tolerance, load=_loader(job_dir, spec))


def _loader(job_dir: Path, spec: JobSpec) -> Callable[[Path], Tensors]:
    format, samples = spec.sample_format, samples_of(job_dir, spec)
    names = [INPUT_IDS, *([POSITIONS] if format.thinned else []), *(name for name, _ in state_planes(format.kept))]

    def load(path: Path) -> Tensors:
        with open_sample(samples, path.relative_to(job_dir).as_posix(), format) as f:
            return {name: f.get_tensor(name) for name in names}

    return load


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
