"""One sample: from the tap into a temp file beside its final name, checked and hashed on the way; and checked again.

Invariant: what is staged is complete and passed all checks, but is neither durable nor visible: that is the commit's work
(commit.py). One pass: each block is read, looked at, hashed and written while it is in the cache, and the disk starts early
(docs/adr/0007 says why not by O_DIRECT from a mapping of the tap).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from ..contracts import SCHEMA_VERSION
from ..contracts.errors import ErrorCode, RowError
from ..contracts.layout import sample, temp
from ..contracts.records import UNKNOWN_ENGINE, RowRecord, RowState
from ..contracts.sample_format import Encoding, SampleFormat
from ..contracts.tensors import BLOCK, INPUT_IDS, Header, tap_header
from .check import Bytes, StateChecker, check_ids, check_states, check_tap_header, largest_block
from .decode import SampleFile
from .encode import Pieces, encoder
from .fs import make_dirs, remove, store_error
from .positions import kept_positions
from .rows import Row
from .samples import SampleStore, fetched
from .sink import PUT_BYTES, FileSink, Gate, MemorySink, Sink

if TYPE_CHECKING:  # its library is slow to import, and who has no bucket needs it not
    from .bucket import BucketSamples

_HASHED = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A checked sample under its temp name. ``fd`` is open and not yet fsynced; the committer closes it."""

    record: RowRecord
    fd: int
    temp: Path
    final: Path
    tap_file: Path
    row: Row


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A checked sample that is durable under its final name in a bucket, and has no ledger line yet. ``first``: that object is ours."""

    record: RowRecord
    first: bool
    tap_file: Path
    row: Row


class SampleWriter:
    """Stages the samples of one attempt at a batch. Thread-safe: several threads stage at once.

    ``bucket``: where they are put, once checked, in place of the job's folder, from ``memory`` bytes (one row may be more).
    """

    def __init__(
        self, job_dir: Path, format: SampleFormat, attempt: str, bucket: BucketSamples | None = None, memory: int = PUT_BYTES
    ) -> None:
        self._job_dir = job_dir
        self._bucket = bucket
        self._gate = Gate(memory)
        self._format = format
        self._profile = profile = format.captured
        self._attempt = attempt
        self._buffer_bytes = largest_block(profile)
        self._folders: set[Path] = set()
        self._local = threading.local()

    def stage(self, row: Row, generation: int, tap_file: Path) -> Staged | Placed:
        """Check the tap file of ``row`` and write it to a temp file, or put it into the bucket.

        Raises:
            RowError: what came is not what was asked for (a code of check.py; ``capture_incomplete`` when there is no file).
            StoreError: ``store_full`` or ``store_io``. In either case nothing is left behind.
        """
        try:
            source = os.open(tap_file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise RowError(ErrorCode.CAPTURE_INCOMPLETE, f"the engine answered, but {tap_file.name} is not in the tap") from None
        try:
            return self._stage(row, generation, tap_file, source)
        except OSError as e:
            raise store_error(e, f"write row {row.row}") from e
        finally:
            os.close(source)

    def _stage(self, row: Row, generation: int, tap_file: Path, source: int) -> Staged | Placed:
        name = sample(row.row, generation, self._format.suffix)
        want = tap_header(self._profile, len(row.input_ids))
        size = os.fstat(source).st_size
        check_tap_header(want, os.pread(source, BLOCK, 0), size)
        if self._bucket is not None:
            with self._gate.held(size + len(row.loss_mask)):
                memory = MemorySink()
                record = self._record(row, generation, name, *self._write(row, source, want, memory))
                return Placed(record=record, first=self._bucket.put(name, memory.data), tap_file=tap_file, row=row)
        tmp = self._job_dir / temp(name, self._attempt)
        with self._new_file(tmp) as file:
            record = self._record(row, generation, name, *self._write(row, source, want, file))
        return Staged(record=record, fd=file.fd, temp=tmp, final=self._job_dir / name, tap_file=tap_file, row=row)

    def _record(self, row: Row, generation: int, name: str, xxh3: str, size: int) -> RowRecord:
        return RowRecord(
            row=row.row,
            state=RowState.DONE.value,
            generation=generation,
            tokens=len(row.input_ids),
            bytes=size,
            path=name,
            xxh3=xxh3,
            at=round(time.time(), 3),
        )

    def _write(self, row: Row, source: int, want: Header, sink: Sink) -> tuple[str, int]:
        """Check and write all of a sample; (xxh3, bytes) of its file."""
        size = want.size + len(row.loss_mask)
        if not self._format.plain:
            return self._write_encoded(row, source, want, sink)
        write = self._write_small if size <= self._buffer_bytes else self._write_large
        return write(row, source, want, sink), size

    def _buffer(self) -> Bytes:
        """This thread's, warm."""
        buffer: Bytes | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = np.empty(self._buffer_bytes, np.uint8)
        return buffer

    def _write_small(self, row: Row, source: int, want: Header, sink: Sink) -> str:
        """One read, one write."""
        ids = want.tensors[INPUT_IDS]
        data = self._buffer()[: want.size + len(row.loss_mask)]
        _read(source, data[: want.size], 0)
        check_ids(row.input_ids, data[ids.start : ids.stop])
        check_states(self._profile, len(row.input_ids), data)
        data[:BLOCK] = np.frombuffer(expected_header(self._format, row), np.uint8)
        data[want.size :] = row.loss_mask
        sink.write(data.data)
        sink.flush()
        return xxhash.xxh3_64_hexdigest(data.data)

    def _write_large(self, row: Row, source: int, want: Header, sink: Sink) -> str:
        """Block by block: read into this thread's buffer, look, hash and write while it is in the cache."""
        ids = want.tensors[INPUT_IDS]
        tail = np.empty(ids.stop - ids.start + len(row.loss_mask), np.uint8)
        _read(source, tail[: ids.stop - ids.start], ids.start)
        check_ids(row.input_ids, tail[: ids.stop - ids.start])
        tail[ids.stop - ids.start :] = row.loss_mask
        header = expected_header(self._format, row)
        digest = xxhash.xxh3_64(header)
        checker = StateChecker(self._profile, len(row.input_ids))
        buffer = self._buffer()
        sink.write(header)
        for block in checker.blocks():
            data = buffer[: block.stop - block.start]
            _read(source, data, block.start)
            checker.look(block, data)
            digest.update(data.data)
            sink.write(data.data)
        checker.finish()
        digest.update(tail.data)
        sink.write(tail.data)
        sink.flush()
        return digest.hexdigest()

    def _write_encoded(self, row: Row, source: int, want: Header, sink: Sink) -> tuple[str, int]:
        """As :meth:`_write_large`, by way of an encoder; the size of the file besides."""
        tensor = want.tensors[INPUT_IDS]
        ids = np.empty(tensor.stop - tensor.start, np.uint8)
        _read(source, ids, tensor.start)
        check_ids(row.input_ids, ids)
        positions = kept_positions(self._format.where, row.loss_mask)
        if positions is not None and not len(positions):
            raise RowError(ErrorCode.NO_SUPERVISED_TOKEN, f"none of its {len(row.input_ids)} positions is to be kept: its loss mask is 0")
        kept = len(row.input_ids) if positions is None else len(positions)
        encoded = encoder(self._format, expected_header(self._format, row, kept), ids, row.loss_mask, positions)
        checker = StateChecker(self._profile, len(row.input_ids))
        buffer, digest, written = self._buffer(), xxhash.xxh3_64(), 0

        def put(pieces: Pieces) -> None:
            nonlocal written
            for piece in pieces:
                data = memoryview(piece).cast("B")
                digest.update(data)
                sink.write(data)
                written += len(data)

        put(encoded.head())
        for block in checker.blocks():
            data = buffer[: block.stop - block.start]
            _read(source, data, block.start)
            checker.look(block, data)
            put(encoded.block(block, data))
        checker.finish()
        put(encoded.tail())
        sink.flush()
        return digest.hexdigest(), written

    @contextlib.contextmanager
    def _new_file(self, tmp: Path) -> Iterator[FileSink]:
        """A temp file that stays open, unless the block raises: then it is gone."""
        if tmp.parent not in self._folders:
            make_dirs(tmp.parent)
            self._folders.add(tmp.parent)
        fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            yield FileSink(fd)
        except BaseException:
            os.close(fd)
            remove(tmp)
            raise


