"""A job's small files: job.json (never changes), control.json (what is wanted and where it stands), and listing jobs.

Invariant: an acknowledged job has job.json and plan.parquet on disk; job.json is written last, so a folder without one was
never acknowledged.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..contracts import SCHEMA_VERSION
from ..contracts.errors import ErrorCode, RequestError, StoreError
from ..contracts.layout import CONTROL, JOB, JOBS, PLAN
from ..contracts.records import Batch, JobControl, JobSpec
from .fs import create_file, make_dirs, read_json, replace_file, to_json
from .plan import write_plan


def create_job(store: Path, spec: JobSpec, batches: list[Batch]) -> Path:
    """Write plan, control and job.json durably; the job's folder is returned.

    Creating the same job again is no error. Raises StoreError: ``plan_mismatch`` where a different job has this id.
    """
    path = store / JOBS / spec.job_id
    make_dirs(path)
    write_plan(path, batches)
    create_file(path / CONTROL, to_json(JobControl(updated_at=spec.created_at).to_dict()))
    if not create_file(path / JOB, to_json(spec.to_dict())) and load_job(path) != spec:
        raise StoreError(ErrorCode.PLAN_MISMATCH, f"job {spec.job_id} is there and differs from what was asked for")
    return path


def load_job(path: Path) -> JobSpec:
    """Every reader of a job comes by here.

    Raises:
        RequestError: ``not_found`` where there is no such job.
        StoreError: ``protocol_mismatch`` for one of a later schema version, whose files could mean something else.
    """
    data = read_json(path / JOB)
    if data is None:
        raise RequestError(ErrorCode.NOT_FOUND, f"no job at {path.name}")
    version = data.get("schema_version", SCHEMA_VERSION)
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        message = f"{path.name} is of schema version {version}, and this Statetap reads up to {SCHEMA_VERSION}"
        raise StoreError(ErrorCode.PROTOCOL_MISMATCH, message, next_step="Use the Statetap that made the job, or a later one.")
    return JobSpec.from_dict(data)


def load_control(path: Path) -> JobControl:
    return JobControl.from_dict(read_json(path / CONTROL) or {})


def save_control(path: Path, control: JobControl) -> None:
    """Only the coordinator calls this: one writer."""
    replace_file(path / CONTROL, to_json(control.to_dict()))


def list_jobs(store: Path) -> list[str]:
    """Ids of all acknowledged jobs, sorted."""
    try:
        names = os.listdir(store / JOBS)
    except FileNotFoundError:
        return []
    return sorted(n for n in names if not n.startswith(".") and (store / JOBS / n / JOB).exists() and (store / JOBS / n / PLAN).exists())
