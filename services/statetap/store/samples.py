"""Where the sample files of a job stand: in the job's folder, or as objects of a bucket. A file's name is its path below the job's folder.

Invariant: a file that is seen under its name is whole. Everything here raises OSError (FileNotFoundError for no such file), whatever the
kind, so that callers treat both alike. Records (job.json, ledger, manifest) always stand in the folder: docs/adr/0022.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Union

import numpy as np
import pyarrow as pa

from ..contracts.records import JobSpec
from .check import Bytes
from .fs import fsync_dir, remove

if TYPE_CHECKING:  # its library is slow to import, and who has no bucket needs it not
    from .bucket import BucketSamples

SizeOf = Callable[[str], int | None]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """``last``: no other job holds the same bytes, so they go with this name."""

    name: str
    size: int
    last: bool = True


class Opens(Protocol):
    def open(self, name: str) -> pa.NativeFile:
        """To be read in part: of an object what is read is fetched, by a request each time. See :func:`fetched` for all of it."""
        ...


class Reads(Opens, Protocol):
    def map(self, name: str) -> Bytes:
        """All of a file. It must not be cut short while it is looked at."""
        ...

    def place(self, name: str) -> str:
        """For a person."""
        ...


@dataclass(frozen=True)
class Held:
    """A file that was mapped already. ``where``: its place."""

    data: Bytes
    where: str = ""

    def open(self, name: str) -> pa.NativeFile:
        return pa.BufferReader(pa.py_buffer(self.data))

    def map(self, name: str) -> Bytes:
        return self.data

    def place(self, name: str) -> str:
        return self.where or name


class SampleStore(Reads, Protocol):
    """Thread-safe."""

    def entries(self, folder: str, keep: Callable[[str], bool]) -> Iterator[Entry]:
        """Those of one of the job's folders whose name in it is to be kept, in no order. Nothing where there is no such folder."""
        ...

    def sizes(self) -> SizeOf:
        """For one pass over many names in the order of rows: the size by name, None for no such file."""
        ...

    def remove(self, name: str) -> None:
        """No error where it is not there."""
        ...

    def remove_many(self, names: Iterable[str]) -> None: ...

    def settle(self, folder: str) -> None:
        """Names that came into a folder stay after a loss of power."""
        ...


class FolderSamples:
    """Files below the job's folder."""

    def __init__(self, job_dir: Path) -> None:
        self.root = job_dir

    def open(self, name: str) -> pa.NativeFile:
        return pa.OSFile(str(self.root / name))

    def map(self, name: str) -> Bytes:
        with open(self.root / name, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            return np.frombuffer(mmap.mmap(f.fileno(), size, prot=mmap.PROT_READ), np.uint8) if size else np.empty(0, np.uint8)

    def entries(self, folder: str, keep: Callable[[str], bool]) -> Iterator[Entry]:
        try:
            entries = os.scandir(self.root / folder)
        except FileNotFoundError:
            return
        with entries:
            for entry in entries:
                if keep(entry.name):
                    found = entry.stat()
                    yield Entry(name=f"{folder}/{entry.name}", size=found.st_size, last=found.st_nlink == 1)

    def sizes(self) -> SizeOf:
        def size_of(name: str) -> int | None:
            try:
                return os.stat(self.root / name).st_size
            except FileNotFoundError:
                return None

        return size_of

    def remove(self, name: str) -> None:
        remove(self.root / name)

    def remove_many(self, names: Iterable[str]) -> None:
        for name in names:
            self.remove(name)

    def place(self, name: str) -> str:
        return str(self.root / name)

    def settle(self, folder: str) -> None:
        fsync_dir(self.root / folder)


Samples = Union[FolderSamples, "BucketSamples"]


def samples_of(job_dir: Path, spec: JobSpec) -> Samples:
    """Raises RequestError for a place that is none."""
    if not spec.samples:
        return FolderSamples(job_dir)
    from .bucket import BucketSamples  # as above

    return BucketSamples(spec.samples)


def fetched(samples: Reads, name: str) -> Reads:
    """To read all of a file, or more than once: what does not lie on a file system is fetched here, and not again. Raises OSError."""
    return samples if isinstance(samples, (FolderSamples, Held)) else Held(samples.map(name), samples.place(name))
