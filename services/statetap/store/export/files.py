"""Files in the making: hashed as they are written, and under their final name only when they are whole and on disk.

Invariant: a temp lies directly in the export's folder and its name has no suffix: trainers take every file with theirs, hidden ones too.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import secrets
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from ...contracts.errors import ErrorCode, RequestError
from ...contracts.layout import TEMP_PREFIX
from ..fs import fsync_dir, make_dirs, remove, write_all

TEMP_LIST = f"{TEMP_PREFIX}list"
_TEMP = re.compile(re.escape(TEMP_PREFIX) + r"(?:[0-9a-f]{16}|list)")


class NewFile(io.RawIOBase):
    """A temp in ``folder``. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self.temp = folder / f"{TEMP_PREFIX}{secrets.token_hex(8)}"
        self._fd = os.open(self.temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._digest = xxhash.xxh3_64()
        self._size = 0
        self.error: OSError | None = None  # of a write: a serialiser may raise one of its own instead

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            write_all(self._fd, view)
        except OSError as e:
            self.error = e
            raise
        self._digest.update(view)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        return self._size

    def finish(self) -> tuple[int, str]:
        """(bytes, xxh3-64) of the file, which is on disk now."""
        os.fsync(self._fd)
        self._close()
        return self._size, self._digest.hexdigest()

    def abandon(self) -> None:
        """Remove it, unless it has its final name. Idempotent."""
        self._close()
        remove(self.temp)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def put(file: NewFile, path: Path) -> None:
    """Give a finished file its name, durably."""
    os.replace(file.temp, path)
    fsync_dir(path.parent)


def write_file(out: Path, path: str, data: bytes) -> None:
    """A small file of the export, whole and durable. Raises OSError."""
    make_dirs((out / path).parent)
    file = NewFile(out)
    try:
        file.write(data)
        file.finish()
        put(file, out / path)
    finally:
        file.abandon()


def is_temp(name: str) -> bool:
    """Whether an export made this name; the store's own temps are called otherwise."""
    return _TEMP.fullmatch(name) is not None


class Folder:
    """An export's folder, made where there is none, and locked: one exporter at a time.

    On file systems without locks it holds nothing. Raises RequestError: ``conflict`` while another process exports into it; OSError.
    """

    def __init__(self, path: Path) -> None:
        make_dirs(path)
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise RequestError(ErrorCode.CONFLICT, f"another process exports into {path}: wait for it, or end it first") from None
        except OSError:
            pass  # no locks here (NFS wants a file that is open for writing)

    def sweep(self) -> None:
        """Remove what a dead exporter left; only when it is known that the folder is an export's."""
        for name in filter(is_temp, os.listdir(self._path)):
            remove(self._path / name)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._fd)
