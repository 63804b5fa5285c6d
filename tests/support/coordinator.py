"""What tests of the coordinator stand on: datasets on a store, a coordinator process, a worker that plays the protocol."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import redis
from rq.job import Job
from rq.serializers import JSONSerializer

from statetap.contracts import keys
from statetap.contracts.capture import new_lease
from statetap.contracts.layout import DATASET_SPEC, REPORT, ROWS, ROWS_PER_RECORD_BATCH, dataset_dir, job_dir, sample
from statetap.contracts.profile import CaptureProfile, NormSpec
from statetap.contracts.records import DatasetSpec, DatasetStatus, EngineInfo, EngineStart, RowRecord
from statetap.contracts.sample_format import SampleFormat
from statetap.store.fs import to_json
from statetap.store.ledger import LedgerWriter, fold, segments_by_batch, totals_of
from statetap.store.plan import read_plan
from statetap.store.rows import SCHEMA, RowsFile

ENGINE_START = EngineStart(boot_id="boot-1", engine_id="stub-engine", sglang_version="0.5.23", plugin_version="1")
PROFILE = CaptureProfile(
    model="tiny",
    revision="",
    quantization="",
    boundaries=(1, 2, 3),
    final="pre",
    dtype="BF16",
    hidden=8,
    num_layers=4,
    vocab_size=1000,
    max_length=100,
    norm=NormSpec(variant="rmsnorm", eps=1e-6),
)


def until(what: Callable[[], Any], message: str, seconds: float = 10) -> Any:
    """The first true value of ``what``, looked at until a deadline."""
    deadline = time.monotonic() + seconds
    while True:
        value = what()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s: {message}"
        time.sleep(0.01)  # between two looks


def make_dataset(
    store: Path, lengths: Iterable[int], dataset_id: str = "ds-0000000000000001", *, bad: Iterable[int] = (), tokenizer: str = ""
) -> str:
    """A ready dataset: row i has ``lengths[i]`` tokens, rows in ``bad`` an ingestion error."""
    lengths, bad = list(lengths), set(bad)
    folder = store / dataset_dir(dataset_id)
    folder.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(folder / ROWS), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        for start in range(0, len(lengths), ROWS_PER_RECORD_BATCH):
            part = range(start, min(start + ROWS_PER_RECORD_BATCH, len(lengths)))
            columns: list[list[Any]] = [
                [[] if i in bad else list(range(1, lengths[i] + 1)) for i in part],
                [[] if i in bad else [1] * lengths[i] for i in part],
                [f"source-{i}" for i in part],
                [i + 1 for i in part],
                ["bad_row" if i in bad else "" for i in part],
                ["no messages" if i in bad else "" for i in part],
                [0 for _ in part],
            ]
            writer.write_batch(pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA))
    spec = DatasetSpec(dataset_id=dataset_id, name="made", path="/nowhere", format="tokenized", tokenizer=tokenizer, created_at=time.time())
    report = DatasetStatus(
        dataset_id=dataset_id,
        state="ready",
        rows=len(lengths),
        accepted=len(lengths) - len(bad),
        rejected=len(bad),
        tokens=sum(n for i, n in enumerate(lengths) if i not in bad),
        content_hash="0" * 32,
    )
    (folder / DATASET_SPEC).write_bytes(to_json(spec.to_dict()))
    (folder / REPORT).write_bytes(to_json(report.to_dict()))
    return dataset_id


def register_engine(
    client: redis.Redis, profile: CaptureProfile = PROFILE, *, worker: str = "w1", healthy: bool = True, ttl_s: float = 600
) -> None:
    """What a worker's heartbeat writes."""
    info = EngineInfo(
        engine_id="e1",
        url="http://127.0.0.1:1",
        profile_id=profile.profile_id,
        profile=profile.to_dict(),
        worker_ids=[worker],
        healthy=healthy,
        registered_at=time.time(),
    )
    client.set(keys.engine(profile.profile_id, worker), json.dumps(info.to_dict()), px=int(ttl_s * 1000))


