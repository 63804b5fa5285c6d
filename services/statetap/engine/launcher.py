"""``python -m statetap.engine``: checks the flags, starts the server process, and cleans up after it however it ended.

Invariant: when this process has ended (SIGKILL apart, which takes the server with it) no process of the engine runs, READY.json is
gone, and none of SGLang's shared-memory segments of this start is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import __version__
from ..contracts.capture import NORM_FILE, READY_FILE
from ..contracts.errors import EngineError, ErrorCode, StatetapError
from ..parent import dies_with_me
from .cpu.backends import attention_backend
from .draft import resolve_boundaries
from .failure import FAILED_FILE, write_failure
from .flags import check_environment, server_argv
from .hosts import Head, Link, Member, Nodes
from .port import check_port, is_taken
from .settings import EngineSettings

logger = logging.getLogger("statetap.engine")

EXIT_FAILED = 3
TRACKER_S = 5.0
POLL_S = 0.2
SETTLE_S = 3.0  # SGLang of one node fails as soon as another does: so long the reason may take to come from there
TEMP_PREFIX = "statetap-"
TEMP_FILE = ".engine-temp"  # in the tap: where this engine's temp folder is


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own arguments, and SGLang's after ``--``."""
    parser = argparse.ArgumentParser(prog="python -m statetap.engine", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="model folder or hub id")
    parser.add_argument("--tap", required=True, type=Path, help="tap folder, on a tmpfs that the workers share")
    parser.add_argument("--host", default="127.0.0.1", help="address that the engine listens on")
    parser.add_argument("--port", type=int, default=30000, help="port that the engine listens on")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size, over all hosts")
    parser.add_argument("--nnodes", type=int, default=1, help="hosts of this engine, of tensor parallel ranks alone")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this is; 0 has the HTTP service and the tap")
    parser.add_argument("--dist-init-addr", default="", help="HOST:PORT of node 0, where the hosts meet; the port after it is used too")
    parser.add_argument("--boundaries", default="default", help="comma-separated, or default = [2, L//2, L-3]")
    parser.add_argument("--draft-config", type=Path, help="config.json of an EAGLE-3 drafter: its boundaries, in place of --boundaries")
    parser.add_argument("--final", default="pre", choices=("pre", "post", "both", "none"), help="final state to capture")
    parser.add_argument("--engine-id", default="engine-0", help="name of this engine; stays the same over restarts")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model folder's own code run")
    parser.add_argument("--cpu", action="store_true", help="real SGLang without a GPU")
    parser.add_argument("--start-timeout", type=float, default=3600.0, help="seconds until the probe must have passed")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds that a stop may take before the server is killed")
    cut = argv.index("--") if "--" in argv else len(argv)
    return parser.parse_args(argv[:cut]), argv[cut + 1 :]


def main(argv: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    args, extra = parse_args(sys.argv[1:] if argv is None else argv)
    args.tap.mkdir(parents=True, exist_ok=True)
    for stale in (READY_FILE, FAILED_FILE):
        (args.tap / stale).unlink(missing_ok=True)
    nodes = Nodes(count=args.nnodes, rank=args.node_rank, address=args.dist_init_addr)
    try:
        nodes.check(args.tp)
        if nodes.rank == 0:
            check_port(args.host, args.port)
        settings = _settings(args)
        check_environment(dict(os.environ))
        argv_sglang = server_argv(
            model=args.model,
            host=args.host,
            port=args.port,
            tp=args.tp,
            trust_remote_code=args.trust_remote_code,
            cpu=args.cpu,
            extra=extra,
            cpu_attention=attention_backend(args.model) if args.cpu else "",
            nodes=nodes,
        )
        link = _link(nodes, args, settings, extra) if nodes.several else None
    except StatetapError as e:
        write_failure(args.tap, e)
        sys.exit(EXIT_FAILED)
    sys.exit(_supervise(settings, args, argv_sglang, link))


def _link(nodes: Nodes, args: argparse.Namespace, settings: EngineSettings, extra: list[str]) -> Link:
    """To the launchers of the other nodes. What decides over the taps must be the same on all: reading a boundary communicates."""
    facts = {
        "statetap": __version__,
        "sglang": version("sglang"),
        "--model": args.model,
        "--nnodes": nodes.count,
        "--tp": args.tp,
        "boundaries": settings.boundaries,
        "--final": args.final,
        "--trust-remote-code": args.trust_remote_code,
        "flags after --": extra,
    }
    if nodes.rank == 0:
        return Head(nodes, facts, timeout_s=args.start_timeout)
    member = Member(nodes, facts)
    member.join(args.start_timeout)
    return member


def _settings(args: argparse.Namespace) -> EngineSettings:
    boot_id = secrets.token_hex(8)
    ours: dict[str, Any] = {
        "tap": str(args.tap.resolve()),
        "boundaries": resolve_boundaries(args.boundaries, args.draft_config, args.model),
        "final": args.final,
        "model": args.model,
        "engine_id": args.engine_id,
        "boot_id": boot_id,
        "notify": f"statetap-{boot_id}",
        "cpu": args.cpu,
        "node_rank": args.node_rank,
        "url": f"http://{args.host}:{args.port}",
        "start_timeout_s": args.start_timeout,
    }
    return EngineSettings(**{**vars(EngineSettings.from_env()), **ours})


def _supervise(settings: EngineSettings, args: argparse.Namespace, argv_sglang: list[str], link: Link | None) -> int:
    # SGLang names its sockets and shared-memory segments after temp files: a temp folder of its own tells which are this engine's.
    _clean_after_killed(args.tap)
    temp = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX))
    (args.tap / TEMP_FILE).write_text(str(temp))
    environment = {
        **os.environ,
        **settings.to_env(),
        "TMPDIR": str(temp),
        "SGLANG_PLUGINS": _with_plugin(os.environ.get("SGLANG_PLUGINS", "")),
    }
    try:
        server = subprocess.Popen(
            [sys.executable, "-m", "statetap.engine.server", *argv_sglang],
            env=environment,
            start_new_session=True,
            # On further hosts SGLang takes SIGTERM for a word that node 0 will soon say; its ranks die with it by their own such signal.
            preexec_fn=dies_with_me(signal.SIGTERM if args.node_rank == 0 else signal.SIGKILL),
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: _stop(server, args.grace, args.node_rank))
        code = server.wait() if link is None else _wait(server, link)
        _end_group(server.pid)  # schedulers that outlived it
        if link is None and not _STOPPING and not (args.tap / READY_FILE).exists():
            # The first reason stays: this one is for ends that no code of ours saw (a crash in SGLang's own processes).
            taken = f"; port {args.port} is taken" if is_taken(args.host, args.port) else ""
            write_failure(
                args.tap,
                EngineError(ErrorCode.ENGINE_START_FAILED, f"SGLang ended with {code} before the engine was ready: read its log{taken}"),
            )
        if link is not None:
            return _end_of_node(code, args, link)
        return (
            EXIT_FAILED
            if (args.tap / FAILED_FILE).exists()
            else 0
            if code in (0, -signal.SIGTERM, -signal.SIGKILL) and _STOPPING
            else EXIT_FAILED
        )
    finally:
        for name in (READY_FILE, NORM_FILE, TEMP_FILE):
            (args.tap / name).unlink(missing_ok=True)
        _remove_segments(temp)
        shutil.rmtree(temp, ignore_errors=True)


