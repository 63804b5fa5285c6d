"""``statetap export``: writes a complete job in a trainer's files, and goes on where an earlier run was cut off.

Invariant: a file under its final name is whole and on disk, the list names it after that, and EXPORT.json is written last: it goes before
the first file is touched and comes when every row has its file, so a half export is never taken for a whole one. A row whose file is
listed and has its size is not written again. Memory is that of a group of rows, whatever their number.
"""

from __future__ import annotations

import gzip
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from ... import __version__
from ...contracts.errors import ErrorCode, RequestError, StoreError
from ...contracts.profile import ITEM_SIZES
from ..delete import Reading
from ..fs import free_bytes, fsync_dir, make_dirs, read_json, remove, store_error, to_json
from .base import Final, Finish, Format, Item, layer_text
from .files import Folder, NewFile, write_file
from .listing import LIST, Line, Listing, check_folder
from .source import Source

MARKER = "EXPORT.json"
LIST_VERSION = 1
GROUP_ROWS = 64
GROUP_BYTES = 64 << 20
KEPT_PROBLEMS = 1_000
GZIP_LEVEL = 1  # fractions of states are noise: a higher level takes several times as long and gains next to nothing
_OF_A_FILE = 4096  # bytes of a file beside its tensors, at most

_OF_THE_ROW = (ErrorCode.FILE_MISSING, ErrorCode.FILE_CORRUPT)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """``bytes`` of files that were written by now; ``kept`` of ``done`` rows were there already."""

    done: int
    kept: int
    rows: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """``export``: EXPORT.json, or what it would say where rows are missing. ``written`` + ``kept`` + ``bad`` = rows; ``problems`` has the
    first 1,000 rows without a file."""

    out: str
    export: dict[str, Any]
    written: int
    kept: int
    bad: int
    problems: list[Line] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.bad == 0

    def to_dict(self) -> dict[str, Any]:
        problems = [{"row": p.row, "code": p.code, "message": p.message} for p in self.problems]
        return {"ok": self.ok, "out": self.out, "written": self.written, "kept": self.kept, "bad": self.bad} | {
            "problems": problems,
            "export": self.export,
        }


def export_job(
    job_dir: Path,
    out: Path,
    format: Format,
    *,
    boundaries: tuple[int, ...] | None = None,
    final: Final | None = None,
    rows: tuple[int, int] | None = None,
    compressed: bool = False,
    draft_vocab: int = 0,
    threads: int = 2,
    progress: Callable[[Progress], None] | None = None,
) -> ExportReport:
    """Write the done rows of a job into ``out``. Arguments as of :class:`~statetap.store.export.source.Source`, and:

    Args:
        compressed: gzip the files, for formats whose trainers read that.
        draft_vocab: size of the draft's vocabulary, for formats whose trainers read ``{d2t, t2d}``; 0 writes none.
        threads: files that are written at once.

    Raises:
        RequestError: ``not_found``, ``invalid_request`` for what cannot be had, ``conflict`` for a folder that holds something else.
        StoreError: ``incomplete`` job, ``store_full``, ``store_io``. What was written by then is kept, and the next run goes on from it.
    """
    with Reading(job_dir):
        source = Source(job_dir, format, boundaries=boundaries, final=final, rows=rows)
        _check(source, out, format, compressed, draft_vocab)
        try:
            with Folder(out) as folder:
                return _Export(folder, source, out, format, compressed, draft_vocab, progress).run(max(1, threads))
        except OSError as e:
            raise store_error(e, f"export into {out}") from e


def _check(source: Source, out: Path, format: Format, compressed: bool, draft_vocab: int) -> None:
    if compressed and not format.can_gzip:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"gzip: {format.title} does not read compressed files")
    if draft_vocab and not format.mapping:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"draft_vocab: {format.title} reads no vocabulary mapping from its data")
    if draft_vocab > source.profile.vocab_size:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"draft_vocab: {draft_vocab} is more than the model's {source.profile.vocab_size}")
    if not 0 <= source.rows[0] < source.rows[1]:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"rows: {source.rows[0]}-{source.rows[1]} holds no row (ranges are half-open)")
    if out.resolve().is_relative_to(source.job_dir.resolve()):
        raise RequestError(ErrorCode.INVALID_REQUEST, "out: it lies in the job's own folder", next_step="Give a folder elsewhere.")


