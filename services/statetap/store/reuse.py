"""Rows that an earlier job of the same sample format has done already: their files are taken by hard link, without a prefill.

Invariant: a file is taken only when the other job's ledger calls it done, it has the recorded size, and the ids and the mask in it are
byte for byte those of our row; its xxh3 goes into our ledger, so ``verify`` reads it against the same hash. What cannot be taken, for
whatever reason, is prefilled. Links follow the commit's order: link, folder, ledger.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from .samples import FolderSamples, Held, Opens, Samples, SampleStore, fetched, samples_of

log = logging.getLogger(__name__)

HELD_BATCHES = 8  # folded ledgers of the other job that are kept; rows in their old order need one or two


@dataclass
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
) -> list[RowRecord]:
    """Take what can be taken of ``rows`` (open ones of a batch, in order); the records that are in the ledger now.

    Raises StoreError where our own ledger or folder cannot be written.
    """
    ours = samples or FolderSamples(job_dir)
    opened = [s for s in (_Source.open(store, job_id, format) for job_id in sources if job_id != job_dir.name) if s is not None]
    opened = [s for s in opened if type(s.samples) is type(ours)]  # from a folder into a bucket would be an upload nobody asked for
    taken: list[RowRecord] = []
    if not opened:
        return taken
    writer = LedgerWriter(job_dir, batch, attempt)
    group: list[RowRecord] = []
    try:
        for row in rows:
            record = _take(opened, ours, format, row, generations[row.row])
            if record is not None:
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


def _take(sources: list[_Source], ours: Samples, format: SampleFormat, row: Row, generation: int) -> RowRecord | None:
    if row.error_code or not len(row.input_ids):
        return None
    key = row_key(row)
    for source in list(sources):
        for number in source.candidates(row, key):
            found = source.done(number)
            if found is None or found.tokens != len(row.input_ids):
                continue
            name = sample(row.row, generation, format.suffix)
            try:
                held = fetched(source.samples, found.path)
                if not _is_same(held, format, row, found):
                    continue
                _copy(source.samples, found.path, held, ours, name)
            except FileExistsError:
                return None  # linked before, and the ledger's line was lost: resume looks at it
            except OSError as e:
                if e.errno in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP):
                    log.info("event=reuse_not_possible job=%s error=%s", source.job_id, e.strerror)
                    sources.remove(source)
                    break
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


def _copy(source: Samples, path: str, held: Opens, ours: Samples, name: str) -> None:
    """By hard link, or from object to object by way of here: a copy within the service has no condition. Raises FileExistsError, OSError."""
    if isinstance(ours, FolderSamples) and isinstance(source, FolderSamples):
        make_dirs((ours.root / name).parent)
        os.link(source.root / path, ours.root / name)
    elif isinstance(ours, FolderSamples) or not isinstance(held, Held) or not ours.put(name, held.data.tobytes()):
        raise FileExistsError(errno.EEXIST, "an object is there", name)


def _is_same(samples: Opens, format: SampleFormat, row: Row, record: RowRecord) -> bool:
    """Whether a file holds this row: its size, its header but for row and source, its ids and its mask. Raises OSError.

    Of an object all is here, and is put again as it came: its sum too.
    """
    if isinstance(samples, Held) and xxhash.xxh3_64_hexdigest(samples.data.data) != record.xxh3:
        return False
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
