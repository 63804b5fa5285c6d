"""The ingestion process as it runs: ``python -m statetap.datasets`` beside a real redis-server, with real signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from rq import Queue
from rq.serializers import JSONSerializer

from statetap.contracts import keys
from statetap.contracts.layout import DATASET_SPEC, REPORT, ROWS
from statetap.contracts.records import DatasetSpec, DatasetStatus
from statetap.datasets import task
from tests.support.made_tokenizer import make_tokenizer
from tests.support.redis import RedisServer

WAIT_S = 40.0


def wait_for(what: Callable[[], Any], message: str) -> Any:
    """Poll a state until it is true."""
    deadline = time.monotonic() + WAIT_S
    while not (got := what()):
        assert time.monotonic() < deadline, f"not within {WAIT_S:.0f} s: {message}"
        time.sleep(0.02)  # between two looks
    return got


class Service:
    """Store, redis-server and the ingestion processes of one test."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.store.mkdir()
        self.server = RedisServer(folder / "redis")
        self.server.start()
        self.client = self.server.client()
        self.log = folder / "ingest.log"
        self.log.touch()
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, **env: str) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "statetap.datasets"],
                env={**os.environ, "STATETAP_REDIS_URL": self.server.url, "STATETAP_STORE": str(self.store), **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        return process

    def stop(self) -> None:
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children():
                    child.kill()
            process.kill()
            process.wait()
        self.client.close()
        self.server.stop()

    def source(self, rows: int) -> str:
        path = self._folder / f"{rows}.jsonl"
        if not path.exists():
            with open(path, "w") as f:
                f.writelines(f'{{"input_ids":{[(i * 7 + j) % 1000 for j in range(50)]}}}\n' for i in range(rows))
        return str(path)

    def dataset(self, dataset_id: str, path: str, **spec: Any) -> Path:
        """What the coordinator does: dataset.json durably, then the task by reference. The dataset's folder is returned."""
        folder = self.store / "datasets" / dataset_id
        folder.mkdir(parents=True, exist_ok=True)
        described = DatasetSpec(dataset_id=dataset_id, name=dataset_id, path=path, **spec)
        (folder / DATASET_SPEC).write_text(json.dumps(described.to_dict()))
        self.enqueue(dataset_id)
        return folder

    def enqueue(self, dataset_id: str) -> None:
        with redis.Redis.from_url(self.server.url) as connection:
            queue = Queue(keys.INGEST_QUEUE, connection=connection, serializer=JSONSerializer)
            queue.enqueue(keys.INGEST_TASK, dataset_id, job_timeout=-1)

    def report(self, folder: Path) -> DatasetStatus:
        wait_for((folder / REPORT).exists, f"report of {folder.name}; the log: {self.log.read_text()[-2000:]}")
        return DatasetStatus.from_dict(json.loads((folder / REPORT).read_text()))

    def horse(self, process: subprocess.Popen[bytes]) -> psutil.Process:
        return wait_for(lambda: psutil.Process(process.pid).children(), "a horse")[0]

    def progress(self, dataset_id: str) -> DatasetStatus | None:
        data = self.client.get(keys.dataset(dataset_id))
        return DatasetStatus.from_dict(json.loads(data)) if data else None


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    s = Service(tmp_path)
    try:
        yield s
    finally:
        s.stop()


def test_datasets_are_ingested_one_after_another_and_their_ends_are_published(service: Service, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    process = service.start()
    talk = service.dataset("talk", str(tmp_path / "talk.jsonl"), tokenizer=tokenizer)
    bad = service.dataset("bad", str(tmp_path / "none.jsonl"))
    tokens = service.dataset("tokens", service.source(200))
    assert service.report(talk).state == "ready"
    assert (failed := service.report(bad)).state == "failed"
    assert failed.error is not None and "No such file" in failed.error["message"]
    report = service.report(tokens)
    assert (report.state, report.rows, report.tokens) == ("ready", 200, 10_000)
    wait_for(lambda: service.progress("tokens") == report, "the report in Redis")
    assert 0 < service.client.ttl(keys.dataset("tokens")) <= task.PROGRESS_TTL_S
    wait_for(lambda: not service.client.exists(keys.ingesting("tokens"), keys.INGEST_STARTS), "lock and count are gone")
    with open(f"/proc/{process.pid}/maps") as maps:
        assert "libtorch" not in maps.read(), "the ingestion process has no need of torch"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    log = service.log.read_text()
    assert log.count("dataset tokens is ready: 200 of 200 rows, 10000 tokens") == 1
    assert log.count("dataset bad failed: dataset_failed: cannot open") == 1


def test_sigterm_stops_an_ingestion_in_order_and_the_next_start_gives_the_same(service: Service) -> None:
    path = service.source(40_000)
    process = service.start()
    folder = service.dataset("d", path)
    wait_for(lambda: (p := service.progress("d")) and p.rows, "progress")
    assert service.client.exists(keys.ingesting("d"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert os.listdir(folder) == [DATASET_SPEC], "neither a report nor temp files"
    assert not service.client.exists(keys.ingesting("d"), keys.INGEST_STARTS)
    service.start()
    service.enqueue("d")
    first = service.report(folder)
    again = service.report(service.dataset("e", path))
    assert first.content_hash == again.content_hash != ""


def test_a_killed_horse_is_begun_again_and_one_that_always_dies_is_failed(service: Service) -> None:
    path = service.source(40_000)
    process = service.start()
    folder = service.dataset("d", path)
    for n in range(1, task.MAX_STARTS + 1):
        wait_for(lambda n=n: int(service.client.hget(keys.INGEST_STARTS, "d") or 0) == n, f"start {n}")
        service.horse(process).kill()
        wait_for(lambda: not psutil.Process(process.pid).children(), "the horse is gone")
        assert not (folder / REPORT).exists()
        service.client.delete(keys.ingesting("d"))  # what time does: the lock lapses
        service.enqueue("d")
    report = service.report(folder)
    assert report.state == "failed"
    assert report.error is not None and report.error["code"] == "dataset_failed"
    assert f"{task.MAX_STARTS} times" in report.error["message"]
    assert process.poll() is None, "the worker outlives its horses"
    assert service.report(service.dataset("other", path)).state == "ready"


def test_a_dataset_under_another_ones_lock_is_left_alone(service: Service) -> None:
    service.client.set(keys.ingesting("d"), "another process", ex=60)
    service.start()
    folder = service.dataset("d", service.source(10))
    assert service.report(service.dataset("after", service.source(10))).state == "ready"
    assert os.listdir(folder) == [DATASET_SPEC]
    assert service.client.get(keys.ingesting("d")) == "another process"


def test_redis_going_away_does_not_end_an_ingestion(service: Service) -> None:
    service.start()
    folder = service.dataset("d", service.source(40_000))
    wait_for(lambda: (p := service.progress("d")) and p.rows, "progress")
    service.server.kill()
    assert service.report(folder).state == "ready"
    assert "progress not published" in service.log.read_text()
    assert (folder / ROWS).exists()


def test_without_redis_the_process_says_so_and_ends(service: Service) -> None:
    process = service.start(STATETAP_REDIS_URL="redis://:secret@127.0.0.1:1/0")
    assert process.wait(30) == 1
    log = service.log.read_text()
    assert "redis_unavailable" in log
    assert "secret" not in log


def test_running_the_task_again_returns_at_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATETAP_REDIS_URL", service.server.url)
    monkeypatch.setenv("STATETAP_STORE", str(service.store))
    folder = service.dataset("d", service.source(10))
    task.run_ingest("d")
    report, before = service.report(folder), os.stat(folder / ROWS)
    task.run_ingest("d")
    assert service.report(folder) == report
    assert os.stat(folder / ROWS) == before
