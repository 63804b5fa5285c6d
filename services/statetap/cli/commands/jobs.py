"""Jobs: submit, watch, list, control, their rows and errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from ...client import Client, Job, JobFilter
from ...contracts.records import JobState
from ..completing import complete_datasets, complete_jobs
from ..exits import exit_of
from ..options import Api, ByPath, Codes, JobId, Kept, MaxFailed, Rows, Shuffle, Trust, expanded, size_option
from ..output import Out
from ..sending import dataset_of
from ..units import counts, size
from ..watching import RESTART_S, line, log_line, person_paused, show

app = typer.Typer()

RowStates = Literal["done", "failed", "skipped", "open"]


@app.command()
@expanded
def submit(
    data: Annotated[list[str], typer.Argument(metavar="DATA…", help="Files, merged in order, or one dataset id.")],
    rows: Rows,
    kept: Kept,
    api: Api,
    by_path: ByPath = False,
    shuffle: Shuffle = None,
    first: Annotated[int | None, typer.Option("--rows", min=1, help="Only the first so many rows.")] = None,
    profile: Annotated[str | None, typer.Option("--profile", help="Capture profile; default: the only live one.")] = None,
    name: Annotated[str, typer.Option("--name", help="A name for people.")] = "",
    priority: Annotated[int, typer.Option("--priority", help="Higher is given out first.")] = 0,
    trust_remote_code: Trust = False,
    max_failed: MaxFailed = 0,
    no_reuse: Annotated[bool, typer.Option("--no-reuse", help="Prefill rows again that earlier jobs have.")] = False,
    retain: Annotated[
        Literal["all", "until_read"], typer.Option("--retain", help="until_read: free files once readers acknowledged them.")
    ] = "all",
    retain_bytes: Annotated[
        int | None, size_option("--retain-bytes", "With until_read: pause while so much is not read yet (2TB, 500GiB).")
    ] = None,
    wait_for_engine: Annotated[
        bool, typer.Option("--wait-for-engine", help="Accept a known profile that no live engine serves now.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Submit though the store has not the space.")] = False,
    idempotency_key: Annotated[str | None, typer.Option("--idempotency-key", help="The same key and request give the same job.")] = None,
    resume_upload: Annotated[
        str | None, typer.Option("--resume-upload", metavar="ID", help="Go on with an upload that was given up.")
    ] = None,
    wait: Annotated[bool, typer.Option("--watch", help="Watch the job to its end.")] = False,
) -> None:
    """Submit data and a job for it. With --watch the exit code says how the job ended."""
    out = api.out
    with api.client(RESTART_S if wait else 10.0) as client:
        # Rows are cut at ingestion; a longer row that is only skipped is the job's affair, so that another length needs no new ingestion.
        at_ingestion = rows.max_length if rows.truncate else 0
        options = rows.dataset(trust_remote_code=trust_remote_code, max_length=at_ingestion)
        dataset = dataset_of(client, data, out, {**options, "name": name}, by_path=by_path, shuffle=shuffle, resume=resume_upload)
        asked: dict[str, Any] = {
            "profile_id": profile, "name": name or None, "priority": priority or None, "max_failed": max_failed or None, "rows": first,
            "max_length": (rows.max_length if not rows.truncate else 0) or None, "reuse": False if no_reuse else None,
            "retain": retain if retain != "all" else None, "retain_bytes": retain_bytes,
            "wait_for_engine": wait_for_engine or None, "force": force or None, **kept.asked(),
        }  # fmt: skip
        job = client.submit_job(dataset.dataset_id, idempotency_key=idempotency_key, **asked)
        accepted = f"job {job.job_id}: {job.rows.total} rows, {size(job.bytes.expected)} expected"
        if not wait:
            out.document(job.to_dict(), accepted)
            return
        out.say(accepted)
        _watch_to_end(client, job.job_id, max_failed, out)


@app.command()
@expanded
def watch(job: JobId, api: Api, max_failed: MaxFailed = 0) -> None:
    """Watch a job to its end; the exit code says how it ended (4: a person paused it). --json: a line for each change."""
    with api.client(RESTART_S) as client:
        _watch_to_end(client, job, max_failed, api.out)


def _watch_to_end(client: Client, job_id: str, max_failed: int, out: Out) -> None:
    snapshots = client.events(job_id, heartbeats=not out.as_json)
    job = show(snapshots, out, until=lambda j: j.ended or person_paused(j)) or client.job(job_id)
    out.say(f"{job_id} {log_line(job)}")
    raise typer.Exit(int(exit_of(job, max_failed)))


@app.command()
@expanded
def jobs(
    api: Api,
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="One job; default: all.", autocompletion=complete_jobs)] = None,
    state: Annotated[list[JobState] | None, typer.Option("--state", help="Only jobs in this state; several times for several.")] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Only jobs paused or failed for this reason.")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", help="Only jobs of this dataset.", autocompletion=complete_datasets)] = None,
    profile: Annotated[str | None, typer.Option("--profile", help="Only jobs of this capture profile.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Only jobs with this in their name.")] = None,
) -> None:
    """List jobs, newest first, or show one."""
    out = api.out
    with api.client() as client:
        if job:
            found = client.job(job)
            out.document(found.to_dict(), *_described(found))
            return
        filters: JobFilter = {}
        if state:
            filters["state"] = [s.value for s in state]
        for key, value in (("reason", reason), ("dataset_id", dataset), ("profile_id", profile), ("name", name)):
            if value is not None:
                filters[key] = value  # type: ignore[literal-required]
        for found in client.jobs(**filters):
            out.item(found.to_dict(), f"{found.job_id} {line(found)}  {found.name}".rstrip(), one_line=True)


def _described(job: Job) -> list[str]:
    made = [f"{job.job_id} {line(job)}"]
    made += [f"  {job.message}"] if job.message else []
    made += [f"  errors: {counts(job.errors)}"] if job.errors else []
    made += [f"  reused: {job.rows.reused} rows"] if job.rows.reused else []
    made += [
        f"  captured by {e.engine_id} (SGLang {e.sglang_version}, Statetap {e.plugin_version}, start {e.boot_id}): {e.rows} rows"
        for e in job.engines
    ]
    return [*made, f"  name {job.name}, dataset {job.dataset_id}, profile {job.profile_id}, priority {job.priority}", f"  {job.path}"]


@app.command()
@expanded
def errors(job: JobId, api: Api, code: Codes = None) -> None:
    """List the rows of a job that failed or were skipped, with the next step of each."""
    out = api.out
    with api.client() as client:
        wanted = set(code or [])
        # The coordinator filters by one code; several are sorted out here.
        for e in client.errors(job, code=next(iter(wanted)) if len(wanted) == 1 else None):
            if not wanted or e.code in wanted:
                out.item(
                    e.to_dict(),
                    f"row {e.row} {f'{e.file}:{e.line}' if e.file else f'line {e.line}'} {e.state} {e.code}: {e.message} ({e.next_step})",
                )


@app.command()
@expanded
def rows(
    job: JobId,
    api: Api,
    state: Annotated[RowStates | None, typer.Option("--state", help="Only rows in this state; open: not ended yet.")] = None,
) -> None:
    """List the rows of a job and their files."""
    out = api.out
    with api.client() as client:
        for r in client.rows(job, state=state):
            what = f"{r.path} {r.bytes} bytes, {r.tokens} tokens, xxh3 {r.xxh3}" if r.path else f"{r.code}: {r.message}" if r.code else ""
            out.item(r.to_dict(), f"row {r.row} {r.state} {what}{f' from {r.origin}' if r.origin else ''}".rstrip())


@app.command()
@expanded
def retry(job: JobId, api: Api, code: Codes = None) -> None:
    """Open the failed rows of a job again (all, or those with a --code), and let it go on."""
    with api.client() as client:
        found = client.retry(job, code)
        _told(api.out, found)


@app.command()
@expanded
def pause(job: JobId, api: Api) -> None:
    """Pause a job: no new prefill within 2 s."""
    with api.client() as client:
        _told(api.out, client.pause(job))


@app.command()
@expanded
def resume(job: JobId, api: Api) -> None:
    """Let a paused job go on."""
    with api.client() as client:
        _told(api.out, client.resume(job))


@app.command()
@expanded
def cancel(job: JobId, api: Api) -> None:
    """Cancel a job; rows that are done stay."""
    with api.client() as client:
        _told(api.out, client.cancel(job))


def _told(out: Out, job: Job) -> None:
    if out.as_json:
        out.document(job.to_dict())
    else:
        out.say(f"{job.job_id} {line(job)}")
