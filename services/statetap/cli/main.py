"""The ``statetap`` command. Every verb is a few lines here; the work is in the modules beside it.

Invariant: a StatetapError ends a command with its code, its sentence and the next step on stderr, and exit code 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .. import __version__
from ..contracts.errors import ErrorCode, RequestError, StatetapError
from .api import Api
from .exits import Exit, exit_of
from .running import RunRequest, Stopped, run, stop_on_signals
from .stack import STATE_DIR, Stack, StackConfig
from .watching import ENDED, line, size, watch

app = typer.Typer(
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, help=__doc__.splitlines()[0] if __doc__ else None
)

Url = Annotated[str, typer.Option("--url", envvar="STATETAP_URL", help="Root of the coordinator's API.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULT_URL = "http://127.0.0.1:8700"

Model = Annotated[str, typer.Option("--model", help="Model folder or hub id; with --cpu also `tiny`, a model made on the spot.")]
TapDir = Annotated[Path | None, typer.Option("--tap", help="Folder on a tmpfs. Default: one of its own in /dev/shm, removed at the end.")]
Engines = Annotated[
    int, typer.Option("--engines", min=1, help="Engines; each takes --tp GPUs, a port, a tap folder and workers of its own.")
]
Workers = Annotated[int, typer.Option("--workers", min=1, help="Workers an engine: one fills while the other drains.")]
Tp = Annotated[int, typer.Option("--tp", min=1, help="Tensor parallel size of an engine.")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Real SGLang without a GPU (small models).")]
Boundaries = Annotated[str, typer.Option("--boundaries", help="Comma-separated; default = [2, L//2, L-3] (EAGLE-3).")]
Final = Annotated[str, typer.Option("--final", help="Final state to capture: pre, post, both or none.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's and the tokenizer's own code.")]
Window = Annotated[int | None, typer.Option("--window", min=1, help="Prefills in flight a worker.")]
Sglang = Annotated[list[str] | None, typer.Argument(help="Flags for SGLang, after --.")]
Format = Annotated[str, typer.Option("--format", help="auto, messages, sharegpt or tokenized.")]
Tokenizer = Annotated[str | None, typer.Option("--tokenizer", help="Default: the model's.")]
MaxLength = Annotated[int, typer.Option("--max-length", min=0, help="Longest row in tokens; 0: no limit.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut longer rows rather than reject them.")]
MaxFailed = Annotated[int, typer.Option("--max-failed", min=0, help="Failed and skipped rows that still count as success.")]


def say(text: str) -> None:
    """One flushed line an event."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1), flush=True)


def _flags(values: list[str] | None) -> tuple[str, ...]:
    return tuple(v for v in values or [] if v != "--")


def _dataset_options(fmt: str, tokenizer: str | None, max_length: int, truncate: bool, trust: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"format": fmt, "max_length": max_length, "truncate": truncate, "trust_remote_code": trust}
    return {**options, "tokenizer": _local(tokenizer)} if tokenizer else options


