"""``python -m statetap.engine.server``: the process that becomes SGLang's HTTP server, with the capture plugin, and says READY.
(On the further hosts of an engine over several it holds SGLang's ranks of that host, and none of this.)

Invariant: READY.json is written only after a captured probe request went the whole way and its self-check passed. SGLang's spawned
children import this module again, so the CPU stand-ins are put in place at the top.
"""

from __future__ import annotations

import os

if os.environ.get("STATETAP_ENGINE_CPU") == "1":
    from statetap.engine.cpu import boot

    boot.install()

import json
import logging
import multiprocessing
import shutil
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from statetap.contracts.capture import LEASE_FILE, READY_FILE, STATUS_OK, new_lease, new_rid
from statetap.contracts.errors import EngineError, ErrorCode, StatetapError
from statetap.contracts.profile import CaptureProfile
from statetap.engine import metrics, replies
from statetap.engine.channel import Outcomes
from statetap.engine.failure import write_failure
from statetap.engine.plugin import note_segments
from statetap.engine.settings import EngineSettings, current

logger = logging.getLogger("statetap.engine")

PROBE_TOKENS = 48
WATCH_S = 0.5


def main(argv: list[str]) -> None:
    settings = current()
    try:
        _serve(settings, [*argv, *graph_flags()])
    except Exception as e:
        error = e if isinstance(e, StatetapError) else EngineError(ErrorCode.ENGINE_START_FAILED, f"SGLang: {e!r}")
        write_failure(settings.tap_dir, error)
        raise


def graph_flags() -> list[str]:
    """Flags that turn CUDA graphs off, in the spelling of the installed SGLang."""
    import sglang
    from packaging.version import Version

    if Version(sglang.__version__) >= Version("0.5.20"):
        return ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
    return ["--disable-cuda-graph"]


def _serve(settings: EngineSettings, argv: list[str]) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    server_args = prepare_server_args(argv)
    ranks = _Ranks(settings) if settings.node_rank else None
    if ranks is None:
        # In this process replies wait for the outcomes that the schedulers' writers send.
        replies.OUTCOMES = outcomes = Outcomes(settings.notify)
        add_metrics(outcomes)
        threading.Thread(target=_become_ready, args=(settings, outcomes), name="statetap-ready", daemon=True).start()
    else:  # no HTTP service, no tap: SGLang waits here for its ranks to end
        threading.Thread(target=ranks.watch, name="statetap-ranks", daemon=True).start()
    try:
        run_server(server_args)
        if ranks is not None and ranks.failed():
            sys.exit(1)
    except Exception:
        if ranks is None or not ranks.stopped():
            raise  # up to 0.5.17 SGLang goes on from there into an HTTP server that it has not
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


class _Ranks:
    """SGLang's processes on a further host. SGLang waits there for one after the other to end, and then for nothing: however they ended."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._seen: dict[int | None, Any] = {}

    def watch(self) -> None:
        """End this process with the first rank that fails, or when all were stopped. For a thread of its own."""
        while True:
            if self.failed():
                os._exit(1)
            if self.stopped():
                os._exit(0)
            time.sleep(WATCH_S)

    def stopped(self) -> bool:
        """Whether node 0 has stopped all ranks, in order."""
        self._look()
        return bool(self._seen) and all(p.exitcode == 0 for p in self._seen.values())

    def _look(self) -> None:
        self._seen |= {p.pid: p for p in multiprocessing.active_children()}

    def failed(self) -> bool:
        """Whether a rank ended with an error.

        An exception may be another host's fault, whose launcher knows more; who was killed (out of memory) was so on this host.
        """
        self._look()
        ended = {pid: p.exitcode for pid, p in self._seen.items() if p.exitcode}
        for pid, code in ended.items():
            said = f"SGLang's process {pid} of node {self._settings.node_rank} ended with {code}"
            logger.error(said)
            if code == -signal.SIGKILL:
                write_failure(self._settings.tap_dir, EngineError(ErrorCode.ENGINE_UNREACHABLE, f"{said}: it was killed (out of memory?)"))
        return bool(ended)


def add_metrics(outcomes: Outcomes) -> None:
    """``GET /statetap/metrics`` on SGLang's own application (behind its API key, if it has one)."""
    from fastapi.responses import PlainTextResponse
    from sglang.srt.entrypoints.http_server import app

    async def scrape() -> PlainTextResponse:
        values = {**(outcomes.fact(metrics.FACT) or {}), **replies.metrics()}
        return PlainTextResponse(metrics.render(values), media_type="text/plain; version=0.0.4")

    app.add_api_route("/statetap/metrics", scrape, methods=["GET"], include_in_schema=False)


