"""A real SGLang engine on the CPU with the tiny model, started through our launcher as a process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from statetap.cli.ports import lasting_free_port as free_port
from statetap.contracts.capture import LEASE_FILE, READY_FILE, new_lease
from statetap.contracts.profile import CaptureProfile

START_TIMEOUT_S = 120.0


def free_pair() -> int:
    """A free port whose successor is free too."""
    while True:
        with ExitStack() as held:
            port = free_port()
            try:
                for number in (port, port + 1):
                    held.enter_context(socket.create_server(("127.0.0.1", number)))
            except OSError:
                continue
        return port


@dataclass(kw_only=True)
class Engine:
    process: subprocess.Popen[bytes]
    url: str
    tap: Path
    log: Path

    @property
    def ready(self) -> dict:
        return json.loads((self.tap / READY_FILE).read_text())

    @property
    def profile(self) -> CaptureProfile:
        return CaptureProfile.from_dict(self.ready["profile"])

    def lease(self) -> str:
        name = new_lease()
        (self.tap / name).mkdir()
        (self.tap / name / LEASE_FILE).write_text("{}")
        # No worker beats for it here: a slow comparison must not find its files swept.
        os.utime(self.tap / name / LEASE_FILE, (time.time() + 3600,) * 2)
        return name

    def stop(self, timeout: float = 40.0) -> int:
        self.process.terminate()
        return self.process.wait(timeout)


def start_engine(model: Path, tap: Path, log: Path, *args: str, sglang: tuple[str, ...] = (), env: dict[str, str] | None = None) -> Engine:
    """Start without waiting; :func:`wait_ready` waits."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "statetap.engine",
        "--model",
        str(model),
        "--tap",
        str(tap),
        "--port",
        str(port),
        "--cpu",
        *args,
        "--",
        *sglang,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})})
    return Engine(process=process, url=f"http://127.0.0.1:{port}", tap=tap, log=log)


def wait_ready(engine: Engine, timeout: float = START_TIMEOUT_S) -> Engine:
    deadline = time.monotonic() + timeout
    while not (engine.tap / READY_FILE).exists():
        if engine.process.poll() is not None or time.monotonic() > deadline:
            if engine.process.poll() is None:
                engine.stop()
            raise AssertionError(f"engine not ready (exit {engine.process.poll()}):\n" + engine.log.read_text()[-6000:])
        time.sleep(0.05)
    return engine
