"""Both clients against a real coordinator, over connections that are cut and a coordinator that is killed."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from statetap.client import ApiError, AsyncClient, Client, Job, UnreachableError, flows
from statetap.contracts.errors import StatetapError
from tests.support.coordinator import PROFILE, Coordinator, FakeWorker, make_dataset, register_engine, until
from tests.support.proxy import Proxy
from tests.support.redis import RedisServer

LENGTHS = [10 + i % 50 for i in range(300)]


class Awaited:
    """The asynchronous client, called as the synchronous one: so each test runs over both."""

    def __init__(self, url: str, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = AsyncClient(url, **options)

    def __enter__(self) -> Awaited:
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            made = method(*args, **kwargs)
            return self._loop.run_until_complete(made) if inspect.iscoroutine(made) else self._items(made)

        return call

    def _items(self, made: AsyncIterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield self._loop.run_until_complete(made.__anext__())
            except StopAsyncIteration:
                return


@pytest.fixture(params=[Client, Awaited], ids=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Any:
    return request.param


def url_of(coordinator: Coordinator) -> str:
    return str(coordinator.http.base_url).rstrip("/")


def port_of(coordinator: Coordinator) -> int:
    port = coordinator.http.base_url.port
    assert port is not None
    return port


def test_every_method_over_the_life_of_a_job(make: Any, coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    dataset_id = make_dataset(coordinator.store, LENGTHS, bad=[7])
    with make(url_of(coordinator)) as client:
        assert client.health().status == client.ready().status == "ok" and client.service().service == "statetap"
        (engine,) = client.engines()
        assert engine.healthy and engine.profile["boundaries"] == [1, 2, 3] and client.store().free > client.store().reserved == 0
        assert [d.dataset_id for d in client.datasets()] == [dataset_id]
        assert client.dataset(dataset_id).rejected == 1 and client.wait_for_dataset(dataset_id).state == "ready"
        told = client.estimate(dataset_id, rows=10)
        assert told.fits and told.accepted == 9 and told.bytes > 0
        job = client.submit_job(dataset_id, name="by the client", max_failed=3)
        assert job.state == "queued" and job.rows.open == 300
        assert client.pause(job.job_id).state == "paused"
        assert [j.job_id for j in client.jobs(state=["paused"])] == [job.job_id] and not list(client.jobs(state="failed"))
        assert client.resume(job.job_id).state == "queued"
        worker.drain(lambda: client.job(job.job_id).ended, fail=[3, 5])
        end = client.wait(job.job_id, timeout_s=10)
        assert (end.rows.done, end.rows.failed, end.rows.skipped, end.state) == (297, 2, 1, "completed_with_errors")
        assert [(e.row, e.code) for e in client.errors(job.job_id)] == [(3, "nonfinite_states"), (5, "nonfinite_states"), (7, "bad_row")]
        assert [e.row for e in client.errors(job.job_id, code="bad_row")] == [7]
        assert [j.state for j in client.events(job.job_id)] == ["completed_with_errors"]
        with pytest.raises(ApiError) as none:
            client.retry(job.job_id, ["engine_timeout"])
        assert none.value.code == "conflict" and none.value.status == 409
        assert client.retry(job.job_id).rows.open == 2
        client.cancel(job.job_id)
        assert client.wait(job.job_id, timeout_s=20).state == "cancelled"
        would = client.delete_job(job.job_id, dry_run=True)
        assert would.dry_run and would.files > 297 and not would.deleted
        assert client.gc().dry_run
        assert client.delete_job(job.job_id).bytes == would.bytes
        with pytest.raises(ApiError, match="not_found") as gone:
            client.job(job.job_id)
        assert gone.value.status == 404 and gone.value.next_step
        assert client.delete_dataset(dataset_id).deleted and not list(client.datasets())


def test_lists_of_several_pages_are_whole(coordinator: Coordinator, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    register_engine(worker.redis)
    dataset_id = make_dataset(coordinator.store, [10] * 2500)
    with Client(url_of(coordinator)) as client:
        job = client.submit_job(dataset_id)
        worker.drain(lambda: client.job(job.job_id).ended, fail=range(2500))
        assert [e.row for e in client.errors(job.job_id)] == list(range(2500))
        ids = {client.submit_job(dataset_id, name=str(i)).job_id for i in range(60)}
        assert ids < {j.job_id for j in client.jobs()}


def test_a_submission_whose_answer_is_lost_makes_one_job(make: Any, coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    dataset_id = make_dataset(coordinator.store, LENGTHS)
    with Proxy(port_of(coordinator)) as proxy, make(proxy.url) as client:
        coordinator.signal(signal.SIGSTOP)  # so that the whole request arrives, and its answer does not

        def cut() -> None:
            until(lambda: dataset_id.encode() in proxy.last_up, "the body has gone through")
            proxy.cut()
            coordinator.signal(signal.SIGCONT)

        cutter = threading.Thread(target=cut)
        cutter.start()
        job = client.submit_job(dataset_id)
        cutter.join()
        assert proxy.cuts == 1
        again = client.submit_job(dataset_id, idempotency_key="mine")
        assert client.submit_job(dataset_id, idempotency_key="mine").job_id == again.job_id != job.job_id
        assert {j.job_id for j in client.jobs()} == {job.job_id, again.job_id}
        with pytest.raises(ApiError) as other:
            client.submit_job(dataset_id, idempotency_key="mine", rows=3)
        assert (other.value.code, other.value.status) == ("idempotency_mismatch", 422)


def test_an_upload_goes_on_after_cuts_and_the_bytes_are_the_same(
    make: Any, coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows, "BLOCK", 1 << 20)
    path = tmp_path / "data.jsonl"
    path.write_bytes(os.urandom(5 << 20))
    told: list[int] = []
    with Proxy(port_of(coordinator)) as proxy, make(proxy.url) as client:
        # In the middle of the second block, and again of one after it.
        proxy.cut_after((3 << 20) // 2)

        def progress(sent: int, total: int) -> None:
            told.append(sent)
            assert total == 5 << 20
            if proxy.cuts == 1 and sent >= 2 << 20:
                proxy.cut_after(1 << 19)

        dataset = client.upload(path, progress=progress, resumable_above=1 << 20, format="tokenized")
        assert proxy.cuts == 2
    assert told == sorted(told) and told[-1] == 5 << 20
    (raw,) = (coordinator.store / "datasets" / dataset.dataset_id / "raw").iterdir()
    assert hashlib.sha256(raw.read_bytes()).digest() == hashlib.sha256(path.read_bytes()).digest()


def test_a_small_upload_and_a_path_make_datasets(make: Any, coordinator: Coordinator, tmp_path: Path) -> None:
    data = tmp_path / "data" / "rows.jsonl"
    data.write_text('{"input_ids": [1, 2]}\n')
    with make(url_of(coordinator)) as client:
        uploaded = client.upload(data, format="tokenized", truncate=True, max_length=5)
        assert uploaded.state == "ingesting" and uploaded.format == "tokenized"
        assert client.upload(data, format="tokenized", truncate=True, max_length=5).dataset_id == uploaded.dataset_id
        named = client.dataset_from_path(data, format="tokenized", name="by path")
        assert named.name == "by path" and named.dataset_id != uploaded.dataset_id
        with pytest.raises(ApiError) as e:
            client.dataset_from_path("/etc/passwd")
        assert e.value.code == "path_not_allowed" and e.value.field == "path"
        with pytest.raises(StatetapError, match="not a file"):
            client.upload(tmp_path / "none")


def test_events_go_on_over_cuts_and_a_killed_coordinator(make: Any, tmp_path: Path, redis_server: RedisServer, redis_client: Any) -> None:
    coordinator = Coordinator(tmp_path, redis_server.url)
    worker = FakeWorker(redis_client, coordinator.store)
    try:
        coordinator.start()
        register_engine(redis_client)
        job_id = coordinator.submit(make_dataset(coordinator.store, LENGTHS))["job_id"]
        fixed = Proxy(port_of(coordinator))
        with fixed as proxy, make(proxy.url) as client:
            seen: list[Job] = []
            follow = iter(client.events(job_id))
            seen.append(next(follow))
            first = worker.wait()
            assert worker.lease(first)
            worker.run(first, rows=10)
            while seen[-1].rows.done < 10:
                seen.append(next(follow))
            proxy.cut()
            worker.run(first, rows=10)
            while seen[-1].rows.done < 20:
                seen.append(next(follow))
            coordinator.signal(signal.SIGKILL)
            coordinator.wait()
            coordinator.start()
            proxy._target = port_of(coordinator)
            worker.run(first)
            worker.hand_back(first)
            done = threading.Event()
            drain = threading.Thread(target=lambda: worker.drain(done.is_set, 40))
            drain.start()
            seen += list(follow)
            done.set()
            drain.join()
            assert proxy.connections > 2
        assert seen[-1].state == "completed" and seen[-1].rows.done == 300
        versions = [j.version for j in seen]
        assert versions == sorted(set(versions))
    finally:
        worker.close()
        coordinator.close()


def test_a_coordinator_that_is_away_is_waited_for_and_then_named(make: Any, coordinator: Coordinator) -> None:
    url = url_of(coordinator)
    coordinator.signal(signal.SIGKILL)
    coordinator.wait()
    with make(url, patience_s=0.5) as client, pytest.raises(UnreachableError) as e:
        client.job("job-1")
    assert url in e.value.message and "statetap up" in e.value.next_step


def test_redis_away_is_told_with_its_code_and_waited_for(
    make: Any, coordinator: Coordinator, worker: FakeWorker, redis_server: RedisServer
) -> None:
    register_engine(worker.redis)
    job_id = coordinator.submit(make_dataset(coordinator.store, LENGTHS))["job_id"]
    redis_server.kill()
    with make(url_of(coordinator), patience_s=0) as client, pytest.raises(ApiError) as e:
        client.ready()
    assert (e.value.code, e.value.status, e.value.retryable) == ("redis_unavailable", 503, True)
    back = threading.Timer(0.5, redis_server.start)
    back.start()
    with make(url_of(coordinator)) as client:
        assert client.job(job_id).rows.total == 300 and client.ready().status == "ok"
    back.join()


def test_what_was_read_can_be_acknowledged_and_rows_are_listed(make: Any, coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    dataset_id = make_dataset(coordinator.store, LENGTHS)
    with make(url_of(coordinator)) as client:
        job = client.submit_job(dataset_id, retain="until_read", retain_bytes=10**12)
        worker.drain(lambda: client.job(job.job_id).rows.open == 0, fail=[1])
        assert [r.row for r in client.rows(job.job_id, state="failed")] == [1]
        rows = list(client.rows(job.job_id))
        assert [r.row for r in rows] == list(range(300)) and all(r.path for r in rows if r.state == "done")
        freed = client.ack(job.job_id, [(0, 10), (20, 25)])
        assert freed.rows >= 14 and freed.bytes_freed > 0


def test_records_hold_all_that_the_coordinator_sends(coordinator: Coordinator, worker: FakeWorker) -> None:
    """A field of the API that the client does not know is a field that nobody can read with it."""
    register_engine(worker.redis)
    dataset_id = make_dataset(coordinator.store, LENGTHS, bad=[7])
    with Client(url_of(coordinator)) as client:
        job_id = client.submit_job(dataset_id).job_id
        worker.drain(lambda: client.job(job_id).ended)
        for path, known in (
            (f"/v1/jobs/{job_id}", client.job(job_id)),
            (f"/v1/datasets/{dataset_id}", client.dataset(dataset_id)),
            ("/v1/engines", client.engines()[0]),
            (f"/v1/jobs/{job_id}/errors", next(client.errors(job_id))),
            (f"/v1/jobs/{job_id}/rows", next(client.rows(job_id))),
            ("/", client.service()),
            ("/v1/store", client.store()),
        ):
            sent = coordinator.http.get(path).json()
            sent = sent["items"][0] if "items" in sent else sent
            assert leaves(sent) == leaves(json.loads(json.dumps(known.to_dict()))), path
        sent = coordinator.http.post("/v1/estimate", json={"dataset_id": dataset_id}).json()
        assert sent.keys() == client.estimate(dataset_id).to_dict().keys()
    assert PROFILE.profile_id


def leaves(data: Any) -> set[str]:
    """Names of all fields, records inside records too; what stands in free-form dicts is no field."""
    free = {"profile", "errors", "self_check", "examples", "links"}
    return {n for k, v in data.items() for n in ([k] if not isinstance(v, dict) or k in free else [k, *(f"{k}.{m}" for m in v)])}
