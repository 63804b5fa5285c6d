"""Idempotency-Key on both POSTs: one key makes one thing, whoever dies when."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from tests.support.coordinator import Coordinator, make_dataset, register_engine, until
from tests.support.redis import RedisServer

LENGTHS = [10 + i % 50 for i in range(300)]
LINE = b'{"input_ids": [1, 2, 3]}\n'


def jobs_on(store: Path) -> list[str]:
    return sorted(p.parent.name for p in (store / "jobs").glob("*/job.json"))


def post_job(http: httpx.Client, key: str, **body: Any) -> httpx.Response:
    return http.post("/v1/jobs", json=body, headers={"Idempotency-Key": key})


@pytest.fixture
def second(tmp_path: Path, coordinator: Coordinator, redis_server: RedisServer) -> Iterator[Coordinator]:
    """Another coordinator on the same store and Redis."""
    folder = tmp_path / "second"
    folder.mkdir()
    process = Coordinator(folder, redis_server.url, STORE=str(coordinator.store), DATA_DIR=str(tmp_path / "data"))
    try:
        yield process.start()
    finally:
        process.close()


def test_fifty_posts_at_once_with_one_key_to_two_coordinators_make_one_job(
    coordinator: Coordinator, second: Coordinator, redis_client: redis.Redis
) -> None:
    register_engine(redis_client)
    dataset = make_dataset(coordinator.store, LENGTHS)
    together = threading.Barrier(50)

    def post(i: int) -> httpx.Response:
        target = (coordinator, second)[i % 2]
        with httpx.Client(base_url=target.http.base_url, timeout=60) as http:
            together.wait(30)
            reply = post_job(http, "k-1", dataset_id=dataset, name="once")
            # In flight is said at once and never waited for; the repeat is the client's.
            while reply.status_code == 409:
                assert reply.json()["code"] == "idempotency_in_flight" and reply.headers["retry-after"]
                reply = post_job(http, "k-1", dataset_id=dataset, name="once")
            return reply

    with ThreadPoolExecutor(50) as pool:
        replies = list(pool.map(post, range(50)))
    assert {r.status_code for r in replies} == {202}, [r.text for r in replies if r.status_code != 202][:3]
    assert len({r.json()["job_id"] for r in replies}) == 1
    assert len({r.headers["location"] for r in replies}) == 1
    assert sum("idempotency-replayed" not in r.headers for r in replies) == 1, "one of them made it"
    assert len(jobs_on(coordinator.store)) == 1
    other = post_job(coordinator.http, "k-1", dataset_id=dataset, name="another")
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_mismatch")
    assert post_job(second.http, "k-2", dataset_id=dataset, name="once").json()["job_id"] != replies[0].json()["job_id"]


def test_fifty_posts_at_once_without_a_key_all_make_their_own(coordinator: Coordinator, redis_client: redis.Redis) -> None:
    """More than there are worker threads: none may wait for another's."""
    register_engine(redis_client)
    dataset = make_dataset(coordinator.store, LENGTHS)

    def post(_: int) -> int:
        with httpx.Client(base_url=coordinator.http.base_url, timeout=60) as http:
            return http.post("/v1/jobs", json={"dataset_id": dataset}).status_code

    with ThreadPoolExecutor(50) as pool:
        assert set(pool.map(post, range(50))) == {202}
    assert len(jobs_on(coordinator.store)) == 50


def test_a_key_outlives_the_coordinator_and_redis(coordinator: Coordinator, redis_client: redis.Redis, redis_server: RedisServer) -> None:
    register_engine(redis_client)
    dataset = make_dataset(coordinator.store, LENGTHS)
    first = post_job(coordinator.http, "k", dataset_id=dataset)
    assert (first.status_code, "idempotency-replayed" in first.headers) == (202, False), first.text
    coordinator.signal(signal.SIGKILL)
    coordinator.wait()
    coordinator.start()
    # Defaults that are spelled out are the same request.
    again = post_job(coordinator.http, "k", dataset_id=dataset, priority=0, force=False)
    assert (again.status_code, again.json()["job_id"], again.headers["idempotency-replayed"]) == (202, first.json()["job_id"], "true")
    assert again.headers["location"] == first.headers["location"]
    redis_server.kill()
    away = post_job(coordinator.http, "k", dataset_id=dataset)
    assert (away.status_code, away.json()["job_id"]) == (202, first.json()["job_id"])
    redis_server.start()
    assert len(jobs_on(coordinator.store)) == 1