def _read(source: int, into: Bytes, at: int) -> None:
    """Fill ``into`` from the tap file. A read and not a mapping: a file cut short is an error of the row, not a SIGBUS."""
    view = into.data
    while view:
        got = os.preadv(source, [view], at)
        if got == 0:
            raise RowError(ErrorCode.CAPTURE_INCOMPLETE, "the tap file became shorter while it was read")
        at += got
        view = view[got:]


def expected_header(format: SampleFormat, row: Row, kept: int | None = None) -> bytes:
    """The first 4 KiB of the sample file of ``row``, decompressed. ``kept``: positions whose states it holds, where they were counted."""
    if kept is None:
        positions = kept_positions(format.where, row.loss_mask)
        kept = len(row.input_ids) if positions is None else len(positions)
    ids = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(row.input_ids).data)
    return format.header(
        len(row.input_ids), kept, row=row.row, source_id=row.source_id, ids_xxh3=ids, schema_version=SCHEMA_VERSION
    ).encode()


_OF_THE_ROW = ("row", "source_id")


def same_but_for_row(head: bytes, want: bytes) -> bool:
    """Whether two headers say the same of everything but which row of which source it is."""
    try:
        have, wanted = (json.loads(h[8 : 8 + int.from_bytes(h[:8], "little")]) for h in (head, want))
        for metadata in (have["__metadata__"], wanted["__metadata__"]):
            for name in _OF_THE_ROW:
                metadata.pop(name, None)
    except (ValueError, KeyError, AttributeError, TypeError):
        return False
    return bool(have == wanted)


