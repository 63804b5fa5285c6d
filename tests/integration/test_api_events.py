"""Server-sent events of a real coordinator: whole snapshots, cuts, many watchers, faults, and the end of the process."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest
import redis

from statetap.contracts.records import JobSpec
from statetap.coordinator import events, models
from statetap.coordinator.app import create_app
from statetap.coordinator.catalog import Catalog
from statetap.coordinator.examples import example
from statetap.coordinator.settings import CoordinatorSettings
from statetap.store.jobs import load_job
from tests.support.coordinator import PROFILE, Coordinator, FakeWorker, make_dataset, register_engine, until
from tests.support.jobs import make_job
from tests.support.redis import RedisServer

LENGTHS = [10 + i % 50 for i in range(300)]


class Watcher:
    """Reads a stream in a thread. ``events`` are (id, data); ``lines`` is all that came."""

    def __init__(self, coordinator: Coordinator, path: str, last: int | str | None = None) -> None:
        self.events: list[tuple[int, dict[str, Any]]] = []
        self.lines: list[str] = []
        self.ended = threading.Event()
        self.error: Exception | None = None
        url = coordinator.http.base_url
        self._http = HTTPConnection(url.host, url.port, timeout=60)
        self._http.request("GET", path, headers={"Last-Event-ID": str(last)} if last is not None else {})
        self._socket = self._http.sock
        self.reply = self._http.getresponse()
        assert self.reply.status == 200
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        field: dict[str, str] = {}
        try:
            for raw in self.reply:
                line = raw.decode().rstrip("\n")
                self.lines.append(line)
                name, _, value = line.partition(": ")
                if line and name:
                    field[name] = value
                elif not line and "data" in field:
                    assert field["event"] == "job"
                    self.events.append((int(field["id"]), json.loads(field["data"])))
                    field = {}
        except (HTTPException, OSError) as e:
            self.error = e
        self.ended.set()

    @property
    def last(self) -> dict[str, Any]:
        return self.events[-1][1]

    def until(self, state: str) -> dict[str, Any]:
        return until(lambda: self.events and self.last["state"] == state and self.last, f"a snapshot says {state}", 20)

    def close(self) -> None:
        """Cut the connection."""
        with suppress(OSError):  # it may have ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self.reply.close()
        self._http.close()
        self._socket.close()


@contextmanager
def watching(coordinator: Coordinator, path: str, last: int | str | None = None) -> Iterator[Watcher]:
    watcher = Watcher(coordinator, path, last)
    try:
        yield watcher
    finally:
        watcher.close()


def commands(client: redis.Redis) -> int:
    return int(client.info("stats")["total_commands_processed"])


def test_a_watcher_sees_a_job_from_its_start_to_its_end(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    job_id = coordinator.submit(make_dataset(coordinator.store, LENGTHS))["job_id"]
    with watching(coordinator, f"/v1/jobs/{job_id}/events") as watcher:
        headers = watcher.reply.headers
        assert headers["content-type"].startswith("text/event-stream")
        assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-store", "no")
        first = watcher.until("queued")
        assert watcher.lines[0] == "retry: 2000"
        worker.drain(lambda: coordinator.job(job_id)["state"] == "completed")
        end = watcher.until("completed")
        assert watcher.ended.wait(10) and watcher.error is None, "the stream ends after the terminal snapshot"
        assert end == coordinator.job(job_id), "an event is what GET says"
        versions = [number for number, _ in watcher.events]
        assert versions == sorted(set(versions)) and [d["version"] for _, d in watcher.events] == versions
        assert first["version"] < end["version"]
    for last in (None, end["version"], end["version"] + 10**6, "nonsense"):
        with watching(coordinator, f"/v1/jobs/{job_id}/events", last) as again:
            assert again.ended.wait(10)
            assert [d for _, d in again.events] == [end], "the end is told in any case"
    assert coordinator.http.get("/v1/jobs/job-none/events").json()["code"] == "not_found"


def test_after_a_cut_only_what_changed_is_told_and_versions_outlive_the_process(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    job_id = coordinator.submit(make_dataset(coordinator.store, [90] * 4000))["job_id"]
    path = f"/v1/jobs/{job_id}/events"
    task = worker.wait()
    assert worker.lease(task, ttl_ms=600_000)
    coordinator.until_state(job_id, "running")
    steady = coordinator.http.post(f"/v1/jobs/{job_id}/pause").json()  # nothing moves now
    until(lambda: coordinator.job(job_id)["version"] == coordinator.job(job_id)["version"], "it does not change any more")
    seen = coordinator.job(job_id)["version"]
    assert seen >= steady["version"]
    with watching(coordinator, path, seen) as watcher, watching(coordinator, path) as fresh:
        fresh.until("paused")
        coordinator.signal(signal.SIGKILL)
        coordinator.wait()
        assert watcher.ended.wait(10)
        assert all(number > seen for number, _ in watcher.events)
    coordinator.start()
    after = coordinator.job(job_id)
    assert (after["state"], after["version"] > seen) == ("paused", True)
    with watching(coordinator, path, seen) as watcher:
        watcher.until("paused")
        coordinator.http.post(f"/v1/jobs/{job_id}/resume")
        assert watcher.until("running")["version"] > after["version"]


def test_a_hundred_watchers_cost_as_much_as_one(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    job_id = coordinator.submit(make_dataset(coordinator.store, LENGTHS))["job_id"]

    def looks(seconds: float) -> float:
        """Commands that Redis gets in a second."""
        started, before = time.monotonic(), commands(worker.redis)
        until(lambda: time.monotonic() - started > seconds, "some seconds pass", 30)
        return (commands(worker.redis) - before) / (time.monotonic() - started)

    watchers: list[Watcher] = []
    try:
        watchers.append(Watcher(coordinator, f"/v1/jobs/{job_id}/events"))
        watchers[0].until("queued")
        one = looks(3)
        watchers += [Watcher(coordinator, f"/v1/jobs/{job_id}/events" if i % 2 else "/v1/events") for i in range(99)]
        until(lambda: all(w.events for w in watchers), "each has its first snapshot", 30)
        hundred = looks(3)
        assert hundred < one + 15, f"{one:.0f} commands a second with one watcher, {hundred:.0f} with a hundred"
        worker.drain(lambda: coordinator.job(job_id)["state"] == "completed")
        for watcher in watchers:
            assert watcher.until("completed")["rows"]["done"] == 300
    finally:
        for watcher in watchers:
            watcher.close()
    until(lambda: "statetap_event_watchers 0.0" in coordinator.http.get("/metrics").text, "watchers that went are forgotten", 20)


async def test_a_watcher_that_is_slow_finds_the_newest_and_is_not_queued_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In this process, with a job that changes at every look: what is kept does not grow with what the watcher missed."""
    monkeypatch.setattr(events, "POLL_S", 0.0)
    template = example({"$ref": "#/components/schemas/Job"}, create_app(CoordinatorSettings()).openapi()["components"]["schemas"])

    class Changing:
        looks = 0
        many = asyncio.Event()

        async def tell(self, specs: list[JobSpec]) -> list[models.Job]:
            self.looks += 1
            if self.looks == 500:
                self.many.set()
            return [models.Job(**(template | {"job_id": s.job_id, "version": self.looks})) for s in specs]

    path, _, _ = make_job(tmp_path, PROFILE, [[1, 2, 3]])
    status = Changing()
    watched = events.Events(Catalog(tmp_path), status)  # type: ignore[arg-type]
    spec = load_job(path)
    async with aclosing(watched.job(spec, None)) as snapshots:
        first = await anext(snapshots)
        assert first is not None
        await asyncio.wait_for(status.many.wait(), 30)  # it is busy with something else
        held = len(watched._snapshots)
        second = await anext(snapshots)
        assert second is not None and second.version >= 499 > first.version
        assert held == 1
    assert watched._poller is not None
    await asyncio.wait_for(watched._poller, 30)  # it ends by itself
    assert not watched._snapshots