def _model(name: str, cpu: bool, store: Path) -> str:
    """The model to serve; ``tiny`` is made below the store, once."""
    if not (cpu and name == "tiny"):
        return _local(name)
    folder = (store / STATE_DIR / "tiny").resolve()
    say(f"model tiny: {folder}")
    # In a process of its own: torch has no place in this one.
    subprocess.run([sys.executable, "-m", "statetap.engine.tiny", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return str(folder)


def _local(name: str) -> str:
    """A folder's absolute path; a hub id stays as it is."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


@app.command()
def up(
    model: Model,
    store: Annotated[Path, typer.Option("--store", envvar="STATETAP_STORE", help="Store folder: datasets and jobs.")],
    tap: TapDir = None,
    engines: Engines = 1,
    workers: Workers = 2,
    tp: Tp = 1,
    cpu: Cpu = False,
    boundaries: Boundaries = "default",
    final: Final = "pre",
    trust_remote_code: Trust = False,
    host: Annotated[str, typer.Option("--host", help="Address of the API.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of the API; 0 takes a free one.")] = 8700,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", envvar="STATETAP_DATA_DIR", help="Folder below which datasets may be named by path.")
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option("--redis-url", envvar="STATETAP_REDIS_URL", help="Default: a redis-server of its own.")
    ] = None,
    window: Window = None,
    sglang: Sglang = None,
) -> None:
    """Run the whole stack on this host until Ctrl-C or SIGTERM."""
    config = StackConfig(
        model=_model(model, cpu, store), store=store, tap=tap, engines=engines, workers_per_engine=workers, tp=tp, cpu=cpu, boundaries=boundaries, final=final,
        trust_remote_code=trust_remote_code, host=host, port=port, data_dir=data_dir, redis_url=redis_url, window=window, sglang=_flags(sglang),
    )  # fmt: skip
    stack = Stack(config=config, say=say)
    stop_on_signals()
    try:
        stack.start()
        while True:
            stack.tick()
            time.sleep(0.5)
    except Stopped as e:
        say(f"{e}: stopping; workers finish what is in flight")
    finally:
        stack.stop()
    say("stopped")


@app.command("run")
def run_command(
    data: Annotated[Path, typer.Argument(help="Dataset file: JSONL or JSON.")],
    model: Model,
    out: Annotated[Path, typer.Option("--out", help="Store folder; call again with the same one to go on.")],
    tap: TapDir = None,
    engines: Engines = 1,
    workers: Workers = 2,
    tp: Tp = 1,
    cpu: Cpu = False,
    boundaries: Boundaries = "default",
    final: Final = "pre",
    trust_remote_code: Trust = False,
    window: Window = None,
    format: Format = "auto",
    tokenizer: Tokenizer = None,
    max_length: MaxLength = 0,
    truncate: Truncate = False,
    max_failed: MaxFailed = 0,
    pause_timeout: Annotated[
        float, typer.Option("--pause-timeout", min=0, help="Seconds a pause may last before the command gives up.")
    ] = 600.0,
    sglang: Sglang = None,
) -> None:
    """Start the stack, extract one dataset, stop, and exit (for Slurm). 0 completed, 3 with errors, 4 paused, 5 failed, 6 cancelled."""
    if not data.is_file():
        raise RequestError(ErrorCode.NOT_FOUND, f"{data} is not a file")
    model = _model(model, cpu, out)
    config = StackConfig(
        model=model, store=out, tap=tap, engines=engines, workers_per_engine=workers, tp=tp, cpu=cpu, boundaries=boundaries, final=final,
        trust_remote_code=trust_remote_code, allow_any_path=True, window=window, sglang=_flags(sglang),
    )  # fmt: skip
    options = _dataset_options(format, tokenizer or model, max_length, truncate, trust_remote_code)
    request = RunRequest(data=data, options=options, max_failed=max_failed, pause_timeout_s=pause_timeout)
    raise typer.Exit(int(run(config, request, Console(), say)))


@app.command()
def submit(
    data: Annotated[Path, typer.Argument(help="Dataset file; it is uploaded unless --path is given.")],
    url: Url = DEFAULT_URL,
    by_path: Annotated[bool, typer.Option("--path", help="Name the file under the coordinator's data folder, do not upload it.")] = False,
    profile: Annotated[str | None, typer.Option("--profile", help="Capture profile; default: the only live one.")] = None,
    name: Annotated[str, typer.Option("--name", help="A name for people.")] = "",
    priority: Annotated[int, typer.Option("--priority", help="Higher is given out first.")] = 0,
    format: Format = "auto",
    tokenizer: Tokenizer = None,
    max_length: MaxLength = 0,
    truncate: Truncate = False,
    trust_remote_code: Trust = False,
    max_failed: MaxFailed = 0,
    wait: Annotated[bool, typer.Option("--watch", help="Watch the job to its end.")] = False,
    as_json: Json = False,
) -> None:
    """Submit a dataset and a job for it."""
    if not by_path and not data.is_file():
        raise RequestError(ErrorCode.NOT_FOUND, f"{data} is not a file")
    api = Api(url)
    options = {**_dataset_options(format, tokenizer, max_length, truncate, trust_remote_code), "name": name}
    dataset = api.dataset_from_path(data.resolve(), options) if by_path else api.upload_dataset(data, options)
    while dataset["state"] == "ingesting":
        time.sleep(0.3)
        dataset = api.get(f"/v1/datasets/{dataset['dataset_id']}")
    if dataset["state"] == "failed":
        error = dataset["error"] or {}
        raise RequestError(ErrorCode.DATASET_FAILED, f"{data}: {error.get('message', 'no row could be used')}")
    body: dict[str, Any] = {"dataset_id": dataset["dataset_id"], "name": name, "priority": priority, "max_failed": max_failed}
    job = api.post("/v1/jobs", json={**body, "profile_id": profile} if profile else body)
    if as_json:
        _print_json(job)
    else:
        say(f"job {job['job_id']}: {job['rows']['total']} rows, {size(job['bytes']['expected'])} expected")
    if wait:
        _watch_to_end(api, job["job_id"], max_failed)


@app.command("watch")
def watch_command(job_id: str, url: Url = DEFAULT_URL, max_failed: MaxFailed = 0) -> None:
    """Watch a job to its end; the exit code says how it ended."""
    _watch_to_end(Api(url, patience_s=60.0), job_id, max_failed)


def _watch_to_end(api: Api, job_id: str, max_failed: int) -> None:
    job = watch(api, job_id, Console(), until=lambda j: j["state"] in ENDED or (j["state"] == "paused" and j["reason"] == "user"))
    say(f"{job_id} {line(job)}")
    raise typer.Exit(int(exit_of(job, max_failed)))


@app.command()
def jobs(
    job_id: Annotated[str | None, typer.Argument(help="One job; default: all.")] = None,
    url: Url = DEFAULT_URL,
    state: Annotated[str | None, typer.Option("--state", help="Only jobs in this state.")] = None,
    as_json: Json = False,
) -> None:
    """List jobs, or show one."""
    api = Api(url)
    if job_id:
        job = api.get(f"/v1/jobs/{job_id}")
        _print_json(job) if as_json else print(job_id, line(job), job["message"])
        return
    cursor = None
    while True:
        page = api.get("/v1/jobs", cursor=cursor, state=state)
        for job in page["items"]:
            print(json.dumps(job) if as_json else f"{job['job_id']}  {line(job)}  {job['name']}")
        cursor = page["next_cursor"]
        if not cursor:
            return


@app.command()
def errors(
    job_id: str,
    url: Url = DEFAULT_URL,
    code: Annotated[str | None, typer.Option("--code", help="Only this code.")] = None,
    as_json: Json = False,
) -> None:
    """List the rows of a job that failed or were skipped."""
    api, cursor = Api(url), None
    while True:
        page = api.get(f"/v1/jobs/{job_id}/errors", cursor=cursor, code=code, limit=1000)
        for e in page["items"]:
            print(
                json.dumps(e) if as_json else f"row {e['row']} line {e['line']} {e['state']} {e['code']}: {e['message']} ({e['next_step']})"
            )
        cursor = page["next_cursor"]
        if not cursor:
            return


def _control(verb: str) -> Any:
    def command(job_id: str, url: Url = DEFAULT_URL) -> None:
        job = Api(url).post(f"/v1/jobs/{job_id}/{verb}")
        say(f"{job_id} {line(job)}")

    command.__doc__ = {
        "cancel": "Cancel a job; rows that are done stay.",
        "pause": "Pause a job: no new prefill within 2 s.",
        "resume": "Let a paused job go on.",
    }[verb]
    return command


for _verb in ("cancel", "pause", "resume"):
    app.command(_verb)(_control(_verb))


def find_job_dir(path: Path) -> Path:
    """A job's folder from itself, or from a store that holds one job. Raises RequestError."""
    if (path / "job.json").exists():
        return path
    found = sorted(p.parent for p in path.glob("jobs/*/job.json"))
    if len(found) != 1:
        what = f"{len(found)} jobs: name one of {[str(p) for p in found[:5]]}" if found else "no job"
        raise RequestError(ErrorCode.NOT_FOUND, f"{path} holds {what}")
    return found[0]


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="A job's folder, or a store with one job.")],
    threads: Annotated[int, typer.Option("--threads", min=1, help="Files that are read at once.")] = min(8, os.cpu_count() or 1),
    as_json: Json = False,
) -> None:
    """Read every file of a job again and compare it with the ledger. Exit 0: whole and right; 7: not."""
    from ..store.verify import verify_job

    report = verify_job(find_job_dir(path), threads=threads)
    if as_json:
        _print_json(report.to_dict())
    else:
        for problem in report.problems:
            print(f"row {problem.row} {problem.path}: {problem.code}: {problem.message}")
        print(f"{report.files} files, {size(report.bytes)}, {report.rows} rows, problems: {report.counts or 'none'}")
    raise typer.Exit(int(Exit.COMPLETED if report.ok else Exit.PROBLEMS_FOUND))