class _Export:
    def __init__(
        self,
        folder: Folder,
        source: Source,
        out: Path,
        format: Format,
        compressed: bool,
        draft_vocab: int,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._source, self._out, self._format = source, out, format
        self._gzip, self._draft_vocab, self._progress = compressed, draft_vocab, progress
        self._rows, self._tokens = source.totals()
        self._done = self._kept = self._bad = self._bytes = self._written_bytes = 0
        self._problems: list[Line] = []
        self._folders: set[Path] = set()
        self._marked = (out / MARKER).exists()
        check_folder(out, self._head())
        folder.sweep()
        self._listing = Listing(out, self._head())

    def _head(self) -> dict[str, Any]:
        """What makes it this export and no other. The job's folder may move; its manifest and what was freed of it may not change."""
        source = self._source
        return {
            "export": LIST_VERSION,
            "format": self._format.name,
            "job": source.spec.job_id,
            "profile": source.profile.profile_id,
            "manifest_xxh3": source.completion.manifest_xxh3,
            "freed": source.acks.rows,
            "boundaries": list(source.boundaries),
            "final": source.final,
            "rows": list(source.rows),
            "gzip": self._gzip,
        }

    def run(self, threads: int) -> ExportReport:
        try:
            self._need_space()
            known = self._listing.known()
            group: list[tuple[Item, Line | None]] = []
            size, old = 0, True
            with ThreadPoolExecutor(threads, thread_name_prefix="export") as pool:
                for item in self._source.items():
                    line = next(known, None)
                    if line is None and old:
                        self._flush(pool, group)
                        self._listing.settle()
                        size, old = 0, False
                    here = line if line is not None and self._is_there(item, line) else None
                    group.append((item, here))
                    size += item.bytes if here is None else 0
                    if len(group) >= GROUP_ROWS or size >= GROUP_BYTES:
                        self._flush(pool, group)
                        size = 0
                self._flush(pool, group)
            self._listing.settle()
            return self._finish()
        finally:
            self._listing.close()

    def _path(self, item: Item) -> str:
        return self._format.path(item) + (".gz" if self._gzip else "")

    def _is_there(self, item: Item, line: Line) -> bool:
        if line.row != item.row or line.path != self._path(item):
            return False
        try:
            return os.stat(self._out / line.path).st_size == line.bytes
        except FileNotFoundError:
            return False

    def _need_space(self) -> None:
        """Before the first byte: a disk that fills up after hours helps nobody."""
        if self._gzip:
            return  # how far it goes is known at the end
        profile = self._source.profile
        planes = len(self._source.boundaries) + 1
        size = self._tokens * (planes * profile.hidden * ITEM_SIZES[profile.dtype] + 16) + self._rows * _OF_A_FILE
        missing = size - sum(line.bytes for line in self._listing.known()) - free_bytes(self._out)
        if missing > 0:
            raise StoreError(
                ErrorCode.STORE_FULL,
                f"{self._out}: the export takes up to {size:,} bytes, {missing:,} more than are free",
                next_step="Free space, give a folder on another disk, or fewer --rows or --boundaries.",
            )

    def _flush(self, pool: ThreadPoolExecutor, group: list[tuple[Item, Line | None]]) -> None:
        """Write the group's files and their lines. Empties it."""
        if not group:
            return
        new = [item for item, line in group if line is None]
        files = [NewFile(self._out) for _ in new]
        try:
            written = dict(zip((item.row for item in new), self._write_all(pool, new, files), strict=True))
            self._put({line.path: file for file, line in zip(files, written.values(), strict=True) if line.path})
        finally:
            for file in files:
                file.abandon()
        lines = [line or written[item.row] for item, line in group]
        self._listing.add(lines)
        for line in lines:
            self._bytes += line.bytes
            if line.code:
                self._bad += 1
                self._problems += [line] if len(self._problems) < KEPT_PROBLEMS else []
        self._done += len(group)
        self._kept += len(group) - len(new)
        self._written_bytes += sum(line.bytes for line in written.values())
        group.clear()
        if self._progress is not None:
            self._progress(Progress(done=self._done, kept=self._kept, rows=self._rows, bytes=self._written_bytes))

    def _write_all(self, pool: ThreadPoolExecutor, items: list[Item], files: list[NewFile]) -> list[Line]:
        """None of them is written any more when this returns or raises."""
        futures = [pool.submit(self._write, item, file) for item, file in zip(items, files, strict=True)]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def _write(self, item: Item, file: NewFile) -> Line:
        try:
            sample = self._source.sample(item)
        except StoreError as e:
            if e.code not in _OF_THE_ROW:
                raise
            return Line(row=item.row, code=e.code.value, message=e.message)
        content = self._format.content(item, sample, self._source.final)
        try:
            self._save(content, file)
        except RuntimeError as e:
            if file.error is None:
                raise
            raise file.error from e  # torch.save raises its own over the error of the write
        size, xxh3 = file.finish()
        return Line(row=item.row, path=self._path(item), bytes=size, xxh3=xxh3)

    def _save(self, content: dict[str, Any], file: NewFile) -> None:
        if not self._gzip:
            self._format.save(content, cast(BinaryIO, file))
            return
        with gzip.GzipFile("", "wb", GZIP_LEVEL, cast(BinaryIO, file), mtime=0) as packed:
            self._format.save(content, cast(BinaryIO, packed))

    def _put(self, files: dict[str, NewFile]) -> None:
        """Final names, durably; but first the export stops being a whole one."""
        if files:
            self._unmark()
        folders = {(self._out / path).parent for path in files}
        for folder in folders - self._folders:
            make_dirs(folder)
        self._folders |= folders
        for path, file in files.items():
            os.replace(file.temp, self._out / path)
        for folder in folders:
            fsync_dir(folder)

    def _unmark(self) -> None:
        if self._marked:
            remove(self._out / MARKER)
            fsync_dir(self._out)
            self._marked = False

    def _finish(self) -> ExportReport:
        if self._bad:
            self._unmark()
            return self._report(self._describe([]))
        was = read_json(self._out / MARKER) if self._marked else None
        if was is not None and was.get("list_xxh3") == self._listing.xxh3 and self._sides_are_there(was):
            return self._report(was)
        self._unmark()
        source = self._source
        finish = Finish(out=self._out, tokens=source.tokens, vocab_size=source.profile.vocab_size, draft_vocab=self._draft_vocab)
        export = self._describe(self._format.side_files(finish))
        write_file(self._out, MARKER, to_json(export))
        return self._report(export)

    def _sides_are_there(self, was: dict[str, Any]) -> bool:
        if was.get("draft_vocab") != self._draft_vocab:
            return False
        try:
            return all(os.stat(self._out / f["path"]).st_size == f["bytes"] for f in was["side_files"])
        except (FileNotFoundError, KeyError):
            return False

    def _describe(self, side_files: Iterable[str]) -> dict[str, Any]:
        source, profile, report = self._source, self._source.profile, self._source.completion
        head = self._head()
        del head["export"], head["freed"]
        ids = self._format.layer_ids(source.boundaries, profile.num_layers) if self._format.has_aux else []
        named = [*source.boundaries, profile.num_layers][: len(ids)]
        return head | {
            "title": self._format.title,
            "data": self._format.data,
            "statetap": __version__,
            "model": profile.model,
            "revision": profile.revision,
            "dtype": profile.dtype,
            "encoding": source.format.encoding,
            "hidden": profile.hidden,
            "num_layers": profile.num_layers,
            "final_derived": source.derived,
            "rows": {"start": source.rows[0], "stop": source.rows[1]},
            "counts": {
                "rows": self._rows,
                "tokens": self._tokens,
                "bytes": self._bytes,
            },
            "job_counts": {
                "rows": report.rows,
                "done": report.done,
                "failed": report.failed,
                "skipped": report.skipped,
                "freed": source.acks.rows,
            },
            "layers": {"system": self._format.title, "ids": ids, "boundaries": named, "text": layer_text(self._format.title, ids, named)}
            if ids
            else None,
            "notes": self._notes(),
            "draft_vocab": self._draft_vocab,
            "list": LIST,
            "list_xxh3": self._listing.xxh3,
            "side_files": [{"path": path, "bytes": os.stat(self._out / path).st_size} for path in side_files],
            "exported_at": round(time.time(), 3),
        }

    def _notes(self) -> list[str]:
        source, format = self._source, self._format
        notes = format.notes(self._draft_vocab)
        if format.has_aux and format.three and len(source.boundaries) != 3:
            notes = [*notes, f"{format.title}'s trainers expect three boundaries, these are {len(source.boundaries)}"]
        if format.has_aux and None in format.layer_ids(source.boundaries, source.profile.num_layers):
            notes = [*notes, f"boundary 0 (the embeddings) has no id in {format.title}"]
        if source.acks.rows:
            notes = [*notes, f"{source.acks.rows:,} rows were freed when they were read, and are not in it"]
        return notes

    def _report(self, export: dict[str, Any]) -> ExportReport:
        return ExportReport(
            out=str(self._out),
            export=export,
            written=self._done - self._kept - self._bad,
            kept=self._kept,
            bad=self._bad,
            problems=self._problems,
        )
