"""rows.arrow: the normalised token rows of a dataset, one row for every source row, bad ones included (with their code).

Invariant: row r stands in record batch r // 64, so any row is reached without reading others, and nothing but the pages touched
is in memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..contracts.errors import ErrorCode, StoreError
from ..contracts.layout import ROWS_PER_RECORD_BATCH
from ..contracts.positions import ALL, Positions
from .positions import Counts, count_kept

SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("source_id", pa.string(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),  # 1-based line (JSONL) or element (JSON array) of the source
        pa.field("error_code", pa.string(), nullable=False),  # "" for a good row
        pa.field("error_message", pa.string(), nullable=False),
        pa.field("source", pa.int32(), nullable=False),  # which source file, where a dataset is merged from several
    ],
    metadata={"statetap_schema": "1"},
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row. ``input_ids`` [T] int32 and ``loss_mask`` [T] uint8 are views into the mapped file."""

    row: int
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    source_id: str
    line: int
    error_code: str
    error_message: str
    source: int


class RowsFile:
    """Random access to rows.arrow, mapped. Raises StoreError (``store_io``) when the file is not one.

    Pages that were touched count as this process's memory until :meth:`release`; views of rows stay valid over it.
    """

    def __init__(self, path: Path) -> None:
        try:
            with open(path, "rb") as file:
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._file = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(self._mapped)))
        except (OSError, ValueError) as e:  # pa.ArrowInvalid is a ValueError
            raise StoreError(ErrorCode.STORE_IO, f"{path} is not a rows file: {e}") from e
        n = self._file.num_record_batches
        self.rows = 0 if n == 0 else (n - 1) * ROWS_PER_RECORD_BATCH + self._file.get_batch(n - 1).num_rows

    def close(self) -> None:
        """The mapping goes when the last view of a row does. Idempotent."""
        for name in ("_file", "_mapped"):
            vars(self).pop(name, None)

    def release(self) -> None:
        """Let go of the pages touched so far; they stay in the page cache, as any file's. For whoever reads the whole file."""
        self._mapped.madvise(mmap.MADV_DONTNEED)

    def take(self, rows: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """A copy of these rows, in this order."""
        parts = [self._file.get_batch(r // ROWS_PER_RECORD_BATCH).slice(r % ROWS_PER_RECORD_BATCH, 1) for r in rows.tolist()]
        return pa.concat_batches(parts)

    def read(self, start: int, stop: int) -> Iterator[Row]:
        """Rows [start, stop)."""
        for b in range(start // ROWS_PER_RECORD_BATCH, -(-stop // ROWS_PER_RECORD_BATCH)):
            base = b * ROWS_PER_RECORD_BATCH
            batch = self._file.get_batch(b)
            ids, masks, source_id, line, code, message, source = (batch.column(i) for i in range(7))
            for i in range(max(start - base, 0), min(stop - base, batch.num_rows)):
                yield Row(
                    row=base + i,
                    input_ids=ids[i].values.to_numpy(),
                    loss_mask=masks[i].values.to_numpy(),
                    source_id=source_id[i].as_py(),
                    line=line[i].as_py(),
                    error_code=code[i].as_py(),
                    error_message=message[i].as_py(),
                    source=source[i].as_py(),
                )

    def source_ids(self, start: int, stop: int) -> list[str]:
        """Source ids of rows [start, stop), without making a Row of each."""
        found: list[str] = []
        for b in range(start // ROWS_PER_RECORD_BATCH, -(-stop // ROWS_PER_RECORD_BATCH)):
            base = b * ROWS_PER_RECORD_BATCH
            column = self._file.get_batch(b).column(2)
            found += column.slice(max(start - base, 0), min(stop - base, ROWS_PER_RECORD_BATCH) - max(start - base, 0)).to_pylist()
        return found

    def lengths(self) -> Iterator[Counts]:
        """Token counts of the rows of each record batch in order; 0 for a row that has an error."""
        for b in range(self._file.num_record_batches):
            batch = self._file.get_batch(b)
            yield np.where(_good(batch), pc.list_value_length(batch.column(0)).to_numpy(zero_copy_only=False).astype(np.int64), 0)

    def counts(self, positions: Positions) -> Iterator[tuple[Counts, Counts]]:
        """:meth:`lengths`, and of the tokens those at ``positions``."""
        if positions.kind == ALL:
            yield from ((lengths, lengths) for lengths in self.lengths())
            return
        for b in range(self._file.num_record_batches):
            batch = self._file.get_batch(b)
            masks, good = batch.column(1), _good(batch)
            offsets = masks.offsets.to_numpy().astype(np.int64)
            kept = count_kept(positions, masks.flatten().to_numpy(), offsets - offsets[0])
            yield np.where(good, np.diff(offsets), 0), np.where(good, kept, 0)


def _good(batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    good: npt.NDArray[np.bool_] = pc.equal(batch.column(4), "").to_numpy(zero_copy_only=False)
    return good