def check_sample(samples: SampleStore, format: SampleFormat, row: Row, generation: int) -> RowRecord:
    """Full check of a committed sample file against the row that it should hold; its record, as a ledger line would say it.

    Raises:
        RowError: ``file_missing``, ``file_corrupt``, or a code of check.py: the file is not what it should be.
        StoreError: it cannot be read.
    """
    name = sample(row.row, generation, format.suffix)
    T = len(row.input_ids)
    positions = kept_positions(format.where, row.loss_mask)
    kept = T if positions is None else len(positions)
    digest = xxhash.xxh3_64()
    compressed = format.encoding == Encoding.ZSTD

    def corrupt(what: str) -> RowError:
        return RowError(ErrorCode.FILE_CORRUPT, f"{name} {what}")

    try:
        held = fetched(samples, name)
        with SampleFile(held, name, format) as f:
            size, most = f.size, format.bytes(T, kept)
            if size != most if format.exact else size > most:
                raise corrupt(f"has {size} bytes, not {'up to ' if not format.exact else ''}{most}")
            # Of a compressed file the content is looked at here, and its bytes are hashed below.
            update = (lambda data: None) if compressed else digest.update

            def read(n: int) -> Bytes:
                data = f.read(n)
                update(data.data)
                return data

            if read(BLOCK).tobytes() != expected_header(format, row, kept):
                raise corrupt(f"has a header that is not that of row {row.row}")
            if not compressed:
                f.states(kept, update)
            if positions is not None and not np.array_equal(read(4 * kept).view(np.int32), positions):
                raise corrupt(f"holds states of other positions than row {row.row} has of {format.positions}")
            check_ids(row.input_ids, read(4 * T))
            if not np.array_equal(read(T), row.loss_mask):
                raise corrupt(f"has a loss mask that is not that of row {row.row}")
            if compressed:
                f.states(kept, update)
        if compressed:
            with held.open(name) as raw:
                while data := raw.read(_HASHED):
                    digest.update(data)
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
        engine=UNKNOWN_ENGINE,
        at=round(time.time(), 3),
    )
