"""rows.arrow written a second time in the order of a permutation.

Invariant: row r of the new file is row ``permutation.forward(r)`` of the old one, column for column. Of the old file nothing but the
pages just read is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..contracts.layout import ROWS_PER_RECORD_BATCH
from ..store.rows import RowsFile
from .permutation import Permutation

_RELEASE_BYTES = 32 << 20
_AROUND = 64 << 10  # the kernel maps so much around each page that is touched
_TOUCHES = 4  # of a row: its ids, its mask, its texts, the header of its batch


def shuffled(path: Path, permutation: Permutation) -> Iterator[pa.RecordBatch]:
    """The record batches of the new file, in order. Raises StoreError."""
    rows = RowsFile(path)
    touched = 0
    for start in range(0, permutation.n, ROWS_PER_RECORD_BATCH):
        batch = rows.take(permutation.forward(np.arange(start, min(start + ROWS_PER_RECORD_BATCH, permutation.n))))
        touched += batch.nbytes + len(batch) * _TOUCHES * _AROUND
        if touched > _RELEASE_BYTES:
            touched = 0
            rows.release()
        yield batch
    rows.close()
