"""What an attempt at a batch finds: rows already done, files without a ledger line, temps of dead attempts.

Invariant: nothing that is finished is done again, and nothing that is not whole is kept. Only the batch's own ledger segments and
folders are read. The caller holds the batch's lease, so every other attempt at it is dead or will find its temps gone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..contracts.errors import RowError
from ..contracts.layout import SAMPLE_NAME, TEMP_PREFIX, folder
from ..contracts.records import Batch, RowRecord, RowState
from ..contracts.sample_format import SampleFormat
from .acks import load_acks
from .fs import store_error
from .ledger import JobLedger, LedgerWriter
from .retries import opened_by
from .rows import RowsFile
from .sample import check_sample
from .samples import FolderSamples, SampleStore

log = logging.getLogger(__name__)

_NAME = re.compile(rf"(?P<temp>{re.escape(TEMP_PREFIX)}[0-9a-f]+-)?{SAMPLE_NAME.pattern}")


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """``records``: row -> winning record. ``open_rows``: row -> the generation to write, for rows to do, in order."""

    records: dict[int, RowRecord]
    open_rows: dict[int, int]
    adopted: int
    swept: int
    reused: int = 0  # taken from earlier jobs (reuse.py)


@dataclass(frozen=True, kw_only=True)
class _Found:
    row: int
    generation: int
    name: str
    size: int
    is_temp: bool


def _scan(samples: SampleStore, batch: Batch) -> Iterator[_Found]:
    """Files of the batch's rows in its one or two folders, whatever their state."""
    for name in dict.fromkeys(folder(row) for row in range(batch.start, batch.stop)):
        for entry in samples.entries(name, lambda n: (m := _NAME.fullmatch(n)) is not None and batch.start <= int(m["row"]) < batch.stop):
            if match := _NAME.fullmatch(entry.name.rpartition("/")[2]):
                yield _Found(
                    row=int(match["row"]),
                    generation=int(match["generation"] or 0),
                    name=entry.name,
                    size=entry.size,
                    is_temp=match["temp"] is not None,
                )


def resume_batch(
    job_dir: Path, format: SampleFormat, batch: Batch, rows: RowsFile, attempt: str, samples: SampleStore | None = None
) -> Resumed:
    """Fold the batch's ledger, adopt or remove files without a line, sweep temps.

    A row that is recorded as done but whose file is missing or has another size is open again, with the next generation; so is one that
    a retry or a repair has opened, with its generation. ``samples``: where its files stand, by default in the job's folder.
    Raises StoreError.
    """
    try:
        return _resume(job_dir, samples or FolderSamples(job_dir), format, batch, rows, attempt)
    except OSError as e:
        raise store_error(e, f"resume batch {batch.batch}") from e


def _resume(job_dir: Path, samples: SampleStore, format: SampleFormat, batch: Batch, rows: RowsFile, attempt: str) -> Resumed:
    ledger = JobLedger(job_dir)
    records = ledger.last(batch.batch)
    sizes: dict[tuple[int, int], int] = {}
    adopted: list[RowRecord] = []
    swept = 0
    for found in _scan(samples, batch):
        if found.is_temp:
            samples.remove(found.name)
            swept += 1
            continue
        record = records.get(found.row)
        if record is not None and record.generation >= found.generation:
            sizes[found.row, found.generation] = found.size
            if record.state == RowState.DONE.value or record.generation > found.generation:
                continue
        # A crash between link and ledger, or a commit that an earlier attempt did not live to record.
        (row,) = rows.read(found.row, found.row + 1)
        try:
            adopted.append(check_sample(samples, format, row, found.generation))
            sizes[found.row, found.generation] = found.size
            samples.settle(folder(found.row))
        except RowError as e:
            log.warning("event=corrupt_file_removed row=%d batch=%d error=%s", found.row, batch.batch, e)
            samples.remove(found.name)
    if adopted:
        writer = LedgerWriter(job_dir, batch.batch, attempt)
        try:
            writer.append(adopted)
        finally:
            writer.close()
        for record in adopted:
            held = records.get(record.row)
            if held is None or record.rank > held.rank:
                records[record.row] = record
    acks = load_acks(job_dir)
    open_rows: dict[int, int] = {}
    for number in range(batch.start, batch.stop):
        record = records.get(number)
        if record is None:
            open_rows[number] = 0
        elif generation := opened_by(record, ledger.retries):
            if record.path:
                samples.remove(record.path)  # a repair: it is not what was committed
            open_rows[number] = generation
            del records[number]
        elif record.state == RowState.DONE.value and sizes.get((number, record.generation)) != record.bytes and number not in acks:
            log.warning("event=file_lost row=%d batch=%d path=%s", number, batch.batch, record.path)
            samples.remove(record.path)
            open_rows[number] = record.generation + 1
            del records[number]
    return Resumed(records=records, open_rows=open_rows, adopted=len(adopted), swept=swept)
