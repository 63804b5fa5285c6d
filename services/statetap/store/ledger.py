"""The ledger: what became of every row. One append-only JSONL segment for each attempt at a batch, one writer each.

A line that names an engine holds for the done rows after it: they were captured by that engine.

Invariant: a line is written only after the file that it names is durable under its final name; a torn last line (a crash in
the write) is ignored. The record with the highest (generation, state) of a row is the truth; order and duplicates do not matter.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..contracts.layout import LEDGER, ledger_segment
from ..contracts.records import BatchTotals, EngineStart, RowRecord
from .fs import fsync_dir, make_dirs, store_error, write_all
from .retries import load_retries, opened_by

_DEFAULTS = {k: v for k, v in RowRecord(row=0, state="done").to_dict().items() if k not in ("row", "state")}


def encode(record: RowRecord) -> bytes:
    """One line; fields at their default are left out."""
    data = {k: v for k, v in vars(record).items() if k in ("row", "state") or v != _DEFAULTS[k]}
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


class LedgerWriter:
    """Appends to one segment. Not thread-safe: the committer's flush is its only caller.

    ``engine``: the engine that captures now; asked at each append.
    """

    def __init__(self, job_dir: Path, batch: int, attempt: str, engine: Callable[[], EngineStart | None] = lambda: None) -> None:
        self._path = job_dir / ledger_segment(batch, attempt)
        self._engine = engine
        self._named: EngineStart | None = None
        self._fd = -1

    def append(self, records: Iterable[RowRecord]) -> None:
        """Durable when it returns (one write, one fdatasync). Raises StoreError.

        After a failed write the segment is cut back to its last whole line, so the next append cannot join two.
        """
        data = b"".join(map(encode, records))
        if not data:
            return
        engine = self._engine()
        if engine is not None and engine != self._named:
            data = json.dumps({"engine": engine.to_dict()}, separators=(",", ":")).encode() + b"\n" + data
        try:
            if self._fd < 0:
                make_dirs(self._path.parent)
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                fsync_dir(self._path.parent)
            before = os.fstat(self._fd).st_size
            try:
                write_all(self._fd, data)
                os.fdatasync(self._fd)
            except OSError:
                os.ftruncate(self._fd, before)
                raise
            self._named = engine
        except OSError as e:
            raise store_error(e, f"append to {self._path.name}") from e

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_segment(path: Path, engines: dict[str, EngineStart] | None = None) -> Iterator[RowRecord]:
    """Records of one segment. A last line without its newline, or lines that do not parse, are not records. Memory is that of a segment.

    ``engines`` takes those that are named, by boot_id.
    """
    captured_by: dict[str, Any] = {}
    for data in _parsed(path.read_bytes().rpartition(b"\n")[0]):
        try:
            if "row" not in data:
                engine = EngineStart.from_dict(data["engine"])
                captured_by = {"engine": engine.boot_id}
                if engines is not None:
                    engines[engine.boot_id] = engine
                continue
            record = RowRecord.from_dict(captured_by | data if data.get("state") == "done" else data)
            record.rank  # noqa: B018  (an unknown state raises here)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        yield record


def _parsed(lines: bytes) -> Iterator[Any]:
    """The JSON of each line. All at once, which takes half the time that a call a line does (a resume reads a line a row); then line by line."""
    try:
        yield from json.loads(b"[" + lines.replace(b"\n", b",") + b"]")
        return
    except ValueError:
        pass
    for line in lines.split(b"\n"):
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def segments_by_batch(job_dir: Path) -> dict[int, list[Path]]:
    """All segments of a job, by batch: one listing of the ledger folder."""
    found: dict[int, list[Path]] = {}
    try:
        names = sorted(os.listdir(job_dir / LEDGER))
    except FileNotFoundError:
        return found
    for name in names:
        batch, _, rest = name.partition(".")
        if rest.endswith(".jsonl") and batch.isdigit():
            found.setdefault(int(batch), []).append(job_dir / LEDGER / name)
    return found


class JobLedger:
    """What stands in a job's ledger now: its segments, listed once, less what retries have opened again.

    Memory is one path a segment; records are read a batch at a time.
    """

    def __init__(self, job_dir: Path) -> None:
        self.engines: dict[str, EngineStart] = {}  # that the segments name which were read until now, by boot_id
        self.retries = load_retries(job_dir)
        self._segments = segments_by_batch(job_dir)

    def batches(self) -> list[int]:
        """Batches that have a segment, in order."""
        return sorted(self._segments)

    def segments(self, batch: int) -> list[Path]:
        return self._segments.get(batch, [])

    def last(self, batch: int) -> dict[int, RowRecord]:
        """Row -> its winning record, whether it was opened again or not."""
        return fold(self.segments(batch), self.engines)

    def records(self, batch: int) -> dict[int, RowRecord]:
        """Row -> the record that stands. A row that has none is open."""
        return self.standing(self.last(batch))

    def standing(self, records: dict[int, RowRecord]) -> dict[int, RowRecord]:
        """Of winning records those that no retry has opened again."""
        if not self.retries:
            return records
        return {row: r for row, r in records.items() if not opened_by(r, self.retries)}


def may_have_errors(path: Path) -> bool:
    """Whether a segment can name a failed or skipped row: a look at the bytes, some hundred times faster than parsing it."""
    data = path.read_bytes()
    return b'"failed"' in data or b'"skipped"' in data


def fold(segments: Iterable[Path], engines: dict[str, EngineStart] | None = None) -> dict[int, RowRecord]:
    """Row -> its winning record, over the segments of one batch. Memory is that of one batch."""
    best: dict[int, RowRecord] = {}
    for path in segments:
        for record in read_segment(path, engines):
            held = best.get(record.row)
            if held is None or record.rank > held.rank:
                best[record.row] = record
    return best


def totals_of(batch: int, records: Iterable[RowRecord]) -> BatchTotals:
    """Absolute totals of a batch from its folded records."""
    count = {"done": 0, "failed": 0, "skipped": 0}
    tokens = size = reused = reused_tokens = reused_bytes = 0
    errors: dict[str, int] = {}
    for r in records:
        count[r.state] += 1
        tokens += r.tokens if r.state == "done" else 0
        size += r.bytes
        if r.origin:
            reused, reused_tokens, reused_bytes = reused + 1, reused_tokens + r.tokens, reused_bytes + r.bytes
        if r.code:
            errors[r.code] = errors.get(r.code, 0) + 1
    return BatchTotals(
        batch=batch,
        tokens=tokens,
        bytes=size,
        reused=reused,
        reused_tokens=reused_tokens,
        reused_bytes=reused_bytes,
        errors=errors,
        **count,
    )
