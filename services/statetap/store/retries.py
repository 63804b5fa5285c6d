"""Rows that are opened again: each retry or repair of a job is one small file that says which records count no more.

Invariant: the ledger is never rewritten. A retry names a generation that is higher than any record had when it was made, so what it
opens is a function of the files alone: a crash between its file and anything else changes nothing, and a row that fails again under
its new generation stays failed.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from pathlib import Path

from ..contracts.errors import ErrorCode, StoreError
from ..contracts.layout import RETRIES, retry
from ..contracts.records import Retry, RowRecord, RowState
from .fs import create_file, make_dirs, read_json, store_error, to_json


def load_retries(job_dir: Path) -> tuple[Retry, ...]:
    """All retries of a job, in the order they were made. Raises StoreError."""
    try:
        names = os.listdir(job_dir / RETRIES)
    except FileNotFoundError:
        return ()
    except OSError as e:
        raise store_error(e, f"list the retries of {job_dir.name}") from e
    generations = sorted(int(stem) for name in names if (stem := name.removesuffix(".json")).isdigit() and stem != name)
    found = []
    for generation in generations:
        data = read_json(job_dir / retry(generation))
        if data is None or data.get("generation") != generation:
            raise StoreError(ErrorCode.STORE_IO, f"{job_dir / retry(generation)} is not a retry of generation {generation}")
        found.append(Retry.from_dict(data))
    return tuple(found)


def last_generation(job_dir: Path) -> int:
    """Generation of the newest retry; 0 when there is none. Raises StoreError."""
    retries = load_retries(job_dir)
    return retries[-1].generation if retries else 0


def add_retry(job_dir: Path, value: Retry) -> bool:
    """Durably; False when one of this generation is there. Raises StoreError."""
    make_dirs(job_dir / RETRIES)
    return create_file(job_dir / retry(value.generation), to_json(value.to_dict()))


def opened_by(record: RowRecord, retries: Sequence[Retry]) -> int:
    """The generation that a row with this winning record has to be written with; 0 when the record stands."""
    for r in reversed(retries):
        if r.generation > record.generation and opens(r, record):
            return r.generation
    return 0


def opens(value: Retry, record: RowRecord) -> bool:
    """Whether a retry is about rows like this one, whatever the generations."""
    if value.rows is not None:
        at = bisect.bisect_right(value.rows, record.row, key=lambda r: r[0]) - 1
        return at >= 0 and record.row < value.rows[at][1]
    if value.codes:
        return record.state != RowState.DONE.value and record.code in value.codes
    return record.state == RowState.FAILED.value