def test_with_redis_away_the_stream_stands_and_goes_on(coordinator: Coordinator, worker: FakeWorker, redis_server: RedisServer) -> None:
    register_engine(worker.redis)
    job_id = coordinator.submit(make_dataset(coordinator.store, [90] * 4000))["job_id"]
    task = worker.wait()
    assert worker.lease(task, ttl_ms=600_000)
    worker.run(task, rows=50)
    with watching(coordinator, f"/v1/jobs/{job_id}/events") as watcher, watching(coordinator, "/v1/events") as everything:
        until(lambda: watcher.events and watcher.last["rows"]["done"] == 50, "the rows are told")
        redis_server.kill()
        coordinator.http.post(f"/v1/jobs/{job_id}/pause")  # what is on the store is still told
        assert watcher.until("paused")["rows"]["done"] == 50
        with watching(coordinator, f"/v1/jobs/{job_id}/events") as late:
            assert late.until("paused")["job_id"] == job_id
        redis_server.start()
        coordinator.http.post(f"/v1/jobs/{job_id}/resume")
        worker.publish(task)
        until(lambda: watcher.last["state"] == "running" and watcher.last["rows"]["done"] == 50, "it goes on", 20)
        assert not watcher.ended.is_set() and not everything.ended.is_set()
    assert "Traceback" not in coordinator.log.read_text()