class FakeWorker:
    """Plays a worker's side of the protocol (contracts/keys.py) step by step; writes real ledgers and files of the right size."""

    def __init__(self, client: redis.Redis, store: Path, profile: CaptureProfile = PROFILE) -> None:
        self.redis = client
        self.store = store
        self.profile = profile
        # RQ reads bytes.
        where = {k: client.connection_pool.connection_kwargs[k] for k in ("host", "port", "db")}
        self._rq = redis.Redis(connection_pool=redis.ConnectionPool(**where))

    def close(self) -> None:
        self._rq.connection_pool.disconnect()

    def take(self) -> dict[str, Any] | None:
        """The next attempt's arguments from the RQ queue, or None."""
        rq_id = self.redis.lpop(f"rq:queue:{keys.queue(self.profile.profile_id)}")
        if rq_id is None:
            return None
        job = Job.fetch(str(rq_id), connection=self._rq, serializer=JSONSerializer)
        assert job.func_name == keys.BATCH_TASK
        assert job.timeout == -1
        return dict(job.kwargs)

    def wait(self, seconds: float = 10) -> dict[str, Any]:
        return until(self.take, "a batch in the queue", seconds)

    def lease(self, task: dict[str, Any], ttl_ms: int = 10_000) -> bool:
        """Take the lease and mark the attempt as started; False when it is not ours to start."""
        entry = self.entry(task)
        if entry is None or entry["attempt"] != task["attempt"]:
            return False
        if not self.redis.set(keys.lease(task["job_id"], task["batch"]), new_lease(), nx=True, px=ttl_ms):
            return False
        self.redis.hset(self._outstanding, _field(task), json.dumps(entry | {"started": True}))
        return True

    def entry(self, task: dict[str, Any]) -> dict[str, Any] | None:
        raw = self.redis.hget(self._outstanding, _field(task))
        return json.loads(raw) if raw else None

    def queued(self) -> list[str]:
        """The job of each batch in the queue, the next one first."""
        names = self.redis.lrange(f"rq:queue:{keys.queue(self.profile.profile_id)}", 0, -1)
        return [str(name).rsplit("-", 2)[0] for name in names]

    def queued_first(self, task: dict[str, Any], attempt: int) -> bool:
        """Whether this attempt at the batch stands at the head of the queue. (Its entry is written before it is enqueued.)"""
        head = self.redis.lindex(f"rq:queue:{keys.queue(self.profile.profile_id)}", 0)
        return head == keys.rq_id(task["job_id"], task["batch"], attempt)

    def run(self, task: dict[str, Any], *, rows: int | None = None, fail: Iterable[int] = (), publish: bool = True) -> None:
        """Commit the batch's open rows (the first ``rows`` of them): files, ledger, totals."""
        path = self.store / job_dir(task["job_id"])
        batch = read_plan(path)[task["batch"]]
        have = fold(segments_by_batch(path).get(batch.batch, []))
        todo = [r for r in range(batch.start, batch.stop) if r not in have][:rows]
        source = RowsFile(self.store / dataset_dir(json.loads((path / "job.json").read_text())["dataset_id"]) / ROWS)
        writer = LedgerWriter(path, batch.batch, new_lease(), lambda: ENGINE_START)
        writer.append([self._commit(path, source, r, r in set(fail)) for r in todo])
        writer.close()
        source.close()
        if publish:
            self.publish(task)

    def publish(self, task: dict[str, Any]) -> None:
        path = self.store / job_dir(task["job_id"])
        totals = totals_of(task["batch"], fold(segments_by_batch(path).get(task["batch"], [])).values())
        self.redis.hset(keys.totals(task["job_id"]), str(task["batch"]), json.dumps(totals.to_dict()))

    def hand_back(self, task: dict[str, Any]) -> None:
        """The end of a horse, whatever the reason."""
        entry = self.entry(task)
        if entry is not None and entry["attempt"] == task["attempt"]:
            self.redis.hdel(self._outstanding, _field(task))
        self.redis.delete(keys.lease(task["job_id"], task["batch"]))

    def do(self, task: dict[str, Any], **options: Any) -> None:
        """A whole attempt."""
        if self.lease(task):
            self.run(task, **options)
            self.hand_back(task)

    def drain(self, done: Callable[[], bool], seconds: float = 20, **options: Any) -> int:
        """Do attempts until ``done``; their number."""
        deadline, n = time.monotonic() + seconds, 0
        while not done():
            task = self.take()
            if task is not None:
                self.do(task, **options)
                n += 1
            else:
                time.sleep(0.005)  # between two looks
            assert time.monotonic() < deadline, f"not done after {n} attempts"
        return n

    @property
    def _outstanding(self) -> str:
        return keys.outstanding(self.profile.profile_id)

    def _commit(self, path: Path, source: RowsFile, row: int, fail: bool) -> RowRecord:
        found = next(source.read(row, row + 1))
        n = len(found.input_ids)
        if found.error_code:
            return RowRecord(row=row, state="skipped", code=found.error_code, message=found.error_message, at=time.time())
        if n > self.profile.max_length:
            return RowRecord(row=row, state="skipped", code="prompt_too_long", message=f"{n} tokens", at=time.time())
        if fail:
            return RowRecord(row=row, state="failed", code="nonfinite_states", message="a NaN", at=time.time())
        size = SampleFormat(self.profile).bytes(n)
        file = path / sample(row)
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"\0" * size)
        return RowRecord(row=row, state="done", tokens=n, bytes=size, path=sample(row), xxh3="0" * 16, at=time.time())