@app.command()
def parity(
    path: Annotated[Path, typer.Argument(help="A job's folder, or a store with one job.")],
    model: Model,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Rows to compare, spread over the job.")] = 8,
    tolerance: Annotated[float, typer.Option("--tolerance", help="Largest relative error.")] = 1e-5,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Compare files of a job with transformers' forward on the same weights. Exit 0: equal; 7: not."""
    from .compare import compare_job

    result = compare_job(find_job_dir(path), _local(model), samples=samples, trust_remote_code=trust_remote_code)
    ok = result.rows > 0 and result.worst < tolerance < result.shifted
    if as_json:
        _print_json(
            {
                "rows": result.rows,
                "tokens": result.tokens,
                "errors": result.errors,
                "worst": result.worst,
                "shifted": result.shifted,
                "ok": ok,
            }
        )
    else:
        for name, error in result.errors.items():
            print(f"boundary {name}: relative error {error:.2g}" if name.isdigit() else f"{name}: relative error {error:.2g}")
        print(
            f"{result.rows} rows, {result.tokens} tokens: {'equal' if ok else 'NOT equal'} (largest {result.worst:.2g}, nearest shifted control {result.shifted:.2g})"
        )
    raise typer.Exit(int(Exit.COMPLETED if ok else Exit.PROBLEMS_FOUND))


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Entry point: errors of ours become a message with a code and the next step."""
    try:
        app()
    except StatetapError as e:
        print(f"error: {e}\n  next: {e.next_step}", file=sys.stderr, flush=True)
        sys.exit(int(Exit.ERROR))
    except KeyboardInterrupt:
        sys.exit(int(Exit.INTERRUPTED))


if __name__ == "__main__":
    main()
