"""Datasets, what they would cost, what can be removed, and the engines."""

from __future__ import annotations

import sys
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Literal

import typer

from ...client import Dataset, Deleted, Engine, Estimate, JobOptions, SmallerJob
from ...contracts.errors import ErrorCode, RequestError
from ..completing import complete_both, complete_datasets
from ..estimating import run_probe
from ..options import Api, ByPath, Kept, Rows, Shuffle, Trust, duration_option, expanded
from ..sending import dataset_of
from ..units import counts, duration, size

app = typer.Typer()

WEEK_S = 7 * 86_400.0
PROBE_ROWS = 200


class EndedState(StrEnum):
    """States whose jobs can be collected (typer takes no list of literals)."""

    COMPLETED = "completed"
    COMPLETED_WITH_ERRORS = "completed_with_errors"
    CANCELLED = "cancelled"
    FAILED = "failed"


@app.command()
@expanded
def datasets(
    api: Api,
    dataset: Annotated[
        str | None, typer.Argument(metavar="[DATASET]", help="One dataset; default: all.", autocompletion=complete_datasets)
    ] = None,
    state: Annotated[Literal["ingesting", "ready", "failed"] | None, typer.Option("--state", help="Only datasets in this state.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Only datasets with this in their name.")] = None,
) -> None:
    """List datasets, newest first, or show one."""
    out = api.out
    with api.client() as client:
        if dataset:
            found = client.dataset(dataset)
            out.document(found.to_dict(), *_described(found))
            return
        for found in client.datasets(state=state, name=name):
            out.item(found.to_dict(), _line(found), one_line=True)


def _line(d: Dataset) -> str:
    rejected = f" {d.rejected:,} rejected" if d.rejected else ""
    return f"{d.dataset_id} {d.state} {d.rows:,} rows {d.tokens:,} tokens{rejected}  {d.name}"


def _described(d: Dataset) -> list[str]:
    made = [
        _line(d),
        f"  format {d.format}, tokenizer {d.tokenizer or 'none'}, longest row {d.max_tokens:,} tokens, {d.supervised_tokens:,} supervised",
    ]
    made += [f"  merged from {', '.join(d.sources)}"] if d.sources else []
    made += [f"  shuffled by seed {d.shuffle_seed}"] if d.shuffle_seed is not None else []
    made += [f"  read {size(d.bytes_read)} of {size(d.bytes_total)}"] if d.state == "ingesting" else []
    made += [f"  errors: {counts(d.errors)}"] if d.errors else []
    made += [f"  line {e.get('line')}: {e.get('code')}: {e.get('message')}" for e in d.examples[:5]]
    return made + ([f"  {d.error.get('code')}: {d.error.get('message')}"] if d.error else [])


@app.command()
@expanded
def engines(api: Api) -> None:
    """List the engines that are alive, and what they capture."""
    out = api.out
    with api.client() as client:
        found = client.engines()
        for e in found:
            out.item(e.to_dict(), _engine_line(e))
    if not found and not out.as_json:
        out.say("no engine is alive; start one with `statetap up --model …`")


def _engine_line(e: Engine) -> str:
    p = e.profile
    return (
        f"{e.engine_id} {'healthy' if e.healthy else 'NOT healthy'}, profile {e.profile_id}, {e.workers} workers, tap {size(e.tap_bytes)}: "
        f"{p.get('model')}, boundaries {','.join(map(str, p.get('boundaries', [])))}, final {p.get('final')}, {p.get('dtype')}, SGLang {p.get('sglang_version')}"
    )


@app.command()
@expanded
def estimate(
    data: Annotated[list[str], typer.Argument(metavar="DATA…", help="Files, or one dataset id.", autocompletion=complete_datasets)],
    rows: Rows,
    kept: Kept,
    api: Api,
    by_path: ByPath = False,
    shuffle: Shuffle = None,
    first: Annotated[int | None, typer.Option("--rows", min=1, help="Only the first so many rows.")] = None,
    profile: Annotated[str | None, typer.Option("--profile", help="Capture profile; default: the only live one.")] = None,
    trust_remote_code: Trust = False,
    probe: Annotated[
        int,
        typer.Option("--probe", min=0, metavar="N", help=f"Run the first N rows to measure the speed ({PROBE_ROWS} are a good number)."),
    ] = 0,
) -> None:
    """Say what a job would need: bytes against the store's space, what would fit where it does not, and hours."""
    out = api.out
    with api.client(10.0) as client:
        at_ingestion = rows.max_length if rows.truncate else 0
        options = rows.dataset(trust_remote_code=trust_remote_code, max_length=at_ingestion)
        dataset = dataset_of(client, data, out, options, by_path=by_path, shuffle=shuffle)
        max_length = (rows.max_length if not rows.truncate else 0) or None
        found = client.estimate(dataset.dataset_id, profile_id=profile, rows=first, max_length=max_length, **kept.asked())
        asked: JobOptions = {k: v for k, v in {"profile_id": profile, "max_length": max_length, **kept.asked()}.items() if v is not None}  # type: ignore[assignment]
        measured = ratio = None
        if probe:
            measured, ratio = run_probe(client, dataset.dataset_id, probe, out, asked)
        if ratio is not None and not found.exact:
            found = replace(found, expected_bytes=round(found.bytes * ratio))
        speed = measured or found.tokens_per_s
        hours = found.tokens / speed / 3600 if speed else None
    told = {**found.to_dict(), "dataset_id": dataset.dataset_id, "tokens_per_s": speed, "hours": hours, "probed": measured is not None}
    out.document(told, *_estimated(found, speed, hours, measured is not None))