def _become_ready(settings: EngineSettings, outcomes: Outcomes) -> None:
    try:
        ready = probe(settings, outcomes)
        part = settings.tap_dir / f".{READY_FILE}"
        part.write_text(json.dumps(ready, indent=1))
        part.replace(settings.tap_dir / READY_FILE)
        logger.info("READY: profile %s, boundaries %s, self-check passed", ready["profile_id"], ready["profile"]["boundaries"])
    except Exception as e:  # noqa: BLE001  (whatever it is: an engine that is not READY must not go on serving)
        error = e if isinstance(e, StatetapError) else EngineError(ErrorCode.ENGINE_START_FAILED, f"probe: {e!r}")
        write_failure(settings.tap_dir, error)
        os._exit(1)  # the launcher ends the whole group


def probe(settings: EngineSettings, outcomes: Outcomes) -> dict[str, Any]:
    """One captured request through the whole way; the facts for READY. Raises EngineError."""
    deadline = time.monotonic() + settings.start_timeout_s
    raw = outcomes.wait_fact("profile", settings.start_timeout_s)
    if raw is None:
        raise EngineError(
            ErrorCode.ENGINE_START_FAILED,
            f"the capture plugin did not report within {settings.start_timeout_s:.0f} s: it, or the model, was not loaded",
        )
    profile = CaptureProfile.from_dict(raw)
    _wait_for_http(settings.url, deadline)
    note_segments()
    lease = new_lease()
    folder = settings.tap_dir / lease
    folder.mkdir()
    (folder / LEASE_FILE).write_text("{}")
    try:
        reply = _send_probe(settings.url, new_rid(lease, 0), profile, deadline)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if reply is None:
        raise EngineError(
            ErrorCode.ENGINE_START_FAILED, "the probe's reply has no meta_info.capture: the plugin is not in the HTTP process"
        )
    if reply["status"] != STATUS_OK:
        raise EngineError(ErrorCode.ENGINE_START_FAILED, f"the probe was not captured: {reply}")
    check = outcomes.wait_fact("self_check", 10.0)
    if check is None or not check["ok"]:
        problems = "no result" if check is None else "; ".join(check["problems"])
        raise EngineError(ErrorCode.SELF_CHECK_FAILED, f"{profile.model}: {problems}")
    return {
        "profile": profile.to_dict(),
        "profile_id": profile.profile_id,
        "engine_id": settings.engine_id,
        "boot_id": settings.boot_id,
        "pid": os.getpid(),
        "started_at": time.time(),
        "self_check": check,
    }


def _wait_for_http(url: str, deadline: float) -> None:
    while True:
        try:
            with urllib.request.urlopen(f"{url}/model_info", timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise EngineError(ErrorCode.ENGINE_START_FAILED, f"no HTTP service at {url} in time") from None
            time.sleep(0.1)


def _send_probe(url: str, rid: str, profile: CaptureProfile, deadline: float) -> dict[str, Any] | None:
    tokens = min(PROBE_TOKENS, profile.max_length)
    step = max(1, (profile.vocab_size - 8) // tokens)
    body = {"rid": rid, "input_ids": [4 + i * step for i in range(tokens)], "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=max(10.0, deadline - time.monotonic())) as response:
            return json.load(response)["meta_info"].get("capture")
    except urllib.error.HTTPError as e:
        raise EngineError(
            ErrorCode.ENGINE_START_FAILED, f"the probe was answered {e.code}: {e.read()[:500].decode(errors='replace')}"
        ) from e
    except OSError as e:
        raise EngineError(ErrorCode.ENGINE_START_FAILED, f"the probe was not answered: {e}") from e


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    main(sys.argv[1:])
