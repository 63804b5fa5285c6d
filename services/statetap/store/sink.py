"""What the bytes of a sample are written to while they are checked: a temp file beside its final name, or memory on the way into a bucket."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from .fs import write_all

WRITE_BACK = 4 << 20  # bytes written before the disk is told to begin with them


class Sink(Protocol):
    def write(self, data: Any) -> None:
        """Anything with the buffer protocol. Raises OSError."""
        ...

    def flush(self) -> None:
        """All is written."""
        ...


class FileSink:
    """An open file, from its beginning on. The disk starts early, so that the committer's fsync has little to wait for."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._written = self._written_back = 0

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        write_all(self.fd, view)
        self._written += len(view)
        if self._written - self._written_back >= WRITE_BACK:
            os.posix_fadvise(self.fd, self._written_back, self._written - self._written_back, os.POSIX_FADV_DONTNEED)
            self._written_back = self._written

    def flush(self) -> None:
        os.posix_fadvise(self.fd, self._written_back, 0, os.POSIX_FADV_DONTNEED)


class MemorySink:
    """The whole sample in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Any) -> None:
        self.data += memoryview(data).cast("B")

    def flush(self) -> None:
        pass


PUT_BYTES = 1 << 30  # of samples in memory on their way into a bucket


class Gate:
    """Lets in so many bytes at a time, and one that is larger alone."""

    def __init__(self, size: int) -> None:
        self._size, self._used = size, 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def held(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + size <= self._size)
            self._used += size
        try:
            yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()
