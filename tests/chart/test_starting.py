"""The control plane as the chart would start it: its commands and environments, with this host's folders and ports in place of the pods'."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from statetap.coordinator.keyfile import Scope, add_key
from tests.chart.sets import typed
from tests.support.chart.helm import ROOT
from tests.support.chart.objects import container, environment
from tests.support.redis import RedisServer, free_port

LONGEST_S = 60.0


class Here:
    """Paths, ports and addresses of pods -> of this host."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.folder, self.port = folder, free_port()
        self._instead = {
            "/store": str(folder / "store"),
            "/models": str(folder / "models"),
            "/etc/statetap/keys": str(folder / "keys"),
            "/tmp": str(folder / "tmp"),
            "redis://st-statetap-redis:6379/0": redis.url,
            "8700": str(self.port),
            "0.0.0.0": "127.0.0.1",
        }
        for name in ("store", "models", "keys", "tmp"):
            (folder / name).mkdir()

    def translate(self, value: str) -> str:
        for there, here in self._instead.items():
            if value == there or value.startswith(f"{there}/"):
                return here + value.removeprefix(there)
        return value

    def environment(self, c: Any) -> dict[str, str]:
        made = {name: self.translate(value) for name, value in environment(c).items()}
        return {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT / 'services'}", **made}

    @contextmanager
    def running(self, c: Any) -> Iterator[subprocess.Popen[bytes]]:
        assert c.command[0] == "python3"
        with (self.folder / f"{c.name}.log").open("wb") as log:
            process = subprocess.Popen([sys.executable, *c.command[1:]], env=self.environment(c), cwd=self.folder, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)

    def until(self, c: Any, process: subprocess.Popen[bytes], command: list[str]) -> None:
        """Until a command in this container's environment says yes."""
        deadline = time.monotonic() + LONGEST_S
        while subprocess.run([sys.executable, *command[1:]], env=self.environment(c), capture_output=True, timeout=30).returncode != 0:
            log = (self.folder / f"{c.name}.log").read_text()
            assert process.poll() is None and time.monotonic() < deadline, log[-2000:]
            time.sleep(0.3)  # between two looks, which are processes too


def test_coordinator_and_ingestion_become_ready_and_end_when_they_are_told(tmp_path: Path, redis_server: RedisServer) -> None:
    release, here = typed("least"), Here(tmp_path, redis_server)
    coordinator, ingest = (container(release.one("Deployment", n).spec.template.spec, n) for n in ("coordinator", "ingest"))
    (test,) = release.of("Pod")
    add_key(tmp_path / "keys" / "keys.txt", "alice", Scope.WRITE)
    script, url = test.spec.containers[0].args
    ask = ["python3", "-c", script, url.replace("st-statetap-coordinator:8700", f"127.0.0.1:{here.port}")]
    with ExitStack() as stack:
        api = stack.enter_context(here.running(coordinator))
        work = stack.enter_context(here.running(ingest))
        here.until(coordinator, api, ask)
        # Both containers are pods of their own there, with a host name each; here the ingestion alone registers.
        here.until(ingest, work, ingest.readinessProbe.exec.command)
        assert api.poll() is None and work.poll() is None
    assert (api.returncode, work.returncode) == (0, 0)
    gone = subprocess.run([sys.executable, *ingest.readinessProbe.exec.command[1:]], env=here.environment(ingest), capture_output=True)
    assert gone.returncode == 1, "who has ended is not ready"