def test_all_jobs_at_first_those_that_work_then_each_change_and_after_a_cut_what_ended(
    coordinator: Coordinator, worker: FakeWorker
) -> None:
    register_engine(worker.redis)
    dataset = make_dataset(coordinator.store, LENGTHS)
    old = coordinator.submit(dataset)["job_id"]
    worker.drain(lambda: coordinator.job(old)["state"] == "completed")
    first = coordinator.submit(dataset)["job_id"]
    with watching(coordinator, "/v1/events") as watcher:
        until(lambda: watcher.events, "the first event", 20)
        assert {d["job_id"] for _, d in watcher.events} == {first}, "what ended before is not news"
        second = coordinator.submit(dataset)["job_id"]
        until(lambda: any(d["job_id"] == second for _, d in watcher.events), "the new job is told")
        worker.drain(lambda: coordinator.job(first)["state"] == "completed")
        until(lambda: any(d["job_id"] == first and d["state"] == "completed" for _, d in watcher.events), "its end is told")
        numbers = [number for number, _ in watcher.events]
        assert numbers == sorted(set(numbers))
        last = next(n for n, d in watcher.events if d["job_id"] == first)
    # While nobody watches the second one ends; the coordinator is another one then.
    worker.drain(lambda: coordinator.job(second)["state"] == "completed")
    coordinator.signal(signal.SIGKILL)
    coordinator.wait()
    coordinator.start()
    with watching(coordinator, "/v1/events", last) as watcher:
        until(lambda: {d["job_id"] for _, d in watcher.events} >= {first, second}, "both ends are told", 20)
        assert {d["state"] for _, d in watcher.events} == {"completed"}


def test_the_watch_of_a_deleted_job_ends(coordinator: Coordinator, redis_client: redis.Redis) -> None:
    register_engine(redis_client)
    job_id = coordinator.submit(make_dataset(coordinator.store, LENGTHS))["job_id"]
    with watching(coordinator, f"/v1/jobs/{job_id}/events") as watcher:
        watcher.until("queued")
        shutil.rmtree(coordinator.store / "jobs" / job_id)
        assert watcher.ended.wait(20) and watcher.error is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_soon_with_watchers_connected(coordinator: Coordinator, redis_client: redis.Redis, number: signal.Signals) -> None:
    register_engine(redis_client)
    job_id = coordinator.submit(make_dataset(coordinator.store, LENGTHS))["job_id"]
    watchers = [Watcher(coordinator, path) for path in (f"/v1/jobs/{job_id}/events", "/v1/events") for _ in range(10)]
    try:
        until(lambda: all(w.events for w in watchers), "each has its first snapshot", 20)
        started = time.monotonic()
        coordinator.signal(number)
        assert coordinator.wait() == 0
        assert time.monotonic() - started < 8  # well below 3 s where the machine is free
        for watcher in watchers:
            assert watcher.ended.wait(10) and watcher.error is None, "the stream was ended, not cut"
        assert "Cancel" not in coordinator.log.read_text()
    finally:
        for watcher in watchers:
            watcher.close()