def _wait(server: subprocess.Popen[bytes], link: Link) -> int:
    """The exit code of the server process, which does not outlive the link to the other nodes."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return server.wait(POLL_S)
        if link.ended is not None:
            _end_group(server.pid)


def _end_of_node(code: int, args: argparse.Namespace, link: Link) -> int:
    """The exit code of one of several nodes, whose server process ended with ``code``. Tells the other nodes why."""
    failed, node = args.tap / FAILED_FILE, args.node_rank
    if not _STOPPING:
        # Without an error it was node 0 that stopped all ranks: it says so when it has drained.
        ended = link.ended or (None if failed.exists() else link.wait(SETTLE_S if code else args.grace))
        if ended is not None and ended.clean and node != 0:
            logger.info("node %d ends: %s", node, ended.reason)
        else:
            reason = (
                f"SGLang of node {node} ended with {code}: read its log" if ended is None else f"node {node} cannot go on: {ended.reason}"
            )
            write_failure(args.tap, EngineError(ErrorCode.ENGINE_UNREACHABLE, reason))  # logs it; the first that was written stays
    if failed.exists():
        link.close(json.loads(failed.read_text())["message"], clean=False)
        return EXIT_FAILED
    link.close("it was stopped", clean=True)
    return 0


_STOPPING: list[bool] = []


def _stop(server: subprocess.Popen[bytes], grace: float, node_rank: int) -> None:
    """SGLang drains on SIGTERM; an alarm ends it when it takes too long.

    Of several nodes only node 0 can drain: the others serve it until it ends, and end with the link.
    """
    if _STOPPING:
        return
    _STOPPING.append(True)
    if node_rank == 0:
        server.terminate()
    else:
        logger.info("node %d ends when node 0 has, or in %.0f s", node_rank, grace)

    signal.signal(signal.SIGALRM, lambda *_: _end_group(server.pid))
    signal.setitimer(signal.ITIMER_REAL, grace)


def _end_group(group: int) -> None:
    """Kill what is left of the server's process group.

    Python's resource tracker goes last, and by itself: it unlinks the semaphores of the processes that were killed.
    """
    trackers = set()
    for pid in _members(group):
        try:
            tracker = b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if tracker:
            trackers.add(pid)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + TRACKER_S
    while trackers and _members(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> list[int]:
    """Processes of a group that have not ended (a zombie has)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def _remove_segments(temp: Path) -> None:
    """This start's segments in /dev/shm, by the names that lie in its temp folder (plugin.py puts them there).

    ``sglang_loads_<instance id or ipc file's name>_<digest>.shm`` (sglang managers/load_snapshot.py), Python's semaphores, the
    ranks' message queues.
    """
    for name in (p.name for p in temp.iterdir()):
        found = (
            [Path("/dev/shm") / name]
            if name.startswith(("sem.mp-", "sgl_shm_mq_"))
            else Path("/dev/shm").glob(f"sglang_loads_{name}_*.shm")
        )
        for segment in found:
            segment.unlink(missing_ok=True)


def _clean_after_killed(tap: Path) -> None:
    """A launcher that was killed left the name of its temp folder in the tap."""
    record = tap / TEMP_FILE
    if record.exists():
        temp = Path(record.read_text())
        if temp.name.startswith(TEMP_PREFIX) and temp.is_dir():
            _remove_segments(temp)
            shutil.rmtree(temp, ignore_errors=True)


def _with_plugin(plugins: str) -> str:
    """SGLANG_PLUGINS is a white list when it is set: ours must be on it."""
    names = [p for p in plugins.split(",") if p]
    return ",".join([*names, "statetap"]) if names and "statetap" not in names else plugins