def _field(task: dict[str, Any]) -> str:
    return f"{task['job_id']}:{task['batch']}"


class Coordinator:
    """A real ``python -m statetap.coordinator`` on a free port. Settings are given without their prefix."""

    module = "statetap.coordinator"

    def __init__(self, folder: Path, redis_url: str, **settings: str) -> None:
        own = {"REDIS_URL": redis_url, "STORE": str(folder / "store"), "PORT": "0", "PORT_FILE": str(folder / "port"), "TICK_S": "0.2"}
        own |= settings
        self.store = Path(own["STORE"])
        self.log = folder / "coordinator.log"
        self._port_file = Path(own["PORT_FILE"])
        kept = {k: v for k, v in os.environ.items() if not k.startswith("STATETAP_")}
        self._env = kept | {f"STATETAP_{k}": v for k, v in own.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client()

    def spawn(self) -> None:
        """Start the process and wait for nothing, as a restart policy would."""
        self._port_file.unlink(missing_ok=True)
        self.store.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen([sys.executable, "-m", self.module], env=self._env, stderr=log)

    def start(self) -> Coordinator:
        self.spawn()
        return self.wait_ready()

    def listens(self) -> bool:
        """Whether the process that was spawned last listens."""
        return self._port_file.exists()

    def wait_ready(self) -> Coordinator:
        """Wait until the process that was spawned listens."""
        assert self._process is not None
        until(lambda: self._port_file.exists() or self._process.poll() is not None, "the coordinator listens", 30)
        assert self._process.poll() is None, self.log.read_text()
        self.http.close()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self._port_file.read_text().strip()}", timeout=20)
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = 10) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    def close(self) -> None:
        self.http.close()
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGKILL)
            self.wait()

    def submit(self, dataset_id: str, **fields: Any) -> dict[str, Any]:
        reply = self.http.post("/v1/jobs", json={"dataset_id": dataset_id, **fields})
        assert reply.status_code == 202, reply.text
        return reply.json()

    def job(self, job_id: str) -> dict[str, Any]:
        reply = self.http.get(f"/v1/jobs/{job_id}")
        assert reply.status_code == 200, reply.text
        rows = reply.json()["rows"]
        assert rows["done"] + rows["failed"] + rows["skipped"] + rows["open"] == rows["total"]
        return reply.json()

    def until_state(self, job_id: str, *states: str, reason: str | None = None, seconds: float = 10) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            job = self.job(job_id)
            return job if job["state"] in states and reason in (None, job["reason"]) else None

        return until(there, f"{job_id} is {' or '.join(states)} {reason or ''}", seconds)
