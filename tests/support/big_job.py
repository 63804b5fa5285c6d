"""A job of very many rows, most of them done, as a stack that was stopped leaves it: rows file, plan, ledger, and a file of the right size
for every done row (hard links of a few inodes, so that a million of them take little room)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa

from statetap.contracts.layout import DATASETS, LEDGER, ROWS, ROWS_PER_FOLDER, ROWS_PER_RECORD_BATCH, folder, sample
from statetap.contracts.profile import CaptureProfile
from statetap.contracts.records import RowRecord
from statetap.contracts.sample_format import SampleFormat
from statetap.store.ledger import encode
from statetap.store.rows import SCHEMA
from tests.support.jobs import make_job

TOKENS = 8
LINKS_AN_INODE = 60_000  # ext4 allows 65,000


def write_many_rows(path: Path, count: int) -> None:
    """Streaming: memory is that of one record batch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(3)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        for start in range(0, count, ROWS_PER_RECORD_BATCH):
            n = min(ROWS_PER_RECORD_BATCH, count - start)
            offsets = pa.array(np.arange(n + 1, dtype=np.int32) * TOKENS)
            ids = pa.array(random.integers(1, 30_000, n * TOKENS, dtype=np.int32))
            columns = [
                pa.ListArray.from_arrays(offsets, ids),
                pa.ListArray.from_arrays(offsets, pa.array(np.ones(n * TOKENS, np.uint8))),
                pa.array([f"id-{row}" for row in range(start, start + n)]),
                pa.array(np.arange(start + 1, start + n + 1, dtype=np.int64)),
                pa.array([""] * n),
                pa.array([""] * n),
                pa.array(np.zeros(n, np.int32)),
            ]
            writer.write_batch(pa.record_batch(columns, schema=SCHEMA))


def make_big_job(store: Path, profile: CaptureProfile, count: int, done: int) -> Path:
    """The folder of a job of ``count`` rows of which the first ``done`` are done."""
    write_many_rows(store / DATASETS / "ds-test" / ROWS, count)
    job_dir, _, batches = make_job(store, profile, ())
    size = SampleFormat(profile).bytes(TOKENS)
    (job_dir / LEDGER).mkdir()
    base = ""
    for batch in batches:
        rows = range(batch.start, min(batch.stop, done))
        lines = []
        for row in rows:
            if row % ROWS_PER_FOLDER == 0:
                (job_dir / folder(row)).mkdir()
            path = f"{job_dir}/{sample(row)}"
            if row % LINKS_AN_INODE == 0:
                base = path
                Path(base).write_bytes(bytes(size))
            else:
                os.link(base, path)
            record = RowRecord(row=row, state="done", tokens=TOKENS, bytes=size, path=sample(row), xxh3="0123456789abcdef", at=1.0)
            lines.append(encode(record))
        if lines:
            (job_dir / LEDGER / f"{batch.batch}.{batch.batch:016x}.jsonl").write_bytes(b"".join(lines))
    return job_dir
