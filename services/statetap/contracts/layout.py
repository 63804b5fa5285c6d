"""Where things lie in the store, as relative POSIX paths. See design.md, 'The store'."""

from __future__ import annotations

import re

SAMPLE_NAME = re.compile(r"data_(?P<row>\d+)(?:\.g(?P<generation>\d+))?\.safetensors(?:\.zst)?")
"""A sample file's name."""

JOB_ID = re.compile(r"job-[0-9a-f]{16}")
"""Of every job: a folder of the store, and of a bucket."""

ROWS_PER_FOLDER = 2000
ROWS_PER_RECORD_BATCH = 64  # of rows.arrow: row r stands in record batch r // 64

DATASETS = "datasets"
JOBS = "jobs"
IDEMPOTENCY = "idempotency"
DELETED = "deleted"  # <job>.json: where a deleted job's objects stood

# of a dataset
RAW = "raw"
ROWS = "rows.arrow"
ROWS_INDEX = "rows.idx"
REPORT = "report.json"
DATASET_SPEC = "dataset.json"

# of a job
JOB = "job.json"
CONTROL = "control.json"
PLAN = "plan.parquet"
NORM = "norm.safetensors"
LEDGER = "ledger"
RETRIES = "retries"
ACKS = "acks.json"
MANIFEST = "manifest.parquet"
COMPLETE = "COMPLETE"


def dataset_dir(dataset_id: str) -> str:
    return f"{DATASETS}/{dataset_id}"


def job_dir(job_id: str) -> str:
    return f"{JOBS}/{job_id}"


def folder(row: int) -> str:
    """Half-open: ``rows_0-2000`` holds rows 0 to 1,999."""
    start = row - row % ROWS_PER_FOLDER
    return f"rows_{start}-{start + ROWS_PER_FOLDER}"


def sample(row: int, generation: int = 0, suffix: str = "") -> str:
    """``rows_0-2000/data_17.safetensors``; a repaired file of generation g > 0 is ``data_17.g1.safetensors``; ``suffix``: of its format."""
    part = f".g{generation}" if generation else ""
    return f"{folder(row)}/data_{row}{part}.safetensors{suffix}"


def retry(generation: int) -> str:
    return f"{RETRIES}/{generation}.json"


def ledger_segment(batch: int, attempt: str) -> str:
    """One writer each: the attempt is the lease id."""
    return f"{LEDGER}/{batch}.{attempt}.jsonl"


TEMP_PREFIX = ".tmp-"


def temp(final: str, attempt: str) -> str:
    """Temp name beside a final name; carries the attempt, so that no two writers share one."""
    head, _, tail = final.rpartition("/")
    return f"{head}/{TEMP_PREFIX}{attempt}-{tail}" if head else f"{TEMP_PREFIX}{attempt}-{tail}"
