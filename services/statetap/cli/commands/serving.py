"""``up`` and ``run``: the stack on this host."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from ...contracts.errors import ErrorCode, RequestError
from ..options import Engines, Json, MaxFailed, Rows, Sglang, expanded, local
from ..output import Out
from ..running import RunRequest, Stopped, run, stop_on_signals
from ..stack import STATE_DIR, Stack

app = typer.Typer()


@app.command()
@expanded
def up(
    engines: Engines,
    store: Annotated[Path, typer.Option("--store", envvar="STATETAP_STORE", help="Store folder: datasets and jobs.")],
    host: Annotated[str, typer.Option("--host", help="Address of the API.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of the API; 0 takes a free one.")] = 8700,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", envvar="STATETAP_DATA_DIR", help="Folder below which datasets may be named by path.")
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            "--redis-url", envvar="STATETAP_REDIS_URL", help="Default: a redis-server of its own. With a password: by the variable."
        ),
    ] = None,
    as_json: Json = False,
    sglang: Sglang = None,
) -> None:
    """Run the whole stack on this host until Ctrl-C or SIGTERM. --json: one document once the API answers."""
    out = Out(as_json)
    config = engines.config(
        model=_served(engines, store, out), store=store, sglang=sglang, host=host, port=port, data_dir=data_dir, redis_url=redis_url
    )
    stack = Stack(config=config, say=out.say)
    stop_on_signals()
    try:
        stack.start()
        if as_json:
            out.document({"url": stack.url, "store": str(store.resolve()), "logs": str((stack.state / "logs").resolve())})
        while True:
            stack.tick()
            time.sleep(0.5)
    except Stopped as e:
        out.say(f"{e}: stopping; workers finish what is in flight")
    finally:
        stack.stop()
    out.say("stopped")


@app.command("run")
@expanded
def run_command(
    data: Annotated[Path, typer.Argument(help="Dataset file: JSONL or JSON.")],
    engines: Engines,
    out_dir: Annotated[Path, typer.Option("--out", help="Store folder; call again with the same one to go on.")],
    rows: Rows,
    max_failed: MaxFailed = 0,
    pause_timeout: Annotated[
        float, typer.Option("--pause-timeout", min=0, help="Seconds a pause may last before the command gives up.")
    ] = 600.0,
    as_json: Json = False,
    sglang: Sglang = None,
) -> None:
    """Start the stack, extract one dataset, stop, and exit (for Slurm). 0 completed, 3 with errors, 4 paused, 5 failed, 6 cancelled."""
    if not data.is_file():
        raise RequestError(ErrorCode.NOT_FOUND, f"{data} is not a file", next_step="Name a dataset file that exists.")
    out = Out(as_json)
    model = _served(engines, out_dir, out)
    options = rows.dataset(tokenizer=model, trust_remote_code=engines.trust_remote_code, max_length=rows.max_length)
    request = RunRequest(data=data, options=options, max_failed=max_failed, pause_timeout_s=pause_timeout)
    config = engines.config(model=model, store=out_dir, sglang=sglang, allow_any_path=True)
    raise typer.Exit(int(run(config, request, out)))


def _served(engines: Engines, store: Path, out: Out) -> str:
    """The model to serve; ``tiny`` is made below the store, once."""
    if not (engines.cpu and engines.model == "tiny"):
        return local(engines.model)
    folder = (store / STATE_DIR / "tiny").resolve()
    out.say(f"model tiny: {folder}")
    # In a process of its own: torch has no place in this one.
    subprocess.run([sys.executable, "-m", "statetap.engine.tiny", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return str(folder)
