"""The end of a job: every row has one terminal state, the manifest says it, and COMPLETE is written last.

Invariant: COMPLETE exists only where manifest.parquet names each of the job's rows once and each done row's file was there with its
recorded size. Memory is that of a batch and of one row group, whatever the number of rows.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from ..contracts.errors import ErrorCode, StoreError
from ..contracts.layout import COMPLETE, MANIFEST, NORM, TEMP_PREFIX, temp
from ..contracts.records import Batch, JobState, RowRecord, RowState
from .acks import Acks, load_acks
from .fs import create_file, fsync_dir, read_json, remove, store_error, to_json
from .jobs import load_job
from .ledger import JobLedger
from .plan import read_plan
from .retries import last_generation
from .rows import RowsFile
from .samples import SampleStore, SizeOf, samples_of

ROWS_PER_GROUP = 20_000  # of the manifest: what a reader filters by, and what the writer holds at once
NAMED_ROWS = 20  # missing rows that an error names
NAMED_BATCHES = 1_000

MANIFEST_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("source_id", pa.string(), nullable=False),
        pa.field("state", pa.string(), nullable=False),
        pa.field("generation", pa.int64(), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("xxh3", pa.string(), nullable=False),
        pa.field("code", pa.string(), nullable=False),
        pa.field("message", pa.string(), nullable=False),
        pa.field(
            "engine", pa.string(), nullable=False
        ),  # boot_id of the engine that captured it; "?": not known; "": none did, for this job
    ],
    metadata={"statetap_schema": "1"},
)


@dataclass(frozen=True, kw_only=True)
class CompletionReport:
    """COMPLETE: ``rows`` = done + failed + skipped. ``manifest_xxh3`` is xxh3-64 of manifest.parquet."""

    rows: int
    done: int
    failed: int
    skipped: int
    tokens: int
    bytes: int
    state: str  # completed | completed_with_errors
    manifest_xxh3: str
    completed_at: float
    reused: int = 0  # of the done rows: taken from earlier jobs
    retries: int = 0  # generation of the newest retry: a COMPLETE of an older one counts no more
    engines: tuple[dict[str, Any], ...] = ()  # EngineStart of each that captured done rows, with ``rows``

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CompletionReport:
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data or f.default is MISSING}
        return cls(**known | {"engines": tuple(data.get("engines", ()))})


def load_completion(job_dir: Path) -> CompletionReport | None:
    """The report of a job that ended, or None: there is none, or rows were opened again since. Raises StoreError for one that cannot be read."""
    data = read_json(job_dir / COMPLETE)
    if data is None:
        return None
    try:
        report = CompletionReport.from_dict(data)
    except KeyError as e:
        raise StoreError(ErrorCode.STORE_IO, f"{job_dir / COMPLETE} lacks {e}") from e
    return report if report.retries == last_generation(job_dir) else None


def drop_stale_completion(job_dir: Path, generation: int) -> bool:
    """Remove a COMPLETE that was written before the retry of this generation; whether there was one. Raises StoreError."""
    data = read_json(job_dir / COMPLETE)
    if data is None or int(data.get("retries", 0)) >= generation:
        return False
    remove(job_dir / COMPLETE)
    fsync_dir(job_dir)
    return True


def finish_job(job_dir: Path, rows_path: Path) -> CompletionReport:
    """Write manifest and COMPLETE. Running it twice, or twice at once, does no harm.

    Raises:
        StoreError: ``incomplete`` when a row has no terminal state or a done row's file is missing or has another size; its detail
            has ``missing`` (count), ``rows`` (the first of them) and ``batches`` (to run again). ``store_io``, ``store_full``.
    """
    if (report := load_completion(job_dir)) is not None:
        return report
    try:
        return _finish(job_dir, rows_path)
    except OSError as e:
        raise store_error(e, f"complete {job_dir.name}") from e


def _finish(job_dir: Path, rows_path: Path) -> CompletionReport:
    spec = load_job(job_dir)
    batches = read_plan(job_dir)
    ledger = JobLedger(job_dir)
    generation = ledger.retries[-1].generation if ledger.retries else 0
    drop_stale_completion(job_dir, generation)
    if sum(b.rows for b in batches) != spec.rows:
        raise StoreError(ErrorCode.PLAN_MISMATCH, f"{job_dir.name}: the plan has {sum(b.rows for b in batches)} rows, not {spec.rows}")
    tmp = Path(temp(str(job_dir / MANIFEST), secrets.token_hex(8)))
    rows = RowsFile(rows_path)
    count: Counter[str] = Counter()
    captured: Counter[str] = Counter()
    tokens = size = reused = 0
    try:
        with pq.ParquetWriter(tmp, MANIFEST_SCHEMA, compression="zstd") as writer:
            buffer: dict[str, list[Any]] = {name: [] for name in MANIFEST_SCHEMA.names}
            for batch, records in _checked(job_dir, samples_of(job_dir, spec), batches, ledger):
                for record, source_id in zip(records, rows.source_ids(batch.start, batch.stop), strict=True):
                    count[record.state] += 1
                    if record.state == RowState.DONE.value:
                        tokens += record.tokens
                        size += record.bytes
                        reused += bool(record.origin)
                        captured[record.engine] += 1
                    for name, values in buffer.items():
                        values.append(source_id if name == "source_id" else getattr(record, name))
                if len(buffer["row"]) >= ROWS_PER_GROUP:
                    _flush(writer, buffer)
            _flush(writer, buffer)
        xxh3 = _fsync_and_hash(tmp)
        # A manifest without COMPLETE is one of a finish that did not get to its end: ours takes its place.
        os.replace(tmp, job_dir / MANIFEST)
        fsync_dir(job_dir)
    finally:
        remove(tmp)
        rows.close()
    errors = count["failed"] or count["skipped"]
    report = CompletionReport(
        rows=spec.rows,
        done=count["done"],
        failed=count["failed"],
        skipped=count["skipped"],
        tokens=tokens,
        bytes=size,
        state=(JobState.COMPLETED_WITH_ERRORS if errors else JobState.COMPLETED).value,
        manifest_xxh3=xxh3,
        completed_at=round(time.time(), 3),
        reused=reused,
        retries=generation,
        engines=tuple(e.to_dict() | {"rows": captured[boot_id]} for boot_id, e in ledger.engines.items() if captured[boot_id]),
    )
    for left in job_dir.glob(f"{TEMP_PREFIX}*-{NORM}"):  # of a horse that was killed while it kept the norm; none is at work now
        remove(left)
    if create_file(job_dir / COMPLETE, to_json(report.to_dict())):
        return report
    return load_completion(job_dir) or report


def _checked(job_dir: Path, samples: SampleStore, batches: list[Batch], ledger: JobLedger) -> Iterator[tuple[Batch, list[RowRecord]]]:
    """(batch, its rows' records in order). Raises ``incomplete`` after all batches were seen, so that the error has all counts."""
    acks = load_acks(job_dir)
    size_of = samples.sizes()
    missing = 0
    first_rows: list[int] = []
    bad_batches: list[int] = []
    for batch in batches:
        records = ledger.records(batch.batch)
        bad = [row for row in range(batch.start, batch.stop) if not _is_kept(size_of, records.get(row), acks)]
        if bad:
            missing += len(bad)
            first_rows += bad[: NAMED_ROWS - len(first_rows)]
            if len(bad_batches) < NAMED_BATCHES:
                bad_batches.append(batch.batch)
        elif not missing:
            yield batch, [records[row] for row in range(batch.start, batch.stop)]
    if missing:
        more = ", …" if missing > len(first_rows) else ""
        raise StoreError(
            ErrorCode.INCOMPLETE,
            f"{job_dir.name}: {missing} rows have no terminal state or no file: {', '.join(map(str, first_rows))}{more}",
            missing=missing,
            rows=first_rows,
            batches=bad_batches,
        )


def _is_kept(size_of: SizeOf, record: RowRecord | None, acks: Acks) -> bool:
    if record is None or record.state != RowState.DONE.value or record.row in acks:
        return record is not None
    return size_of(record.path) == record.bytes


def _flush(writer: pq.ParquetWriter, buffer: dict[str, list[Any]]) -> None:
    if buffer["row"]:
        writer.write_table(pa.table(buffer, schema=MANIFEST_SCHEMA))
        for values in buffer.values():
            values.clear()


def _fsync_and_hash(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with open(path, "rb") as f:
        os.fsync(f.fileno())
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
