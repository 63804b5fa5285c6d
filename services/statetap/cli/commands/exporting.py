"""``export``: a job in a trainer's own files."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...contracts.boundaries import parse_boundaries
from ...contracts.errors import ErrorCode, RequestError
from ...store.export.base import Final, FormatName
from ..exits import Exit
from ..options import JobFolder, Json
from ..output import Out, write
from ..units import size
from .checks import find_job_dir

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...store.export.run import ExportReport, Progress

app = typer.Typer()

SAY_EVERY_S = 5.0
_RANGE = re.compile(r"(?:(\d+)-)?(\d+)")


def parse_rows(text: str) -> tuple[int, int]:
    """``2000-4000``, half-open, or ``2000`` for 0-2000. Raises RequestError."""
    match = _RANGE.fullmatch(text.replace("_", "").replace(",", ""))
    if match is None:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"rows: {text!r} is neither a number nor a range such as 2000-4000")
    return int(match[1] or 0), int(match[2])


@app.command()
def export(
    path: JobFolder,
    format: Annotated[FormatName, typer.Option("--format", help="Whose files.")],
    out: Annotated[Path, typer.Option("--out", help="Folder, empty or not there, or one whose export was cut off: it goes on.")],
    boundaries: Annotated[str | None, typer.Option("--boundaries", help="Comma-separated, in this order. Default: all captured.")] = None,
    final: Annotated[Final | None, typer.Option("--final", help="Final state. Default: the one that the trainers expect.")] = None,
    rows: Annotated[str | None, typer.Option("--rows", help="Source rows, half-open: 2000-4000, or 2000 for the first.")] = None,
    gzip: Annotated[bool, typer.Option("--gzip", help="Compress each file (specforge).")] = False,
    draft_vocab: Annotated[
        int, typer.Option("--draft-vocab", min=0, help="Also write the draft's vocabulary mapping of this size (specforge, angelslim).")
    ] = 0,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Files written at once. Default: one a core, at most 8.")] = None,
    as_json: Json = False,
) -> None:
    """Write a complete job in a trainer's own files. Exit 0: whole (EXPORT.json is there); 7: rows of the job are missing or corrupt."""
    try:
        from ...store.export.registry import FORMATS  # torch
        from ...store.export.run import export_job
        from ...store.jobs import load_job
    except ModuleNotFoundError as e:
        raise RequestError(
            ErrorCode.INVALID_REQUEST, f"export needs {e.name}, which is not installed", next_step="pip install 'statetap[cli,train]'"
        ) from None

    job_dir = find_job_dir(path)
    report = export_job(
        job_dir, out, FORMATS[format], final=final,
        boundaries=None if boundaries is None else parse_boundaries(boundaries, load_job(job_dir).capture_profile.num_layers),
        rows=None if rows is None else parse_rows(rows), compressed=gzip, draft_vocab=draft_vocab,
        threads=threads or min(8, os.cpu_count() or 1), progress=_teller(time.monotonic()),
    )  # fmt: skip
    Out(as_json).document(report.to_dict(), *_lines(report))
    raise typer.Exit(int(Exit.COMPLETED if report.ok else Exit.PROBLEMS_FOUND))


def _teller(started_at: float) -> Callable[[Progress], None]:
    told_at = started_at

    def tell(now: Progress) -> None:
        nonlocal told_at
        at = time.monotonic()
        if at - told_at < SAY_EVERY_S:
            return
        told_at = at
        speed = f"{size(now.bytes)} written, {size(now.bytes / (at - started_at))}/s"
        write(sys.stderr, f"{time.strftime('%H:%M:%S')} {now.done:,}/{now.rows:,} rows, {speed}", cut=True)

    return tell


def _lines(report: ExportReport) -> list[str]:
    export: dict[str, Any] = report.export
    lines = [f"row {p.row}: {p.code}: {p.message}" for p in report.problems]
    lines += [export["layers"]["text"]] if export["layers"] else []
    derived = " (derived from pre)" if export["final_derived"] else ""
    lines += [f"final state: {export['final']}-norm{derived}, {export['dtype']}", *(f"note: {n}" for n in export["notes"])]
    kept = f", {report.kept:,} of them were there" if report.kept else ""
    total = f"{export['counts']['rows'] - report.bad:,} rows, {size(export['counts']['bytes'])}{kept}"
    if report.ok:
        return [*lines, f"{total}: whole; give the trainer {Path(report.out, export['data'])}"]
    return [
        *lines,
        f"{total}: NOT whole: {report.bad:,} rows of the job are missing or corrupt, so there is no EXPORT.json",
        "next: `statetap verify` names what is wrong with the job; bring those files back, then export again: it goes on from here",
    ]
