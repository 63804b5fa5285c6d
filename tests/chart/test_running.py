"""What the pods run, run here: arguments read by the programs they are for, environments by the settings, probes against real servers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
from pydantic import ValidationError

from statetap.contracts.capture import READY_FILE
from statetap.coordinator.settings import CoordinatorSettings
from statetap.datasets.settings import Settings as IngestionSettings
from statetap.engine.flags import check_flags
from statetap.engine.launcher import parse_args
from statetap.engine.settings import EngineSettings
from statetap.worker.settings import WorkerSettings
from tests.chart.sets import GOOD, typed
from tests.support.chart.objects import container, environment
from tests.support.redis import free_port, redis_binary

MODULES = {
    "coordinator": "statetap.coordinator",
    "ingest": "statetap.datasets",
    "worker": "statetap.worker",
    "engine": "statetap.engine",
    "tiny": "statetap.engine.tiny",
}


@contextmanager
def answering(status: int) -> Iterator[tuple[int, list[str]]]:
    """A server that answers everything with one status: its port, and the paths it was asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b'{"code": "redis_unavailable"}')

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1], paths
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def set_environment(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    for name in [n for n in os.environ if n.startswith("STATETAP_")]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", GOOD)
def test_every_pod_starts_a_module_that_is_there(name: str) -> None:
    for where, c in typed(name).containers():
        kind = c.name.split("-")[0]
        if kind in MODULES:
            assert c.command[:3] == ["python3", "-m", MODULES[kind]], where


@pytest.mark.parametrize("name", GOOD)
def test_the_launcher_takes_the_engines_arguments(name: str) -> None:
    engine = container(typed(name).engine(), "engine")
    args, sglang = parse_args(engine.args)
    check_flags(sglang)
    given = GOOD[name].get("engine", {})
    assert sglang == given.get("sglang", [])
    assert (args.tap, args.port, args.cpu) == (Path("/tap"), 30000, given.get("cpu", False))
    assert args.trust_remote_code == GOOD[name]["model"].get("trustRemoteCode", False)
    assert (args.boundaries, args.final) == tuple(GOOD[name]["model"].get(k, d) for k, d in (("boundaries", "default"), ("final", "pre")))


@pytest.mark.parametrize("name", GOOD)
def test_the_settings_take_the_environments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    release = typed(name)
    coordinator = container(release.one("Deployment", "coordinator").spec.template.spec, "coordinator")
    set_environment(monkeypatch, environment(coordinator))
    settings = CoordinatorSettings()
    assert (settings.host, settings.port) == ("0.0.0.0", coordinator.ports[0].containerPort)
    assert (settings.keys_file is None) == settings.allow_no_auth, "one of both, or it would refuse to start"
    assert settings.store == Path("/store") and settings.model_dirs == (Path("/models"),)
    set_environment(monkeypatch, environment(container(release.one("Deployment", "ingest").spec.template.spec, "ingest")))
    assert IngestionSettings().store == Path("/store")
    pod = release.engine()
    for worker in pod.containers:
        set_environment(monkeypatch, environment(worker))
        assert WorkerSettings().workers_per_engine == len(pod.containers)
    set_environment(monkeypatch, environment(container(pod, "engine")))
    assert EngineSettings.from_env().ring_bytes >= 1 << 28


def test_service_links_would_break_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why enableServiceLinks is false: a Service `statetap` sets this in every pod of its namespace."""
    set_environment(monkeypatch, {"STATETAP_PORT": "tcp://10.0.0.1:8700"})
    with pytest.raises(ValidationError, match="port"):
        CoordinatorSettings()


def probe(command: list[str], port: int, tap: Path) -> int:
    """Run an engine's probe here: same script, another port and folder."""
    assert command[:2] == ["python3", "-c"] and "/tap/" in command[2] + "/tap/" and ":30000/" in command[2]
    script = command[2].replace("/tap/", f"{tap}/").replace(":30000/", f":{port}/")
    return subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=30).returncode