def _bytes(e: Estimate | SmallerJob) -> str:
    if e.exact:
        return size(e.bytes)
    return f"at most {size(e.bytes)}" + ("" if e.expected_bytes is None else f", about {size(e.expected_bytes)}")


def _estimated(e: Estimate, speed: float | None, hours: float | None, probed: bool) -> list[str]:
    space = f"{size(e.free)} free, {size(e.reserved)} of it for running jobs, {size(e.kept_free)} stay free"
    made = [
        f"{e.accepted:,} of {e.rows:,} rows, {e.tokens:,} tokens: {_bytes(e)}",
        f"store: {space}: {'it fits' if e.fits else f'{size(e.missing)} are missing'}",
    ]
    made += [f"  {'would' if a.fits else 'may'} fit: {a.change}: {a.rows:,} rows, {_bytes(a)}" for a in e.alternatives]
    if speed and hours is not None:
        how = "measured by the probe" if probed else "as jobs of this profile ran last"
        return [*made, f"time: {duration(hours * 3600)} h:mm:ss at {speed:,.0f} tok/s ({how})"]
    return [*made, f"time: unknown; measure it with --probe {PROBE_ROWS}"]


@app.command()
@expanded
def rm(
    what: Annotated[list[str], typer.Argument(metavar="JOB|DATASET…", help="Ids of jobs and datasets.", autocompletion=complete_both)],
    api: Api,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be freed.")] = False,
    force: Annotated[bool, typer.Option("--force", help="A dataset too that jobs which have ended were made of.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete jobs and datasets that nobody uses. On a terminal it asks first."""
    out = api.out
    unknown = [w for w in what if not w.startswith(("job-", "ds-"))]
    if unknown:
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"{unknown[0]!r} is neither a job (job-…) nor a dataset (ds-…)",
            next_step="List them: `statetap jobs`, `statetap datasets`.",
        )
    ask = not (yes or dry_run or out.as_json) and sys.stdin.isatty()
    with api.client() as client:

        def delete(name: str, *, dry_run: bool) -> Deleted:
            return (
                client.delete_job(name, dry_run=dry_run)
                if name.startswith("job-")
                else client.delete_dataset(name, dry_run=dry_run, force=force)
            )

        for name in what:
            if ask:
                would = delete(name, dry_run=True)
                if not typer.confirm(f"Delete {name} ({would.files:,} files, {size(would.bytes)})?", err=True):
                    continue
            done = delete(name, dry_run=dry_run)
            verb = "would be freed" if dry_run else "freed"
            out.item({"id": name, **done.to_dict()}, f"{name}: {done.files:,} files, {size(done.bytes)} {verb}")


@app.command()
@expanded
def gc(
    api: Api,
    apply: Annotated[bool, typer.Option("--apply/--dry-run", help="Delete, rather than only say what would be.")] = False,
    older_than: Annotated[float | None, duration_option("--older-than", "Only jobs that ended so long ago. Default: 7d.")] = None,
    state: Annotated[
        list[EndedState] | None, typer.Option("--state", help="Delete jobs in this state whole; several times for several.")
    ] = None,
) -> None:
    """Delete what nobody needs any more: files that no job names, and whole jobs in a --state. Without --apply it only says what."""
    out = api.out
    with api.client() as client:
        found = client.gc(
            dry_run=not apply, older_than_s=WEEK_S if older_than is None else older_than, states=[s.value for s in state or []]
        )
    lines = [f"{item.kind} {item.name}: {item.files:,} files, {size(item.bytes)}" for item in found.items]
    total = f"{found.files:,} files, {size(found.bytes)} {'freed' if apply else 'would be freed; do it with --apply'}"
    out.document(found.to_dict(), *lines, total)
