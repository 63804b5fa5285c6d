"""Rows that an earlier job of the same sample format has done already: their files are taken by hard link, without a prefill.

Invariant: a file is taken only when the other job's ledger calls it done, it has the recorded size, and the ids and the mask in it are
byte for byte those of our row; its xxh3 goes into our ledger, so ``verify`` reads it against the same hash. What cannot be taken, for
whatever reason, is prefilled. Links follow the commit's order: link, folder, ledger.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from ..contracts.errors import StatetapError
from ..contracts.layout import JOBS, ROWS, dataset_dir, folder, sample
from ..contracts.records import RowRecord, RowState
from ..contracts.sample_format import SampleFormat
from .commit import GROUP_ROWS
from .decode import SampleFile
from .fs import make_dirs, store_error
from .jobs import load_job
from .keyindex import KeyIndex, row_key
from .ledger import JobLedger, LedgerWriter
from .plan import read_plan
from .rows import Row
from .sample import expected_header, same_but_for_row
from .samples import FolderSamples, Held, Opens, Samples, SampleStore, samples_of
from .sink import PUT_BYTES, Gate

log = logging.getLogger(__name__)

HELD_BATCHES = 8  # folded ledgers of the other job that are kept; rows in their old order need one or two


@dataclass(eq=False)
class _Source:
    """An earlier job, opened to be taken from."""

    job_id: str
    path: Path
    samples: Samples
    ledger: JobLedger
    stops: np.ndarray
    index: KeyIndex | None  # of its dataset; None: only equal row numbers are looked at
    rows: int

    @classmethod
    def open(cls, store: Path, job_id: str, format: SampleFormat) -> _Source | None:
        """None for one that is gone, is of another format, or cannot be read."""
        path = store / JOBS / job_id
        try:
            spec = load_job(path)
            if spec.sample_format.format_id != format.format_id:
                return None
            stops = np.array([b.stop for b in read_plan(path)], np.int64)
            try:
                index: KeyIndex | None = KeyIndex(store / dataset_dir(spec.dataset_id) / ROWS)
            except FileNotFoundError:
                index = None
            return cls(
                job_id=job_id, path=path, samples=samples_of(path, spec), ledger=JobLedger(path), stops=stops, index=index, rows=spec.rows
            )
        except (StatetapError, OSError) as e:
            log.info("event=reuse_source_skipped job=%s error=%s", job_id, e)
            return None

    def __post_init__(self) -> None:
        self._held: dict[int, dict[int, RowRecord]] = {}

    def candidates(self, row: Row, key: bytes) -> Iterator[int]:
        if self.index is None:
            yield row.row
        else:
            yield from self.index.rows(key)

    def done(self, row: int) -> RowRecord | None:
        """The record of a row that this job has a file of."""
        if not 0 <= row < self.rows:
            return None
        batch = int(np.searchsorted(self.stops, row, side="right"))
        if batch not in self._held:
            while len(self._held) >= HELD_BATCHES:
                self._held.pop(next(iter(self._held)))
            self._held[batch] = self.ledger.records(batch)
        record = self._held[batch].get(row)
        return record if record is not None and record.state == RowState.DONE.value else None


def reuse_rows(
    store: Path,
    job_dir: Path,
    format: SampleFormat,
    sources: Sequence[str],
    batch: int,
    attempt: str,
    rows: Iterable[Row],
    generations: Mapping[int, int],
    samples: Samples | None = None,
    *,
    threads: int = 1,
    memory: int = PUT_BYTES,
) -> list[RowRecord]:
    """Take what can be taken of ``rows`` (open ones of a batch, in order); the records that are in the ledger now.

    Objects are copied by ``threads``, from ``memory`` bytes (one row may be more). Raises StoreError where our own ledger or folder cannot
    be written.
    """
    ours = samples or FolderSamples(job_dir)
    opened = [s for s in (_Source.open(store, job_id, format) for job_id in sources if job_id != job_dir.name) if s is not None]
    opened = [s for s in opened if type(s.samples) is type(ours)]  # from a folder into a bucket would be an upload nobody asked for
    taken: list[RowRecord] = []
    if not opened:
        return taken
    taking = _Taking(sources=opened, ours=ours, format=format, generations=generations, gate=Gate(memory))
    writer = LedgerWriter(job_dir, batch, attempt)
    group: list[RowRecord] = []
    try:
        with contextlib.closing(taking.all(rows, threads)) as records:
            for record in records:
                group.append(record)
                if len(group) >= GROUP_ROWS:
                    taken += _commit(ours, writer, group)
                    group = []
        taken += _commit(ours, writer, group)
    except OSError as e:
        raise store_error(e, f"take over rows of batch {batch}") from e
    finally:
        writer.close()
    return taken


def _commit(ours: SampleStore, writer: LedgerWriter, group: list[RowRecord]) -> list[RowRecord]:
    for name in {folder(r.row) for r in group}:
        ours.settle(name)
    writer.append(group)
    return group


@dataclass(frozen=True, kw_only=True)
class _Taking:
    """Thread-safe."""

    sources: list[_Source]
    ours: Samples
    format: SampleFormat
    generations: Mapping[int, int]
    gate: Gate  # of bytes in memory
    lock: threading.Lock = field(default_factory=threading.Lock)  # the sources': what they hold is found under it

    def all(self, rows: Iterable[Row], threads: int) -> Generator[RowRecord]:
        """Of the rows that could be taken, in order. None is under way any more when this ends."""
        if isinstance(self.ours, FolderSamples):  # a hard link takes less than handing it to a thread
            yield from filter(None, map(self.take, rows))
            return
        under_way: deque[Future[RowRecord | None]] = deque()
        with ThreadPoolExecutor(threads, thread_name_prefix="reuse") as pool:
            for row in rows:
                under_way.append(pool.submit(self.take, row))
                if len(under_way) > threads and (record := under_way.popleft().result()) is not None:
                    yield record
            for left in under_way:
                if (record := left.result()) is not None:
                    yield record

    def take(self, row: Row) -> RowRecord | None:
        if row.error_code or not len(row.input_ids):
            return None
        for source, number, found in self._candidates(row):
            generation = self.generations[row.row]
            name = sample(row.row, generation, self.format.suffix)
            try:
                if not self._copy(row, source, found, name):
                    continue
            except FileExistsError:
                return None  # linked before, and the ledger's line was lost: resume looks at it
            except OSError as e:
                if e.errno in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP):
                    log.info("event=reuse_not_possible job=%s error=%s", source.job_id, e.strerror)
                    self.sources.remove(source)
                continue  # gone, unreadable, or it has as many links as it can have
            return RowRecord(
                row=row.row,
                state=RowState.DONE.value,
                generation=generation,
                tokens=found.tokens,
                bytes=found.bytes,
                path=name,
                xxh3=found.xxh3,
                # What it was captured for, also where that job took it over itself.
                origin=found.origin or f"{source.job_id}/{number}",
                at=round(time.time(), 3),
            )
        return None

    def _candidates(self, row: Row) -> Iterator[tuple[_Source, int, RowRecord]]:
        """(source, its row, that row's record), while the source stays one."""
        key = row_key(row)
        for source in list(self.sources):
            numbers = source.candidates(row, key)
            while source in self.sources:
                with self.lock:
                    if (number := next(numbers, None)) is None:
                        break
                    found = source.done(number)
                if found is not None and found.tokens == len(row.input_ids):
                    yield source, number, found

    def _copy(self, row: Row, source: _Source, found: RowRecord, name: str) -> bool:
        """By hard link, or from object to object by way of here: a copy within the service has no condition. False where it is not this row.

        Raises FileExistsError, OSError.
        """
        if isinstance(self.ours, FolderSamples):
            if not _is_same(source.samples, self.format, row, found):
                return False
            make_dirs((self.ours.root / name).parent)
            os.link(source.samples.place(found.path), self.ours.root / name)
            return True
        with self.gate.held(found.bytes):
            data = source.samples.map(found.path)
            # Put again as it came: its sum too is looked at.
            if xxhash.xxh3_64_hexdigest(data.data) != found.xxh3 or not _is_same(Held(data), self.format, row, found):
                return False
            if not self.ours.put(name, data.data):
                raise FileExistsError(errno.EEXIST, "an object is there", name)
            return True


def _is_same(samples: Opens, format: SampleFormat, row: Row, record: RowRecord) -> bool:
    """Whether a file holds this row: its size, its header but for row and source, its ids and its mask. Raises OSError."""
    try:
        with SampleFile(samples, record.path, format) as f:
            if f.size != record.bytes:
                return False
            head, header = f.head()
            if not same_but_for_row(head, expected_header(format, row)):
                return False
            ids, mask, _ = f.row(header)
            return np.array_equal(ids, row.input_ids) and np.array_equal(mask, row.loss_mask)
    except StatetapError:
        return False