def test_an_engine_is_ready_when_its_self_check_passed_and_its_server_answers(tmp_path: Path) -> None:
    engine = container(typed("least").one("StatefulSet", "engine").spec.template.spec, "engine")
    startup, ready, alive = (p.exec.command for p in (engine.startupProbe, engine.readinessProbe, engine.livenessProbe))
    with answering(200) as (port, paths):
        assert [probe(p, port, tmp_path) == 0 for p in (startup, ready, alive)] == [False, False, True], "no READY.json yet"
        (tmp_path / READY_FILE).write_text("{}")
        assert [probe(p, port, tmp_path) for p in (startup, ready, alive)] == [0, 0, 0]
        assert set(paths) == {"/health"}
    with answering(503) as (port, _):
        assert all(probe(p, port, tmp_path) for p in (startup, ready, alive))
    assert all(probe(p, free_port(), tmp_path) for p in (startup, ready, alive)), "nobody there"


def test_a_probe_gives_up_before_the_kubelet_does() -> None:
    engine = container(typed("least").one("StatefulSet", "engine").spec.template.spec, "engine")
    for p in (engine.startupProbe, engine.readinessProbe, engine.livenessProbe):
        assert f"timeout={p.timeoutSeconds - 1})" in p.exec.command[2]


def test_helm_test_says_what_is_not_ready() -> None:
    c = typed("least").of("Pod")[0].spec.containers[0]
    assert c.command == ["python3", "-c"]
    for status, code in ((200, 0), (503, 1)):
        with answering(status) as (port, paths):
            script, url = c.args
            asked = f"http://127.0.0.1:{port}{url.partition(':8700')[2]}"
            done = subprocess.run([sys.executable, "-c", script, asked], capture_output=True, text=True, timeout=30)
        assert done.returncode == code and paths == ["/readyz"]
        assert "redis_unavailable" in (done.stdout if code == 0 else done.stderr)


def redis_container(name: str) -> Any:
    return container(typed(name).one("StatefulSet", "redis").spec.template.spec, "redis")


@pytest.mark.parametrize("name", ["least", "redis with a password"])
def test_redis_starts_with_these_arguments_and_keeps_what_it_is_told(name: str, tmp_path: Path) -> None:
    c = redis_container(name)
    args = [a.replace("$(REDIS_PASSWORD)", "s3cret") for a in c.args]
    assert args[:2] == ["--dir", "/data"] and c.command == ["redis-server"]
    port = free_port()
    password = "s3cret" if name == "redis with a password" else None
    command = [redis_binary(), "--dir", str(tmp_path), *args[2:], "--port", str(port), "--bind", "127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            with redis.Redis(port=port, password=password, decode_responses=True) as client:
                until_pong(client)
                wanted = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "save": ""}
                assert {k: client.config_get(k)[k] for k in wanted} == wanted
                limit = int(client.config_get("maxmemory")["maxmemory"])
                assert limit == (384 if password else 768) * 1024 * 1024, "three quarters of the container's memory"
            if password:
                with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
                    stranger.ping()
        finally:
            server.terminate()


def until_pong(client: redis.Redis) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            client.ping()
            return
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@pytest.mark.parametrize(("says", "ready"), [("PONG", True), ("LOADING Redis is loading the dataset in memory", False), ("", False)])
def test_redis_is_ready_when_it_says_pong(says: str, ready: bool, tmp_path: Path) -> None:
    cli = tmp_path / "redis-cli"
    cli.write_text(f'#!/bin/sh\n[ "$REDISCLI_AUTH" = s3cret ] || exit 1\necho "{says}"\n')
    cli.chmod(0o755)
    command = redis_container("redis with a password").readinessProbe.exec.command
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDIS_PASSWORD": "s3cret"}
    assert (subprocess.run(command, env=env, timeout=10).returncode == 0) == ready
