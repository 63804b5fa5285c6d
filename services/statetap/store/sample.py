"""One sample: from the tap's mapping into a temp file beside its final name, checked and hashed on the way; and checked again.

Invariant: what is staged is complete and passed all checks, but is neither durable nor visible: that is the commit's work
(commit.py). The payload is not copied: it goes from the mapping to the disk by O_DIRECT where the file system has it.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ..contracts import SCHEMA_VERSION
from ..contracts.errors import ErrorCode, RowError
from ..contracts.layout import sample, temp
from ..contracts.profile import CaptureProfile
from ..contracts.records import RowRecord, RowState
from ..contracts.tensors import BLOCK, INPUT_IDS, LOSS_MASK, Header, sample_header, tap_header
from .check import Bytes, check_ids, check_states, check_tap_file
from .fs import make_dirs, remove, store_error, write_all
from .rows import Row

DIRECT_FROM = 512 * 1024  # bytes; below, a read into a warm buffer and one write are as fast and cost less


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A checked sample under its temp name. ``fd`` is open and not yet fsynced; the committer closes it."""

    record: RowRecord
    fd: int
    temp: Path
    final: Path
    tap_file: Path
    row: Row


class SampleWriter:
    """Stages the samples of one attempt at a batch. Thread-safe: several threads write at once."""

    def __init__(self, job_dir: Path, profile: CaptureProfile, attempt: str) -> None:
        self._job_dir = job_dir
        self._profile = profile
        self._attempt = attempt
        self._folders: set[Path] = set()
        self._direct = True  # until the file system says EINVAL
        self._local = threading.local()

    def stage(self, row: Row, generation: int, tap_file: Path) -> Staged:
        """Check the tap file of ``row`` and write it to a temp file.

        Raises:
            RowError: what came is not what was asked for (a code of check.py; ``capture_incomplete`` when there is no file).
            StoreError: ``store_full`` or ``store_io``; nothing is left behind.
        """
        try:
            source = os.open(tap_file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise RowError(ErrorCode.CAPTURE_INCOMPLETE, f"the engine answered, but {tap_file.name} is not in the tap") from None
        try:
            size = os.fstat(source).st_size
            want = tap_header(self._profile, len(row.input_ids))
            if size != want.size:
                # Before it is mapped, so that a short file is an error of the row and not a SIGBUS.
                check_tap_file(want, row.input_ids, np.frombuffer(os.pread(source, min(size, BLOCK), 0), np.uint8), size)
            stage = self._stage_small if size < DIRECT_FROM else self._stage_large
            return stage(row, generation, tap_file, source, want)
        finally:
            os.close(source)

    def _stage_small(self, row: Row, generation: int, tap_file: Path, source: int, want: Header) -> Staged:
        """Through a buffer of this thread: header, states, ids and mask leave by one write."""
        size, ids_at = want.size, want.tensors[INPUT_IDS].start
        buffer: Bytes | None = getattr(self._local, "buffer", None)
        if buffer is None:
            # Room for the mask: one byte a token, and a token has at least 4 bytes of ids in the tap file.
            buffer = self._local.buffer = np.empty(DIRECT_FROM + DIRECT_FROM // 4, np.uint8)
        data = buffer[: size + len(row.loss_mask)]
        if os.preadv(source, [data[:size].data], 0) != size:
            raise RowError(ErrorCode.CAPTURE_INCOMPLETE, f"{tap_file.name} became shorter while it was read")
        check_tap_file(want, row.input_ids, data[:size], size)
        check_states(self._profile, len(row.input_ids), data[BLOCK:ids_at])
        data[:BLOCK] = np.frombuffer(expected_header(self._profile, row), np.uint8)
        data[size:] = row.loss_mask
        xxh3 = xxhash.xxh3_64_hexdigest(data.data)
        return self._write(row, generation, tap_file, len(data), xxh3, [data.data], direct=False)

    def _stage_large(self, row: Row, generation: int, tap_file: Path, source: int, want: Header) -> Staged:
        """From the mapping. It is unmapped when its last view goes: an error's traceback may hold one for a while."""
        size, ids_at = want.size, want.tensors[INPUT_IDS].start
        data = np.frombuffer(mmap.mmap(source, size, prot=mmap.PROT_READ), np.uint8)
        check_tap_file(want, row.input_ids, data, size)
        header = expected_header(self._profile, row)
        digest = xxhash.xxh3_64(header)
        check_states(self._profile, len(row.input_ids), data[BLOCK:ids_at], digest.update)
        # O_DIRECT wants addresses, offsets and lengths in whole blocks: the mapping gives all but the header and the tail.
        whole = size - size % BLOCK
        tail = bytes(data[whole:]) + row.loss_mask.tobytes()
        digest.update(data[ids_at:].data)
        digest.update(row.loss_mask.data)
        edges = mmap.mmap(-1, BLOCK + -(-len(tail) // BLOCK) * BLOCK)
        edges[:BLOCK] = header
        edges[BLOCK : BLOCK + len(tail)] = tail
        view = memoryview(edges)
        parts = [view[:BLOCK], data[BLOCK:whole].data, view[BLOCK:]]
        return self._write(row, generation, tap_file, whole + len(tail), digest.hexdigest(), parts, direct=True)

    def _write(self, row: Row, generation: int, tap_file: Path, size: int, xxh3: str, parts: list[memoryview], *, direct: bool) -> Staged:
        """Write ``parts`` to a temp file and cut it to ``size``."""
        name = sample(row.row, generation)
        final = self._job_dir / name
        tmp = self._job_dir / temp(name, self._attempt)
        try:
            self._make_folder(final.parent)
            fd = self._write_temp(tmp, parts, size, direct=direct and self._direct)
        except OSError as e:
            raise store_error(e, f"write row {row.row}") from e
        record = RowRecord(
            row=row.row,
            state=RowState.DONE.value,
            generation=generation,
            tokens=len(row.input_ids),
            bytes=size,
            path=name,
            xxh3=xxh3,
            at=round(time.time(), 3),
        )
        return Staged(record=record, fd=fd, temp=tmp, final=final, tap_file=tap_file, row=row)

    def _make_folder(self, folder: Path) -> None:
        if folder not in self._folders:
            make_dirs(folder)
            self._folders.add(folder)

    def _write_temp(self, tmp: Path, parts: list[memoryview], size: int, *, direct: bool) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            fd = os.open(tmp, flags | (os.O_DIRECT if direct else 0), 0o644)
        except OSError as e:
            if not direct or e.errno != errno.EINVAL:
                raise
            return self._without_direct(tmp, parts, size)
        try:
            if direct:
                _write_vector(fd, parts)
            else:
                for part in parts:
                    write_all(fd, part)
            if sum(len(part) for part in parts) != size:
                os.ftruncate(fd, size)
            if not direct:
                # Starts the write-back now, so that the committer's fsyncs share one journal commit (0.34 ms a file, not 0.75).
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except BaseException as e:
            os.close(fd)
            remove(tmp)
            if direct and isinstance(e, OSError) and e.errno == errno.EINVAL:
                return self._without_direct(tmp, parts, size)
            raise
        return fd

    def _without_direct(self, tmp: Path, parts: list[memoryview], size: int) -> int:
        self._direct = False
        return self._write_temp(tmp, parts, size, direct=False)


def _write_vector(fd: int, parts: list[memoryview]) -> None:
    """pwritev until all is written; what a short write leaves is tried again."""
    at = 0
    left = [memoryview(part).cast("B") for part in parts]
    while left:
        done = os.pwritev(fd, left, at)
        at += done
        while left and done >= len(left[0]):
            done -= len(left[0])
            left.pop(0)
        if done:
            left[0] = left[0][done:]


def expected_header(profile: CaptureProfile, row: Row) -> bytes:
    """The first 4 KiB of the sample file of ``row``."""
    ids = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(row.input_ids).data)
    return sample_header(
        profile, len(row.input_ids), row=row.row, source_id=row.source_id, ids_xxh3=ids, schema_version=SCHEMA_VERSION
    ).encode()


def check_sample(job_dir: Path, profile: CaptureProfile, row: Row, generation: int) -> RowRecord:
    """Full check of a committed sample file against the row that it should hold; its record, as a ledger line would say it.

    Raises:
        RowError: ``file_missing``, ``file_corrupt``, or a code of check.py: the file is not what it should be.
        StoreError: it cannot be read.
    """
    name = sample(row.row, generation)
    path = job_dir / name
    T = len(row.input_ids)
    header = sample_header(profile, T, row=row.row, source_id="", ids_xxh3="", schema_version=SCHEMA_VERSION)
    try:
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            if size != header.size:
                raise RowError(ErrorCode.FILE_CORRUPT, f"{name} has {size} bytes, not {header.size}")
            # Unmapped when its last view goes: an error's traceback may hold one for a while.
            data = np.frombuffer(mmap.mmap(f.fileno(), size, prot=mmap.PROT_READ), np.uint8)
        if bytes(data[:BLOCK]) != expected_header(profile, row):
            raise RowError(ErrorCode.FILE_CORRUPT, f"{name}: its header is not that of row {row.row}")
        digest = xxhash.xxh3_64(data[:BLOCK].data)
        ids, mask = header.tensors[INPUT_IDS], header.tensors[LOSS_MASK]
        check_states(profile, T, data[BLOCK : ids.start], digest.update)
        check_ids(row.input_ids, data[ids.start : ids.stop])
        if not np.array_equal(data[mask.start : mask.stop], row.loss_mask):
            raise RowError(ErrorCode.FILE_CORRUPT, f"{name}: its loss mask is not that of row {row.row}")
        digest.update(data[ids.start :].data)
    except FileNotFoundError:
        raise RowError(ErrorCode.FILE_MISSING, f"{name} is not there") from None
    except OSError as e:
        raise store_error(e, f"read {name}") from e
    return RowRecord(
        row=row.row,
        state=RowState.DONE.value,
        generation=generation,
        tokens=T,
        bytes=size,
        path=name,
        xxh3=digest.hexdigest(),
        at=round(time.time(), 3),
    )
