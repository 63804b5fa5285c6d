"""An index of a dataset's rows by content: which row has these tokens and this mask.

``rows.idx`` holds 16 bytes a row, the xxh3-64 of (ids, mask) and the row's number, both big-endian, in the order of the bytes. It is
searched in the mapping, so memory does not grow with rows; it is also written so, and sorted in place. A dataset without one (of an
earlier version) can still be asked for equal row numbers.

Invariant: a key is a hint. Whoever takes a row for equal compares ids and mask themselves.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from ..contracts.errors import ErrorCode, StoreError
from ..contracts.layout import ROWS_INDEX, temp
from .fs import fsync_dir, remove, store_error
from .rows import Row, RowsFile

_ENTRY = 16
_FLUSH = 4096  # entries written at once
_RELEASE = 1024  # rows after which the pages that they are in are let go of


def row_key(row: Row) -> bytes:
    """Eight bytes over ids and mask."""
    digest = xxhash.xxh3_64(np.ascontiguousarray(row.input_ids).data)
    digest.update(np.ascontiguousarray(row.loss_mask).data)
    return digest.digest()


def build_index(rows_path: Path) -> None:
    """Write ``rows.idx`` beside rows.arrow. Rows with an error are left out. Raises StoreError."""
    path = rows_path.with_name(ROWS_INDEX)
    tmp = Path(temp(str(path), secrets.token_hex(8)))
    rows = RowsFile(rows_path)
    try:
        with open(tmp, "wb") as f:
            entries = bytearray()
            for row in rows.read(0, rows.rows):
                if not row.error_code:
                    entries += row_key(row) + row.row.to_bytes(8, "big")
                if row.row % _RELEASE == _RELEASE - 1:
                    rows.release()
                if len(entries) >= _FLUSH * _ENTRY:
                    f.write(entries)
                    entries.clear()
            f.write(entries)
        if os.path.getsize(tmp):
            mapped = np.memmap(tmp, dtype=f"S{_ENTRY}", mode="r+")
            mapped.sort()  # in place, in the mapping
            mapped.flush()
            del mapped
        fd = os.open(tmp, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(tmp, path)
        fsync_dir(path.parent)
    except OSError as e:
        raise store_error(e, f"write {ROWS_INDEX}") from e
    finally:
        rows.close()
        remove(tmp)


class KeyIndex:
    """``rows.idx`` of one dataset, mapped."""

    def __init__(self, rows_path: Path) -> None:
        """Raises FileNotFoundError where the dataset has none, StoreError for one that is torn."""
        path = rows_path.with_name(ROWS_INDEX)
        size = os.path.getsize(path)
        if size % _ENTRY:
            raise StoreError(ErrorCode.STORE_IO, f"{path} is not an index: {size} bytes")
        self._entries: npt.NDArray[np.bytes_] = np.memmap(path, dtype=f"S{_ENTRY}", mode="r") if size else np.empty(0, f"S{_ENTRY}")

    def rows(self, key: bytes) -> Iterator[int]:
        """Numbers of the rows with this key, lowest first."""
        at = int(np.searchsorted(self._entries, np.bytes_(key)))
        while at < len(self._entries):
            entry = self._entries[at].ljust(_ENTRY, b"\0")  # numpy drops trailing zeros of byte strings
            if entry[:8] != key:
                return
            yield int.from_bytes(entry[8:], "big")
            at += 1
