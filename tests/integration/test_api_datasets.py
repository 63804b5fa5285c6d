"""Datasets by the API of a real coordinator process: uploads, paths, and what happens around ingestion."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from pathlib import Path

import pytest
import redis
from rq.job import Job
from rq.serializers import JSONSerializer

from statetap.contracts import keys
from statetap.contracts.records import DatasetStatus
from statetap.store.fs import to_json
from tests.support.coordinator import PROFILE, Coordinator, register_engine, until
from tests.support.redis import RedisServer

LINE = b'{"input_ids": [1, 2, 3]}\n'


def ingest_queue(client: redis.Redis) -> list[str]:
    return client.lrange(f"rq:queue:{keys.INGEST_QUEUE}", 0, -1)


def finish_ingestion(coordinator: Coordinator, dataset_id: str, state: str = "ready") -> None:
    error = {"code": "bad_row", "message": "no good row"} if state == "failed" else None
    status = DatasetStatus(dataset_id=dataset_id, state=state, rows=3, accepted=3, tokens=9, error=error)
    (coordinator.store / "datasets" / dataset_id / "report.json").write_bytes(to_json(status.to_dict()))


def test_an_upload_is_kept_whole_enqueued_once_and_the_same_again_is_the_same(
    coordinator: Coordinator, redis_client: redis.Redis, redis_server: RedisServer
) -> None:
    content = LINE * 200_000  # 5 MB: more than any buffer of ours
    options = {"name": "mine", "format": "tokenized", "max_length": "64", "truncate": "true"}
    reply = coordinator.http.post("/v1/datasets", files={"file": ("Data.JSONL", content)}, data=options)
    assert reply.status_code == 202, reply.text
    dataset = reply.json()
    assert reply.headers["location"] == f"/v1/datasets/{dataset['dataset_id']}"
    assert (dataset["state"], dataset["name"]) == ("ingesting", "mine")
    folder = coordinator.store / "datasets" / dataset["dataset_id"]
    spec = json.loads((folder / "dataset.json").read_text())
    assert (spec["max_length"], spec["truncate"], spec["format"], spec["tokenizer"]) == (64, True, "tokenized", "")
    assert Path(spec["path"]) == folder / "raw" / "source.jsonl"
    assert hashlib.sha256((folder / "raw" / "source.jsonl").read_bytes()).digest() == hashlib.sha256(content).digest()
    queued = until(lambda: ingest_queue(redis_client), "the ingestion is enqueued")
    again = coordinator.http.post("/v1/datasets", files={"file": ("other.jsonl", content)}, data=options | {"name": "other"})
    assert (again.status_code, again.json()["dataset_id"]) == (202, dataset["dataset_id"])
    assert ingest_queue(redis_client) == queued and len(queued) == 1
    with redis.Redis(port=redis_server.port) as raw:
        job = Job.fetch(queued[0], connection=raw, serializer=JSONSerializer)
    assert (job.func_name, job.args, job.timeout) == (keys.INGEST_TASK, [dataset["dataset_id"]], -1)
    finish_ingestion(coordinator, dataset["dataset_id"])
    third = coordinator.http.post("/v1/datasets", files={"file": ("x.jsonl", content)}, data=options)
    assert (third.status_code, third.json()["state"], third.json()["tokens"]) == (200, "ready", 9)
    assert coordinator.http.post("/v1/datasets", files={"file": ("x.jsonl", content)}).json()["dataset_id"] != dataset["dataset_id"]
    assert os.listdir(coordinator.store / "datasets" / ".incoming") == []


def test_an_upload_is_never_whole_in_memory(coordinator: Coordinator) -> None:
    def high_water() -> int:
        status = Path(f"/proc/{coordinator.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])

    size, block = 200 << 20, b"x" * (1 << 20)
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    tail = b"\r\n--b--\r\n"

    def body():
        yield head
        for _ in range(size // len(block)):
            yield block
        yield tail

    assert coordinator.http.get("/").status_code == 200
    before = high_water()
    headers = {"content-type": "multipart/form-data; boundary=b", "content-length": str(len(head) + size + len(tail))}
    reply = coordinator.http.post("/v1/datasets", content=body(), headers=headers)
    assert reply.status_code == 202, reply.text
    assert high_water() - before < 40_000, "KiB more at the peak than before a 200 MiB upload"


def test_a_broken_upload_leaves_nothing_behind(coordinator: Coordinator) -> None:
    incoming = coordinator.store / "datasets" / ".incoming"
    port = coordinator.http.base_url.port
    with socket.create_connection(("127.0.0.1", port)) as s:
        s.sendall(
            b"POST /v1/datasets HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=b\r\ncontent-length: 100000\r\n\r\n"
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhalf of it'
        )
        until(lambda: incoming.exists() and os.listdir(incoming), "the upload has begun")
    until(lambda: not os.listdir(incoming), "it is removed when the client goes")
    form = {"content-type": "multipart/form-data; boundary=b"}
    for content in (b"", b"nonsense", b"--b\r\n\r\n", b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\ncut'):
        reply = coordinator.http.post("/v1/datasets", content=content, headers=form)
        assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request"), content
    reply = coordinator.http.post("/v1/datasets", files={"file": ("a", LINE)}, data={"format": "parquet", "colour": "red"})
    assert reply.status_code == 422
    assert {e["field"] for e in reply.json()["errors"]} == {"format", "colour"}
    assert coordinator.http.post("/v1/datasets", files={"wrong": ("a", LINE)}).json()["field"] == "file"
    assert coordinator.http.post("/v1/datasets", content=b"x", headers={"content-type": "text/plain"}).status_code == 422
    with socket.create_connection(("127.0.0.1", port)) as s:
        head = (
            "POST /v1/datasets HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=b\r\ncontent-length: %d\r\n\r\n"
        )
        s.sendall((head % (1 << 60)).encode())
        assert s.recv(20).startswith(b"HTTP/1.1 507"), "refused before a byte of it was sent"
    assert os.listdir(incoming) == []
    assert coordinator.http.get("/v1/datasets").json()["items"] == []


def test_a_path_must_lie_below_the_data_folder_links_resolved(coordinator: Coordinator, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "rows.jsonl").write_bytes(LINE)
    (tmp_path / "secret.jsonl").write_bytes(LINE)
    (data / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (data / "loop").symlink_to(data / "loop")
    (data / "near.jsonl").symlink_to(data / "rows.jsonl")

    def post(path: str, **more: object):
        return coordinator.http.post("/v1/datasets", json={"path": path, "format": "tokenized", **more})

    good = post(str(data / "rows.jsonl"))
    assert good.status_code == 202, good.text
    assert good.json()["name"] == "rows.jsonl"
    assert post("rows.jsonl").json()["dataset_id"] == good.json()["dataset_id"], "relative to the data folder"
    assert post(str(data / "near.jsonl")).json()["dataset_id"] == good.json()["dataset_id"], "a link is the file it leads to"
    for path in (str(tmp_path / "secret.jsonl"), str(data / "link.jsonl"), "../secret.jsonl", "/etc/passwd", str(tmp_path / "none")):
        reply = post(path)
        assert (reply.status_code, reply.json()["code"], reply.json()["field"]) == (422, "path_not_allowed", "path"), path
    for path in (str(data), "none.jsonl", "a\0b", "loop", ""):
        reply = post(path)
        assert (reply.status_code, reply.json()["code"], reply.json()["field"]) == (422, "invalid_request", "path"), path
    os.utime(data / "rows.jsonl", ns=(1, 1))
    assert post("rows.jsonl").json()["dataset_id"] != good.json()["dataset_id"], "a file that changed is another dataset"
    assert post("rows.jsonl", max_length=5).json()["dataset_id"] != post("rows.jsonl").json()["dataset_id"]
    wrong = coordinator.http.post("/v1/datasets", content=b"{", headers={"content-type": "application/json"})
    assert (wrong.status_code, wrong.json()["code"]) == (422, "invalid_request")


def test_without_a_data_folder_paths_are_refused_unless_any_is_allowed(tmp_path: Path, redis_server: RedisServer) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(LINE)
    for settings, status in (({}, 422), ({"ALLOW_ANY_PATH": "1"}, 202)):
        process = Coordinator(tmp_path, redis_server.url, **settings).start()
        try:
            assert process.http.post("/v1/datasets", json={"path": str(file)}).status_code == status
        finally:
            process.close()


def test_progress_comes_from_redis_and_the_end_from_the_store(coordinator: Coordinator, redis_client: redis.Redis) -> None:
    dataset_id = coordinator.http.post("/v1/datasets", files={"file": ("a.jsonl", LINE)}).json()["dataset_id"]
    progress = DatasetStatus(dataset_id=dataset_id, state="ingesting", rows=2, bytes_read=10, bytes_total=20)
    redis_client.set(keys.dataset(dataset_id), json.dumps(progress.to_dict()))
    assert coordinator.http.get(f"/v1/datasets/{dataset_id}").json()["bytes_read"] == 10
    refused = coordinator.http.post("/v1/jobs", json={"dataset_id": dataset_id})
    assert (refused.status_code, refused.json()["code"]) == (409, "dataset_not_ready")
    redis_client.set(keys.dataset(dataset_id), json.dumps(progress.to_dict() | {"state": "ready"}))
    assert coordinator.http.get(f"/v1/datasets/{dataset_id}").json()["state"] == "ingesting", "only the report says ready"
    finish_ingestion(coordinator, dataset_id)
    assert coordinator.http.get(f"/v1/datasets/{dataset_id}").json()["state"] == "ready"
    assert coordinator.http.get("/v1/datasets").json()["items"][0]["dataset_id"] == dataset_id
    missing = coordinator.http.get("/v1/datasets/ds-none")
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")


def test_an_interrupted_ingestion_is_enqueued_again_and_a_running_one_is_not(coordinator: Coordinator, redis_client: redis.Redis) -> None:
    dataset_id = coordinator.http.post("/v1/datasets", files={"file": ("a.jsonl", LINE)}).json()["dataset_id"]
    queue = f"rq:queue:{keys.INGEST_QUEUE}"
    until(lambda: redis_client.lpop(queue), "it is enqueued")
    redis_client.set(keys.ingesting(dataset_id), "somebody")
    redis_client.delete(keys.ingest_claim(dataset_id))
    ticks = redis_client.info("stats")["total_commands_processed"]
    until(lambda: redis_client.info("stats")["total_commands_processed"] > ticks + 50, "some ticks")
    assert ingest_queue(redis_client) == []
    redis_client.delete(keys.ingesting(dataset_id))
    until(lambda: ingest_queue(redis_client), "it is enqueued again")


def test_a_failed_dataset_is_refused_for_jobs_and_tried_again_when_posted_again(
    coordinator: Coordinator, redis_client: redis.Redis
) -> None:
    post = {"files": {"file": ("a.jsonl", LINE)}}
    dataset_id = coordinator.http.post("/v1/datasets", **post).json()["dataset_id"]
    until(lambda: redis_client.lpop(f"rq:queue:{keys.INGEST_QUEUE}"), "it is enqueued")
    finish_ingestion(coordinator, dataset_id, "failed")
    refused = coordinator.http.post("/v1/jobs", json={"dataset_id": dataset_id})
    assert (refused.status_code, refused.json()["code"]) == (409, "dataset_failed")
    assert "no good row" in refused.json()["detail"]
    redis_client.delete(keys.ingest_claim(dataset_id))
    again = coordinator.http.post("/v1/datasets", **post)
    assert (again.status_code, again.json()["dataset_id"], again.json()["state"]) == (202, dataset_id, "ingesting")
    until(lambda: ingest_queue(redis_client), "it is enqueued again")


def test_a_dataset_is_accepted_while_redis_is_away_and_enqueued_when_it_is_back(
    coordinator: Coordinator, redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    redis_server.kill()
    reply = coordinator.http.post("/v1/datasets", files={"file": ("a.jsonl", LINE)}, data={"tokenizer": "x"})
    assert reply.status_code == 202, reply.text
    redis_server.start()
    until(lambda: ingest_queue(redis_client), "it is enqueued")


@pytest.mark.parametrize(("form", "expected"), [({}, "tiny"), ({"tokenizer": "own"}, "own"), ({"format": "tokenized"}, "")])
def test_the_tokenizer_is_that_of_the_only_live_model_unless_named(
    coordinator: Coordinator, redis_client: redis.Redis, form: dict[str, str], expected: str
) -> None:
    register_engine(redis_client, PROFILE)
    reply = coordinator.http.post("/v1/datasets", files={"file": ("a.jsonl", LINE)}, data=form)
    assert reply.json()["tokenizer"] == expected


def test_engines_are_listed_merged(coordinator: Coordinator, redis_client: redis.Redis) -> None:
    register_engine(redis_client, worker="w1", healthy=False)
    register_engine(redis_client, worker="w2")
    redis_client.set(keys.engine("x", "y"), "not json")
    (engine,) = coordinator.http.get("/v1/engines").json()["items"]
    assert (engine["workers"], engine["worker_ids"], engine["healthy"]) == (2, ["w1", "w2"], True)
    assert engine["profile"]["boundaries"] == [1, 2, 3]
