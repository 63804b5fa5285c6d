"""The whole stack as plain processes on one host: redis, coordinator, ingestion, and for each engine its workers.

Invariant: one stack a store (a lock says so); every process has a log of its own; a stop drains the workers first and leaves nothing
running and nothing in shared memory.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ..contracts.capture import READY_FILE
from ..contracts.errors import EngineError, ErrorCode, RequestError
from ..engine.failure import FAILED_FILE
from ..engine.flags import check_environment, check_flags
from .ports import lasting_free_port
from .process import Service
from .redis_server import find_redis_server, redis_argv

STATE_DIR = ".stack"
TAP_PREFIX = "statetap-"
TAP_SHARE = 0.8  # of the tap's free space, for all engines together
DRAIN_S = 120.0
STOP_S = 45.0
START_CONTROL_S = 60.0
FAILED_LOADS = 3  # in a row, of an engine that was ready before (its GPU memory may not be free at once)


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """What ``statetap up`` is asked for. ``sglang`` are the flags after ``--``."""

    model: str
    store: Path
    tap: Path | None = None
    engines: int = 1
    workers_per_engine: int = 2
    tp: int = 1
    cpu: bool = False
    boundaries: str = "default"
    final: str = "pre"
    trust_remote_code: bool = False
    host: str = "127.0.0.1"
    port: int = 0
    data_dir: Path | None = None
    allow_any_path: bool = False
    redis_url: str | None = None
    window: int | None = None
    sglang: tuple[str, ...] = ()


@dataclass(kw_only=True)
class _EngineUnit:
    engine: Service
    workers: list[Service]
    tap: Path
    ready: bool = False
    was_ready: bool = False
    loading: bool = True  # it was started and is not ready yet
    failed_loads: int = 0


@dataclass(kw_only=True)
class Stack:
    """Start with :meth:`start`, call :meth:`tick` about twice a second, end with :meth:`stop`."""

    config: StackConfig
    say: Callable[[str], None]
    url: str = ""
    units: list[_EngineUnit] = field(default_factory=list)
    control: list[Service] = field(default_factory=list)
    _redis: Service | None = None
    _lock: Any = None
    _runtime: Path | None = None
    _tap: Path | None = None
    _own_tap: bool = False
    _pids: dict[str, int] = field(default_factory=dict)

    # ---------------------------------------------------------------- start
    def start(self) -> None:
        """Returns when the API answers; engines may still be loading. Raises RequestError or EngineError; then nothing is left running."""
        check_flags(self.config.sglang)
        self._check_port()
        check_environment(dict(os.environ))
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _check_port(self) -> None:
        if self.config.port:
            with socket.socket() as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    s.bind((self.config.host, self.config.port))
                except OSError as e:
                    raise RequestError(
                        ErrorCode.CONFLICT,
                        f"port {self.config.port} of {self.config.host}: {e.strerror}; give another as --port (0: a free one)",
                    ) from None

    def _start(self) -> None:
        config = self.config
        try:
            self.state.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise RequestError(ErrorCode.STORE_UNAVAILABLE, f"{config.store}: {e.strerror}") from e
        self._take_lock()
        (self.state / "logs").mkdir(exist_ok=True)
        self._make_tap()
        self._runtime = Path(tempfile.mkdtemp(prefix="statetap-run-"))
        redis_url = config.redis_url or self._start_redis()
        common = {
            "STATETAP_REDIS_URL": redis_url,
            "STATETAP_STORE": str(config.store.resolve()),
            "STATETAP_WORKERS_PER_ENGINE": str(config.workers_per_engine),
            "PYTHONUNBUFFERED": "1",
        }
        port_file = self._runtime / "port"
        coordinator = {"STATETAP_HOST": config.host, "STATETAP_PORT": str(config.port), "STATETAP_PORT_FILE": str(port_file)}
        if config.data_dir:
            coordinator["STATETAP_DATA_DIR"] = str(config.data_dir.resolve())
        if config.allow_any_path:
            coordinator["STATETAP_ALLOW_ANY_PATH"] = "1"
            coordinator["STATETAP_KEYS_FILE"] = ""  # of `run` alone, on loopback: the keys of a shared coordinator are not for it
        if config.trust_remote_code:  # whoever starts the stack so lets the model's own code run anyway
            coordinator["STATETAP_ALLOW_REMOTE_CODE"] = "1"
        # The engines take longest: they start first, and everything else beside them.
        for i in range(config.engines):
            self._start_engine(i, common)
        self.control = [
            self._service("coordinator", ["-m", "statetap.coordinator"], {**common, **coordinator}),
            self._service("ingest", ["-m", "statetap.datasets"], common),
        ]
        for service in self.control:
            service.start()
        self.url = self._wait_for_api(port_file)
        self.say(f"page and API at {self.url} (logs in {self.state / 'logs'})")

    @property
    def state(self) -> Path:
        return self.config.store / STATE_DIR

    def _service(self, name: str, argv: list[str], env: dict[str, str]) -> Service:
        return Service(name=name, argv=[sys.executable, *argv], env=env, log=self.state / "logs" / f"{name}.log")

    def _take_lock(self) -> None:
        self._lock = (self.state / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            self._lock = None
            raise RequestError(
                ErrorCode.CONFLICT, f"another stack runs on {self.config.store}: stop it first, or give another store"
            ) from None

    def _make_tap(self) -> None:
        record = self.state / "tap.json"
        if record.exists():  # a stack that was killed: the lock is ours, so nobody uses its tap
            old = Path(json.loads(record.read_text())["tap"])
            if old.name.startswith(TAP_PREFIX):
                shutil.rmtree(old, ignore_errors=True)
        if self.config.tap is None:
            if not Path("/dev/shm").is_dir():
                raise RequestError(ErrorCode.INVALID_REQUEST, "there is no /dev/shm on this host: give a folder on a tmpfs as --tap")
            self._tap, self._own_tap = Path(tempfile.mkdtemp(prefix=TAP_PREFIX, dir="/dev/shm")), True
            record.write_text(json.dumps({"tap": str(self._tap)}))
        else:
            self._tap = self.config.tap.resolve()
            self._tap.mkdir(parents=True, exist_ok=True)
            record.unlink(missing_ok=True)

    def _start_redis(self) -> str:
        assert self._runtime is not None
        path, data = self._runtime / "redis.sock", self.state / "redis"
        data.mkdir(exist_ok=True)
        argv = redis_argv(find_redis_server(), socket=path, data=data)
        self._redis = Service(name="redis", argv=argv, log=self.state / "logs" / "redis.log")
        self._redis.start()
        import redis

        client = redis.Redis(unix_socket_path=str(path))
        deadline = time.monotonic() + START_CONTROL_S
        while True:
            try:
                client.ping()  # BusyLoadingError (a ConnectionError) while it reads its append-only file
                break
            except redis.RedisError:
                if not self._redis.running or time.monotonic() > deadline:
                    raise RequestError(ErrorCode.REDIS_UNAVAILABLE, f"redis-server did not start:\n{self._redis.tail()}") from None
                time.sleep(0.05)
        client.close()
        return f"unix://{path}?db=0"

    def _start_engine(self, i: int, common: dict[str, str]) -> None:
        config = self.config
        assert self._tap is not None
        tap = self._tap / f"engine-{i}"
        tap.mkdir(exist_ok=True)
        for stale in (READY_FILE, FAILED_FILE):
            (tap / stale).unlink(missing_ok=True)
        port = lasting_free_port()
        argv = [
            "-m",
            "statetap.engine",
            "--model",
            config.model,
            "--tap",
            str(tap),
            "--port",
            str(port),
            "--tp",
            str(config.tp),
            "--engine-id",
            f"engine-{i}",
        ]
        argv += ["--boundaries", config.boundaries, "--final", config.final]
        argv += ["--cpu"] if config.cpu else []
        argv += ["--trust-remote-code"] if config.trust_remote_code else []
        env = {"PYTHONUNBUFFERED": "1"}
        if not config.cpu and config.engines > 1:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(_devices(config.engines * config.tp)[i * config.tp : (i + 1) * config.tp])
        engine = self._service(f"engine-{i}", [*argv, "--", *config.sglang], env)
        free = shutil.disk_usage(self._tap).free
        settings = {
            **common,
            "STATETAP_TAP": str(tap),
            "STATETAP_ENGINE_URL": f"http://127.0.0.1:{port}",
            "STATETAP_TAP_BYTES": str(int(free * TAP_SHARE / config.engines)),
            **({"STATETAP_WINDOW": str(config.window)} if config.window else {}),
        }
        workers = [self._service(f"worker-{i}-{k}", ["-m", "statetap.worker"], settings) for k in range(config.workers_per_engine)]
        self.units.append(_EngineUnit(engine=engine, workers=workers, tap=tap))
        engine.start()
        self.say(f"engine-{i}: loading {config.model} (log: {engine.log})")

    def _wait_for_api(self, port_file: Path) -> str:
        deadline = time.monotonic() + START_CONTROL_S
        while True:
            if not self.control[0].running or time.monotonic() > deadline:
                raise RequestError(ErrorCode.INTERNAL, f"the coordinator did not start:\n{self.control[0].tail()}")
            if port_file.exists():
                host = "127.0.0.1" if self.config.host in ("0.0.0.0", "::") else self.config.host
                port = port_file.read_text().strip()
                self.control[0].env = {**self.control[0].env, "STATETAP_PORT": port}  # when it is started again, at the same place
                url = f"http://{host}:{port}"
                try:
                    if httpx.get(f"{url}/healthz", timeout=5).is_success:
                        return url
                except httpx.TransportError:
                    pass  # it has bound the port and does not answer yet
            time.sleep(0.05)

    # ---------------------------------------------------------------- while it runs
    def tick(self) -> None:
        """Look after everything once. Raises EngineError when an engine, RequestError when another process cannot be kept up."""
        if self._redis is not None:
            self._redis.supervise(self.say)
        for service in self.control:
            service.supervise(self.say)
        for unit in self.units:
            self._tick_unit(unit)
        for service in [*self.control, *(w for u in self.units for w in u.workers)]:
            if service.hopeless:
                raise RequestError(ErrorCode.INTERNAL, f"{service.name} ends again and again:\n{service.tail()}")
        self._record_pids()

    def _record_pids(self) -> None:
        """``processes.json`` names every process, since RQ and SGLang rename theirs in the process list."""
        services = [*([self._redis] if self._redis else []), *self.control, *(s for u in self.units for s in (u.engine, *u.workers))]
        pids = {s.name: s.pid for s in services if s.running}
        if pids != self._pids:
            self._pids = pids
            part = self.state / ".processes.json"
            part.write_text(json.dumps(pids, indent=1))
            part.replace(self.state / "processes.json")

    def _tick_unit(self, unit: _EngineUnit) -> None:
        if not unit.ready and (unit.tap / READY_FILE).exists():
            unit.ready = unit.was_ready = True
            unit.failed_loads = 0
            ready = json.loads((unit.tap / READY_FILE).read_text())
            took = time.monotonic() - unit.engine.started_at
            self.say(
                f"{unit.engine.name}: ready after {took:.0f} s, profile {ready['profile_id']}, boundaries {ready['profile']['boundaries']}"
            )
            for worker in unit.workers:
                if worker.process is None:
                    worker.start()
        if not unit.engine.running:
            self._engine_ended(unit)
        for worker in unit.workers:
            worker.supervise(self.say)

    def _engine_ended(self, unit: _EngineUnit) -> None:
        """An engine that was ready is started again; one that cannot even load is given up, at once when it never could."""
        if unit.ready:
            unit.ready, unit.loading = False, False
            (unit.tap / READY_FILE).unlink(missing_ok=True)  # a launcher that was killed could not remove it
        elif unit.loading:
            unit.failed_loads += 1
            if not unit.was_ready or unit.failed_loads >= FAILED_LOADS:
                raise self._engine_error(unit, unit.tap / FAILED_FILE)
            unit.loading = False
        restarts = unit.engine.restarts
        unit.engine.supervise(self.say)
        unit.loading = unit.engine.restarts > restarts

    def _engine_error(self, unit: _EngineUnit, failure: Path) -> EngineError:
        if failure.exists():
            data = json.loads(failure.read_text())
            return EngineError(ErrorCode(data["code"]), f"{unit.engine.name}: {data['message']} (log: {unit.engine.log})")
        return EngineError(
            ErrorCode.ENGINE_START_FAILED,
            f"{unit.engine.name} ended with {unit.engine.process and unit.engine.process.returncode}:\n{unit.engine.tail()}",
        )

    @property
    def ready(self) -> bool:
        return bool(self.units) and all(u.ready for u in self.units)

    # ---------------------------------------------------------------- stop
    def stop(self) -> None:
        """Workers finish and commit what is in flight, then everything else ends. Idempotent."""
        workers = [w for u in self.units for w in u.workers]
        self._end(workers, DRAIN_S)
        self._end([*self.control, *(u.engine for u in self.units)], STOP_S)
        if self._redis is not None:
            self._end([self._redis], STOP_S)
        if self._own_tap and self._tap is not None:
            shutil.rmtree(self._tap, ignore_errors=True)
            (self.state / "tap.json").unlink(missing_ok=True)
        if self._runtime is not None:
            shutil.rmtree(self._runtime, ignore_errors=True)
            (self.state / "processes.json").unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
        self.units, self.control, self._redis, self._lock, self._runtime, self._own_tap = [], [], None, None, None, False

    def _end(self, services: list[Service], timeout: float) -> None:
        for service in services:
            service.terminate()
        deadline = time.monotonic() + timeout
        for service in services:
            if not service.wait(max(0.1, deadline - time.monotonic())):
                self.say(f"{service.name} did not end within {timeout:.0f} s and was killed")


def _devices(wanted: int) -> list[str]:
    """GPU names for CUDA_VISIBLE_DEVICES: those that the caller sees, else 0, 1, …. Raises RequestError when they are too few."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [d for d in visible.split(",") if d] if visible is not None else [str(i) for i in range(wanted)]
    if len(names) < wanted:
        raise RequestError(
            ErrorCode.INVALID_REQUEST, f"{wanted} GPUs are needed (--engines x --tp), CUDA_VISIBLE_DEVICES names {len(names)}"
        )
    return names[:wanted]
