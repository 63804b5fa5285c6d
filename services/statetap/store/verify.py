"""Verify: read every file of a job again and compare it with what was recorded when it was committed.

Invariant: only reads; memory is that of a batch, and the list of problems is bounded while the counts are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ..contracts.errors import ErrorCode, StatetapError
from ..contracts.layout import MANIFEST, SAMPLE_NAME, folder
from ..contracts.records import Batch, RowRecord, RowState
from ..contracts.sample_format import SampleFormat
from ..contracts.tensors import POSITIONS
from .acks import load_acks, merge
from .check import Bytes
from .complete import load_completion
from .decode import SampleFile
from .delete import Reading
from .fs import store_error
from .jobs import load_job
from .ledger import JobLedger
from .plan import read_plan
from .rows import RowsFile
from .sample import expected_header, same_but_for_row
from .samples import FolderSamples, Held, SampleStore, samples_of

KEPT_PROBLEMS = 1_000
_READ = 8 << 20  # bytes hashed at once: pages behind it can be reclaimed

Progress = Callable[[int, int], None]
"""Called with (files read, bytes read) after each batch."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    row: int
    path: str
    code: str
    message: str


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """``problems`` keeps the first 1,000; ``counts`` (code -> files) is exact. ``extra``: sample files that no record names; ``freed``: done
    rows whose files were freed when they were read. ``damaged``: half-open ranges of all rows that have to be captured anew."""

    rows: int
    files: int
    bytes: int
    complete: bool
    extra: int
    freed: int = 0
    problems: list[Problem] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    damaged: list[tuple[int, int]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.counts

    @property
    def repairable(self) -> bool:
        """Whether there is something that the job's engine and coordinator can make good: rows, or the manifest alone."""
        return bool(self.damaged) or any(p.path == MANIFEST for p in self.problems)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def verify_job(job_dir: Path, rows_path: Path | None = None, *, threads: int = 2, progress: Progress | None = None) -> VerifyReport:
    """Read every done row's file: size, header, whole-file xxh3. With ``rows_path``, the header against the row's own ids too.

    An unfinished job is verified as far as it got; that is the problem ``incomplete`` with row -1. Raises StoreError where the job's
    own files (job.json, plan, ledger) cannot be read.
    """
    try:
        with Reading(job_dir):
            return _verify(job_dir, rows_path, threads, progress)
    except OSError as e:
        raise store_error(e, f"verify {job_dir.name}") from e


def _verify(job_dir: Path, rows_path: Path | None, threads: int, progress: Progress | None) -> VerifyReport:
    spec = load_job(job_dir)
    format, samples = spec.sample_format, samples_of(job_dir, spec)
    completion = load_completion(job_dir)
    counts: Counter[str] = Counter()
    problems: list[Problem] = []
    rows = files = size = extra = 0
    damaged: list[tuple[int, int]] = []

    def note(problem: Problem) -> None:
        counts[problem.code] += 1
        if len(problems) < KEPT_PROBLEMS:
            problems.append(problem)

    if completion is not None and (problem := _check_manifest(job_dir, completion.manifest_xxh3)):
        note(problem)
    batches = read_plan(job_dir)
    ledger = JobLedger(job_dir)
    acks = load_acks(job_dir)
    source = RowsFile(rows_path) if rows_path else None
    missing = 0
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="verify") as pool:
        for batch in batches:
            records = ledger.records(batch.batch)
            done = [r for r in records.values() if r.state == RowState.DONE.value and r.row not in acks]
            rows += batch.rows
            missing += sum(row not in records for row in range(batch.start, batch.stop))
            # The dataset is read here: its reader is not said to be safe for several threads.
            headers = [_header_of(source, format, r) for r in done]
            for found in pool.map(lambda r, header: _check_file(samples, format, r, header), done, headers):
                if found is not None:
                    note(found)
                    if found.code != ErrorCode.STORE_IO.value:  # it may be whole: the disk did not answer
                        damaged.append((found.row, found.row + 1))
            damaged = list(merge(damaged))
            files += len(done)
            size += sum(r.bytes for r in done)
            extra += _extra_files(samples, batch, {r.path for r in done})
            if progress is not None:
                progress(files, size)
    if completion is None:
        note(
            Problem(
                row=-1,
                path="",
                code=ErrorCode.INCOMPLETE.value,
                message=f"{job_dir.name} has no COMPLETE; {missing} of {rows} rows have no terminal state",
            )
        )
    if source is not None:
        source.close()
    return VerifyReport(
        rows=rows,
        files=files,
        bytes=size,
        complete=completion is not None,
        extra=extra,
        freed=acks.rows,
        problems=problems,
        counts=dict(counts),
        damaged=damaged,
    )


