"""Real workers beside a stub engine, fed by the keys protocol (the reconciler's own scripts): what fault tests and bench run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import redis
import xxhash

from statetap.contracts import keys
from statetap.contracts.layout import TEMP_PREFIX
from statetap.contracts.profile import CaptureProfile
from statetap.contracts.records import Batch, BatchTotals, RowRecord
from statetap.coordinator.feed import Entry, Feed
from statetap.store.complete import CompletionReport, finish_job
from statetap.store.ledger import fold, segments_by_batch
from tests.support.jobs import make_job
from tests.support.jobs import profile as make_profile

ROOT = Path(__file__).parents[2]


def eventually(what: str, check: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """Wait until ``check()`` is truthy; its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)  # between two looks at the state
    return value


class Process:
    """A child whose output goes to a file, ended by its id."""

    def __init__(self, name: str, arguments: Sequence[str], env: dict[str, str], folder: Path) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        with open(self.log_path, "ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def horse(self) -> psutil.Process | None:
        """The worker's horse, once it is one (it is in a process group of its own then)."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children():
                if os.getpgid(child.pid) == child.pid:
                    return child
        return None

    def kill(self) -> None:
        """SIGKILL of this process alone."""
        with contextlib.suppress(ProcessLookupError):
            self.popen.kill()
        self.popen.wait()

    def term(self, timeout_s: float = 30.0) -> int:
        """SIGTERM and wait; the exit code."""
        self.popen.terminate()
        return self.popen.wait(timeout_s)


class Rig:
    """A store, a tap in memory, a stub engine, workers. Use as a context manager."""

    def __init__(self, folder: Path, redis_url: str, profile: CaptureProfile | None = None, **env: object) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.store.mkdir(parents=True)
        self.profile = profile or make_profile()
        self.redis_url = redis_url
        self.redis = redis.Redis.from_url(redis_url, decode_responses=True)
        self.feed = Feed(redis_url)
        self.tap = Path(tempfile.mkdtemp(prefix="statetap-test-", dir="/dev/shm"))
        self.processes: list[Process] = []
        self._port_file = folder / "engine-port"
        self.env = {
            "STATETAP_REDIS_URL": redis_url,
            "STATETAP_STORE": str(self.store),
            "STATETAP_TAP": str(self.tap),
            "STATETAP_TAP_BYTES": str(256 << 20),
            **{f"STATETAP_{k.upper()}": str(v) for k, v in env.items()},
        }

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes):
            if process.popen.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.popen.send_signal(signal.SIGCONT)
                    process.term(10)
                process.kill()
        self.feed.close()
        self.redis.close()
        shutil.rmtree(self.tap, ignore_errors=True)

    # processes

    def start_engine(
        self, *faults: str, delay_ms: float = 0.0, tokens_per_s: float = 0.0, held_ms: float = 0.0, port: int = 0, sglang: str = ""
    ) -> Process:
        p = self.profile
        arguments = ["-m", "tests.bench.stub_engine", "--tap", self.tap, "--port-file", self._port_file, "--port", port]
        arguments += ["--hidden", p.hidden, "--layers", p.num_layers, "--boundaries", ",".join(map(str, p.boundaries)), "--final", p.final]
        arguments += ["--dtype", p.dtype, "--max-length", p.max_length, "--delay-ms", delay_ms]
        arguments += ["--tokens-per-s", tokens_per_s, "--held-ms", held_ms, "--sglang-version", sglang]
        for fault in faults:
            arguments += ["--fault", fault]
        self._port_file.unlink(missing_ok=True)
        process = Process("engine", [str(a) for a in arguments], {}, self.folder)
        self.processes.append(process)
        eventually("the stub engine listens", lambda: self._port_file.exists() or process.popen.poll() is not None)
        assert process.popen.poll() is None, process.log
        self.env["STATETAP_ENGINE_URL"] = self.engine_url
        return process

    @property
    def engine_port(self) -> int:
        return int(self._port_file.read_text())

    @property
    def engine_url(self) -> str:
        return f"http://127.0.0.1:{self.engine_port}"

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.engine_url}/stats", timeout=5) as response:
            return json.load(response)

    def start_worker(self, name: str = "worker", module: str = "statetap.worker", **env: object) -> Process:
        process = Process(name, ["-m", module], {**self.env, **{k: str(v) for k, v in env.items()}}, self.folder)
        self.processes.append(process)
        return process

    # jobs

    def make_job(self, rows: Sequence[Sequence[int]], **kw: Any) -> Job:
        job_dir, rows_path, batches = make_job(self.store, self.profile, rows, **kw)
        return Job(self, job_dir, rows_path, batches)


class Job:
    def __init__(self, rig: Rig, job_dir: Path, rows_path: Path, batches: list[Batch]) -> None:
        self.rig = rig
        self.dir = job_dir
        self.id = job_dir.name
        self.rows_path = rows_path
        self.batches = batches
        self.rows = sum(b.rows for b in batches)

    def give(self, *batches: int) -> None:
        for batch in batches or [b.batch for b in self.batches]:
            assert self.rig.feed.give(self.rig.profile.profile_id, self.id, batch)

    def requeue(self, batch: int) -> int:
        """What the reconciler does with a batch whose lease lapsed."""
        entry = self.outstanding()[f"{self.id}:{batch}"]
        taken, attempt = self.rig.feed.lapse(
            self.rig.profile.profile_id,
            Entry(job_id=self.id, batch=batch, attempt=entry["attempt"], rq_id=entry["rq_id"], started=True),
            again=True,
        )
        assert taken
        return attempt

    def outstanding(self) -> dict[str, dict[str, Any]]:
        raw = self.rig.redis.hgetall(keys.outstanding(self.rig.profile.profile_id))
        return {field: json.loads(value) for field, value in raw.items()}

    def lease(self, batch: int = 0) -> str | None:
        return self.rig.redis.get(keys.lease(self.id, batch))

    def wait_lapsed(self, batch: int = 0) -> None:
        """Wait until the lease of a lost attempt is gone; its rest of ten seconds is not what these tests are about."""
        self.rig.redis.delete(keys.lease(self.id, batch))

    def totals(self) -> dict[int, BatchTotals]:
        raw = self.rig.redis.hgetall(keys.totals(self.id))
        return {int(k): BatchTotals.from_dict(json.loads(v)) for k, v in raw.items()}

    def committed(self) -> int:
        return sum(t.rows for t in self.totals().values())

    def done(self) -> bool:
        """All rows have their outcome, and nothing is given out any more."""
        return self.committed() == self.rows and not self.outstanding()

    def wait_done(self, timeout_s: float = 30.0) -> None:
        eventually("the job's rows all have an outcome", self.done, timeout_s)

    def ledger(self) -> dict[int, RowRecord]:
        segments = segments_by_batch(self.dir)
        return {row: record for batch in segments.values() for row, record in fold(batch).items()}

    def lines(self) -> Iterator[dict[str, Any]]:
        for path in (self.dir / "ledger").iterdir():
            yield from (line for line in map(json.loads, path.read_text().splitlines()) if "row" in line)

    def pause(self) -> dict[str, Any] | None:
        raw = self.rig.redis.get(keys.pause(self.id))
        return json.loads(raw) if raw else None

    def finish(self) -> CompletionReport:
        """End the job, and check the whole: a state a row, a right file a done row, nothing besides, an empty tap."""
        report = finish_job(self.dir, self.rows_path)
        table = pq.read_table(self.dir / "manifest.parquet").to_pylist()
        for row in table:
            if row["state"] == "done":
                assert xxhash.xxh3_64_hexdigest((self.dir / row["path"]).read_bytes()) == row["xxh3"]
        on_disk = {str(p.relative_to(self.dir)) for p in self.dir.rglob("*.safetensors")} - {"norm.safetensors"}
        assert on_disk == {row["path"] for row in table if row["state"] == "done"}
        assert not list(self.dir.rglob(f"{TEMP_PREFIX}*"))
        assert {t.batch: t for t in self.totals().values()}.keys() == {b.batch for b in self.batches}
        assert sum(t.done for t in self.totals().values()) == report.done
        assert sum(t.bytes for t in self.totals().values()) == report.bytes
        # The last totals are told a moment before the horse gives its lease, its folder and its keys back.
        eventually("the tap is empty", lambda: sorted(p.name for p in self.rig.tap.iterdir()) == ["READY.json", "norm.safetensors"])
        mine = ("statetap:lease", "statetap:inflight", "statetap:suspects")
        left = {k: self.rig.redis.type(k) for k in self.rig.redis.scan_iter() if k.startswith(mine)}
        eventually(f"no key of a batch is left of {left}", lambda: not [k for k in self.rig.redis.scan_iter() if k.startswith(mine)])
        return report
