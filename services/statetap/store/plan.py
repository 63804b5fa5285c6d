"""The plan of a job: its rows cut into batches, half-open row ranges of about equal work.

A batch is the unit that is leased, retried and resumed, so it is cut by tokens (work), not by rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ..contracts.errors import ErrorCode, StoreError
from ..contracts.layout import PLAN
from ..contracts.records import Batch
from .fs import create_file

MAX_BATCH_TOKENS = 1_000_000  # 20-60 s of prefill on one engine with a big model
MIN_BATCH_TOKENS = 16_384
MAX_BATCH_ROWS = 2_000  # bounds a batch's resume: its ledger segments and one or two folders
BATCHES_WANTED = 16  # of a small job, so that every worker has some


def batch_tokens_for(total_tokens: int) -> int:
    """Tokens a batch: small jobs are cut so that several workers share them, big ones into 20-60 s of work."""
    return max(MIN_BATCH_TOKENS, min(MAX_BATCH_TOKENS, -(-total_tokens // BATCHES_WANTED)))


def cut(lengths: Iterable[npt.NDArray[np.int64]], batch_tokens: int) -> Iterator[Batch]:
    """Batches that cover all rows in order. ``lengths`` are arrays of token counts (0 for rows that are not sent).

    Memory is that of one array; a row longer than ``batch_tokens`` is a batch of its own.
    """
    number, start, row, tokens = 0, 0, 0, 0
    for counts in lengths:
        for n in counts.tolist():
            if row > start and (tokens + n > batch_tokens or row - start >= MAX_BATCH_ROWS):
                yield Batch(batch=number, start=start, stop=row, tokens=tokens)
                number, start, tokens = number + 1, row, 0
            tokens += n
            row += 1
    if row > start:
        yield Batch(batch=number, start=start, stop=row, tokens=tokens)


def write_plan(job_dir: Path, batches: list[Batch]) -> None:
    """plan.parquet, exclusively. Raises StoreError; ``plan_mismatch`` where another plan is there."""
    table = pa.table({name: pa.array([getattr(b, name) for b in batches], pa.int64()) for name in ("batch", "start", "stop", "tokens")})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    if not create_file(job_dir / PLAN, sink.getvalue().to_pybytes()) and read_plan(job_dir) != batches:
        raise StoreError(ErrorCode.PLAN_MISMATCH, f"{job_dir / PLAN} is there and differs")


def read_plan(job_dir: Path) -> list[Batch]:
    """All batches in order: some hundred bytes each, 1,000,000 rows of 2,000 tokens are 2,000 of them."""
    try:
        columns = pq.read_table(job_dir / PLAN, memory_map=True).to_pydict()
    except (OSError, pa.ArrowInvalid) as e:
        raise StoreError(ErrorCode.STORE_IO, f"{job_dir / PLAN}: {e}") from e
    return [
        Batch(batch=b, start=s, stop=e, tokens=t)
        for b, s, e, t in zip(columns["batch"], columns["start"], columns["stop"], columns["tokens"], strict=True)
    ]
