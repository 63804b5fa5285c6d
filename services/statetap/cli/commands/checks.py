"""``verify``, ``parity``, ``doctor`` and ``version``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ... import __version__
from ...contracts.errors import ErrorCode, RequestError
from ..exits import Exit
from ..options import Api, JobFolder, Json, Model, Trust, expanded, local
from ..output import Out, write
from ..repairing import repair_job
from ..units import size

if TYPE_CHECKING:
    from ...store.verify import VerifyReport

app = typer.Typer()


def find_job_dir(path: Path) -> Path:
    """A job's folder from itself, or from a store that holds one job. Raises RequestError."""
    if (path / "job.json").exists():
        return path
    found = sorted(p.parent for p in path.glob("jobs/*/job.json"))
    if len(found) != 1:
        what = f"{len(found)} jobs: name one of {[str(p) for p in found[:5]]}" if found else "no job"
        raise RequestError(ErrorCode.NOT_FOUND, f"{path} holds {what}", next_step="Give a job's folder (`statetap jobs JOB` shows it).")
    return found[0]


@app.command()
@expanded
def verify(
    path: JobFolder,
    api: Api,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Files that are read at once. Default: one a core, at most 8.")
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Have the coordinator at --url capture the rows of damaged files anew, and verify again when the job has ended.",
        ),
    ] = False,
) -> None:
    """Read every file of a job again and compare it with the ledger. Exit 0: whole and right; 7: not."""
    # pyarrow and numpy take a second to import, and most verbs need neither.
    from ...store.verify import verify_job

    out, job_dir, files_at_once = api.out, find_job_dir(path), threads or min(8, os.cpu_count() or 1)
    report = verify_job(job_dir, threads=files_at_once)
    if repair and report.repairable:
        for text in _found(report):
            write(out.people, text)
        repair_job(api, job_dir.name, report.damaged)
        report = verify_job(job_dir, threads=files_at_once)
    out.document(report.to_dict(), *_found(report))
    raise typer.Exit(int(Exit.COMPLETED if report.ok else Exit.PROBLEMS_FOUND))


def _found(report: VerifyReport) -> list[str]:
    problems = [f"row {p.row} {p.path}: {p.code}: {p.message}" for p in report.problems]
    return [*problems, f"{report.files} files, {size(report.bytes)}, {report.rows} rows, problems: {report.counts or 'none'}"]


@app.command()
def parity(
    path: JobFolder,
    model: Model,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Rows to compare, spread over the job.")] = 8,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", help="Largest error. Default: by the states' dtype; 1e-5 (relative) for float32 states."),
    ] = None,
    lm_head: Annotated[
        str | None,
        typer.Option(
            "--lm-head",
            metavar="URL",
            help="For models too big for transformers: compare lm_head(norm(final)) with the log probabilities of the engine at this "
            "address. Reads only head and norm of the model; checks only the final state.",
        ),
    ] = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Compare files of a job with transformers' forward on the same weights, and name the mistake if any. Exit 0: equal; 7: not."""
    from ..compare import compare_job, compare_job_head  # torch and transformers

    job_dir = find_job_dir(path)
    if lm_head is not None:
        head = compare_job_head(job_dir, local(model), lm_head, samples=samples, tolerance=tolerance)
        told = {k: getattr(head, k) for k in ("rows", "tokens", "agree", "error", "worst", "shifted", "tolerance", "ok")}
        lines = [
            f"log probabilities differ by {head.error:.2g} on average, {head.worst:.2g} at most; one position off by {head.shifted:.2g}",
            f"next token: {head.agree} of {head.rows} rows the same as the engine's",
        ]
        summary, ok = f"{head.rows} rows, {head.tokens} tokens: the final state is {'right' if head.ok else 'NOT right'}", head.ok
    else:
        result = compare_job(job_dir, local(model), samples=samples, tolerance=tolerance, trust_remote_code=trust_remote_code)
        told = {k: getattr(result, k) for k in ("rows", "tokens", "errors", "worst", "shifted", "tolerance", "mistakes", "ok")}
        lines = [
            f"{f'boundary {name}' if name.isdigit() else name}: relative error {error:.2g}"
            + (f": {result.mistakes[name]}" if name in result.mistakes else "")
            for name, error in result.errors.items()
        ]
        verdict = f"{'equal' if result.ok else 'NOT equal'} (largest {result.worst:.2g}, nearest shifted control {result.shifted:.2g})"
        summary, ok = f"{result.rows} rows, {result.tokens} tokens: {verdict}", result.ok
    Out(as_json).document(told, *lines, summary)
    raise typer.Exit(int(Exit.COMPLETED if ok else Exit.PROBLEMS_FOUND))


@app.command()
@expanded
def doctor(
    api: Api,
    store: Annotated[
        Path | None, typer.Option("--store", envvar="STATETAP_STORE", help="Store folder; without it the disk is not looked at.")
    ] = None,
    tap: Annotated[
        Path | None,
        typer.Option("--tap", envvar="STATETAP_TAP", help="Tap folder. Default: /dev/shm, which only has to do where SGLang is installed."),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option("--redis-url", envvar="STATETAP_REDIS_URL", help="Redis; without it only the coordinator is asked about it."),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="No GPU is expected.")] = False,
) -> None:
    """Look at everything that a run needs; each line is ok, or says what to do. Exit 0: nothing FAILs; 1: something does."""
    from ..doctor import examine

    out, failed = api.out, False
    for finding in examine(url=api.url, store=store, tap=tap, redis_url=redis_url, cpu=cpu):
        failed = failed or finding.level == "FAIL"
        out.item(
            finding.to_dict(), f"{finding.level:<4} {finding.subject}: {finding.text}" + (f" -> {finding.todo}" if finding.todo else "")
        )
    raise typer.Exit(int(Exit.ERROR if failed else Exit.COMPLETED))


@app.command()
def version(as_json: Json = False) -> None:
    """Print the version."""
    Out(as_json).document({"version": __version__}, __version__)