@pytest.mark.parametrize("place", ["before the job", "after its plan", "before the answer"])
def test_a_kill_in_the_middle_makes_no_second_job(
    place: str, tmp_path: Path, redis_server: RedisServer, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_engine(redis_client)
    monkeypatch.setenv("CRASH", place)
    crashing = Coordinator(tmp_path, redis_server.url)
    crashing.module = "tests.integration.crashing_coordinator"
    sane = Coordinator(tmp_path, redis_server.url)
    try:
        crashing.start()
        dataset = make_dataset(crashing.store, LENGTHS)
        with pytest.raises(httpx.TransportError):
            post_job(crashing.http, "k", dataset_id=dataset)
        assert crashing.wait() == -signal.SIGKILL
        made = jobs_on(crashing.store)
        assert len(made) == (place == "before the answer")
        (record,) = (crashing.store / "idempotency").iterdir()
        named = json.loads(record.read_text().splitlines()[0])["resource_id"]
        sane.start()
        assert post_job(sane.http, "k", dataset_id=dataset, name="x").status_code == 422, "what was begun keeps its request"
        reply = post_job(sane.http, "k", dataset_id=dataset)
        assert reply.status_code == 202, reply.text
        assert jobs_on(sane.store) == [reply.json()["job_id"]]
        assert (reply.json()["job_id"] == named) == (place == "before the answer")
        assert post_job(sane.http, "k", dataset_id=dataset).json()["job_id"] == reply.json()["job_id"]
    finally:
        crashing.close()
        sane.close()


def test_a_torn_record_and_one_that_is_locked(coordinator: Coordinator, redis_client: redis.Redis) -> None:
    import fcntl

    register_engine(redis_client)
    dataset = make_dataset(coordinator.store, LENGTHS)
    first = post_job(coordinator.http, "k", dataset_id=dataset).json()["job_id"]
    (record,) = (coordinator.store / "idempotency").iterdir()
    whole = record.read_bytes()
    lines = whole.splitlines(keepends=True)
    for torn in (lines[0], lines[0] + lines[1][:5], lines[0] + b"\0\0\0\n"):
        record.write_bytes(torn)
        assert post_job(coordinator.http, "k", dataset_id=dataset).json()["job_id"] == first, torn
    with open(record, "rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        busy = post_job(coordinator.http, "k", dataset_id=dataset)
        assert (busy.status_code, busy.json()["code"], busy.json()["retryable"]) == (409, "idempotency_in_flight", True)
    record.write_bytes(lines[0][:10])  # nothing was named yet when it was torn: nothing was made
    assert post_job(coordinator.http, "k", dataset_id=dataset).json()["job_id"] != first


def test_failures_are_not_recorded_and_keys_expire(tmp_path: Path, redis_server: RedisServer, redis_client: redis.Redis) -> None:
    process = Coordinator(tmp_path, redis_server.url, IDEMPOTENCY_TTL_S="3600").start()
    try:
        dataset = make_dataset(process.store, LENGTHS)
        assert post_job(process.http, "k", dataset_id=dataset).status_code == 409, "no engine is alive"
        assert not list((process.store / "idempotency").iterdir())
        register_engine(redis_client)
        first = post_job(process.http, "k", dataset_id=dataset, name="other than before")
        assert first.status_code == 202, first.text
        for bad in ("", "a b", "x" * 256, "\xe9"):
            reply = process.http.post("/v1/jobs", json={"dataset_id": dataset}, headers=[(b"Idempotency-Key", bad.encode("latin-1"))])
            assert (reply.status_code, reply.json()["field"]) == (422, "Idempotency-Key"), bad
        assert len(jobs_on(process.store)) == 1
        (record,) = (process.store / "idempotency").iterdir()
        lines = record.read_text().splitlines()
        begun = json.loads(lines[0])
        record.write_text("\n".join([json.dumps(begun | {"at": begun["at"] - 4000}), *lines[1:], ""]))
        second = post_job(process.http, "k", dataset_id=dataset)
        assert second.status_code == 202 and second.json()["job_id"] != first.json()["job_id"], "the key expired"
        os.utime(record, (1, 1))
        process.signal(signal.SIGTERM)
        process.wait()
        process.start()
        assert not record.exists(), "swept at the start"
    finally:
        process.close()


def test_datasets_by_upload_and_by_path(coordinator: Coordinator, tmp_path: Path, redis_client: redis.Redis) -> None:
    http = coordinator.http
    (tmp_path / "data" / "rows.jsonl").write_bytes(LINE)

    def upload(content: bytes, key: str, **data: str) -> httpx.Response:
        return http.post("/v1/datasets", files={"file": ("a.jsonl", content)}, data=data, headers={"Idempotency-Key": key})

    first = upload(LINE, "k", format="tokenized")
    assert first.status_code == 202, first.text
    again = upload(LINE, "k", format="tokenized")
    assert (again.status_code, again.json()["dataset_id"]) == (202, first.json()["dataset_id"])
    assert again.headers["idempotency-replayed"] == "true"
    assert upload(LINE, "k").json()["code"] == "idempotency_mismatch", "other options"
    assert upload(LINE * 2, "k", format="tokenized").json()["code"] == "idempotency_mismatch", "another file"
    path = {"path": "rows.jsonl", "format": "tokenized"}
    by_path = http.post("/v1/datasets", json=path, headers={"Idempotency-Key": "p"}).json()["dataset_id"]
    os.utime(tmp_path / "data" / "rows.jsonl", ns=(1, 1))
    # Without the key the changed file is another dataset; with it the answer is what was made.
    assert http.post("/v1/datasets", json=path, headers={"Idempotency-Key": "p"}).json()["dataset_id"] == by_path
    assert http.post("/v1/datasets", json=path).json()["dataset_id"] != by_path
    register_engine(redis_client)
    assert post_job(http, "k", dataset_id="ds-none").status_code == 404, "a key is of one endpoint: here it is new"
    assert os.listdir(coordinator.store / "datasets" / ".incoming") == []


@pytest.mark.parametrize("place", ["before the dataset", "before the answer"])
def test_a_kill_in_the_middle_loses_no_upload(
    place: str, tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRASH", place)
    crashing = Coordinator(tmp_path, redis_server.url)
    crashing.module = "tests.integration.crashing_coordinator"
    sane = Coordinator(tmp_path, redis_server.url)
    headers = {"Idempotency-Key": "k"}
    try:
        crashing.start()
        created = crashing.http.post("/v1/uploads", json={"filename": "a.jsonl", "size": len(LINE)})
        assert created.status_code == 201, created.text
        upload_id = created.json()["upload_id"]
        piece = {"Upload-Offset": "0", "content-type": "application/offset+octet-stream"}
        assert crashing.http.patch(f"/v1/uploads/{upload_id}", content=LINE, headers=piece).status_code == 204
        body = {"upload_id": upload_id, "format": "tokenized"}
        with pytest.raises(httpx.TransportError):
            crashing.http.post("/v1/datasets", json=body, headers=headers)
        assert crashing.wait() == -signal.SIGKILL
        sane.start()
        replies = [sane.http.post("/v1/datasets", json=body, headers=headers) for _ in range(2)]
        assert [r.status_code for r in replies] == [202, 202], [r.text for r in replies]
        assert len({r.json()["dataset_id"] for r in replies}) == 1
        without = sane.http.post("/v1/datasets", json=body)
        assert without.json()["dataset_id"] == replies[0].json()["dataset_id"], "the same upload again is the same dataset, key or not"
        until(
            lambda: (sane.store / "datasets" / replies[0].json()["dataset_id"] / "raw" / "source.jsonl").read_bytes() == LINE, "it is whole"
        )
    finally:
        crashing.close()
        sane.close()