def _hash(data: Bytes) -> str:
    digest = xxhash.xxh3_64()
    for at in range(0, len(data), _READ):
        digest.update(data[at : at + _READ].data)
    return digest.hexdigest()


def _check_manifest(job_dir: Path, xxh3: str) -> Problem | None:
    try:
        if _hash(FolderSamples(job_dir).map(MANIFEST)) == xxh3:
            return None
    except FileNotFoundError:
        return Problem(row=-1, path=MANIFEST, code=ErrorCode.FILE_MISSING.value, message=f"{MANIFEST} is not there")
    return Problem(row=-1, path=MANIFEST, code=ErrorCode.FILE_CORRUPT.value, message=f"{MANIFEST} is not the one that COMPLETE names")


def _header_of(source: RowsFile | None, format: SampleFormat, record: RowRecord) -> bytes | None:
    """The header that the file must have, where the dataset is at hand."""
    if source is None:
        return None
    (row,) = source.read(record.row, record.row + 1)
    return expected_header(format, row)


def _check_file(samples: SampleStore, format: SampleFormat, record: RowRecord, header: bytes | None) -> Problem | None:
    def problem(code: ErrorCode, message: str) -> Problem:
        return Problem(row=record.row, path=record.path, code=code.value, message=message)

    try:
        data = samples.map(record.path)
        if len(data) != record.bytes:
            return problem(ErrorCode.FILE_CORRUPT, f"{len(data)} bytes, not {record.bytes}")
        if (xxh3 := _hash(data)) != record.xxh3:
            return problem(ErrorCode.FILE_CORRUPT, f"xxh3 is {xxh3}, not {record.xxh3}")
        with SampleFile(Held(data), record.path, format) as opened:
            head, found = opened.head()
    except FileNotFoundError:
        return problem(ErrorCode.FILE_MISSING, "the file is not there")
    except OSError as e:
        return problem(ErrorCode.STORE_IO, f"cannot be read: {e.strerror}")
    except StatetapError as e:
        return problem(e.code, e.message)
    if header is not None:
        # A file that was taken from an earlier job names the row and the source that it was captured for.
        right = same_but_for_row(head, header) if record.origin else head == header
        return None if right else problem(ErrorCode.FILE_CORRUPT, "the header is not that of this row of the dataset")
    kept = found.tensors[POSITIONS].shape[0] if format.thinned and POSITIONS in found.tensors else record.tokens
    want = format.header(record.tokens, kept, row=record.row, source_id="", ids_xxh3="", schema_version=0)
    if found.tensors == want.tensors:
        return None
    return problem(ErrorCode.SHAPE_MISMATCH, f"the header is not that of {record.tokens} tokens of this format")


def _extra_files(samples: SampleStore, batch: Batch, named: set[str]) -> int:
    """Sample files of the batch's rows that no done record names."""
    return sum(path not in named for path in _sample_files(samples, batch))


def _sample_files(samples: SampleStore, batch: Batch) -> Iterator[str]:
    for name in dict.fromkeys(folder(row) for row in range(batch.start, batch.stop)):
        for entry in samples.entries(
            name, lambda n: (m := SAMPLE_NAME.fullmatch(n)) is not None and batch.start <= int(m["row"]) < batch.stop
        ):
            yield entry.name
