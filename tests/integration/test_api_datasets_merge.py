"""Several sources, merged and shuffled: from the API to rows.arrow, through a real coordinator and a real ingestion process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import redis

from statetap.datasets.permutation import Permutation
from statetap.store.rows import Row, RowsFile
from tests.support.coordinator import Coordinator, FakeWorker, register_engine, until
from tests.support.ingestion import ingestion, until_ingested
from tests.support.redis import RedisServer


def jsonl(at: int, n: int) -> bytes:
    return b"".join(json.dumps({"input_ids": [at, i + 1]}).encode() + b"\n" for i in range(n))


def post(coordinator: Coordinator, sources: list[dict[str, str]], **fields: Any) -> httpx.Response:
    return coordinator.http.post("/v1/datasets", json={"sources": sources, "format": "tokenized", **fields})


def uploaded(coordinator: Coordinator, filename: str, data: bytes) -> str:
    upload = coordinator.http.post("/v1/uploads", json={"filename": filename, "size": len(data)}).json()
    headers = {"Upload-Offset": "0", "content-type": "application/offset+octet-stream"}
    assert coordinator.http.patch(f"/v1/uploads/{upload['upload_id']}", content=data, headers=headers).status_code == 204
    return str(upload["upload_id"])


def rows_of(coordinator: Coordinator, dataset_id: str) -> list[Row]:
    file = RowsFile(coordinator.store / "datasets" / dataset_id / "rows.arrow")
    return list(file.read(0, file.rows))


def test_files_and_uploads_are_merged_and_shuffled_and_rows_name_their_file(
    coordinator: Coordinator, redis_server: RedisServer, redis_client: redis.Redis, tmp_path: Path, worker: FakeWorker
) -> None:
    data = tmp_path / "data"
    (data / "a.jsonl").write_bytes(jsonl(1, 100))
    (data / "sub").mkdir()
    (data / "sub" / "b.jsonl").write_bytes(jsonl(2, 49) + b"{\n")
    upload_id = uploaded(coordinator, "../c d.jsonl", jsonl(3, 30))
    sources = [{"path": str(data / "a.jsonl")}, {"path": "sub/b.jsonl"}, {"upload_id": upload_id}]
    with ingestion(coordinator, redis_server.url, tmp_path):
        plain = post(coordinator, [sources[0], sources[1]])
        assert plain.status_code == 202, plain.text
        shuffled = post(coordinator, sources, shuffle=7, name="mixed")
        assert shuffled.status_code == 202, shuffled.text
        assert coordinator.http.get(f"/v1/uploads/{upload_id}").status_code == 404, "the upload is used up"
        merged, mixed = (until_ingested(coordinator, r.json()["dataset_id"]) for r in (plain, shuffled))
    assert (merged["state"], merged["rows"], merged["name"], merged["sources"]) == (
        "ready",
        150,
        "a.jsonl and 1 more",
        ["a.jsonl", "b.jsonl"],
    )
    assert (mixed["rows"], mixed["name"], mixed["shuffle_seed"]) == (180, "mixed", 7)
    assert mixed["sources"] == ["a.jsonl", "b.jsonl", "c_d.jsonl"]
    assert [e["message"].partition(": ")[0] for e in mixed["examples"]] == ["b.jsonl:50"]
    rows = rows_of(coordinator, mixed["dataset_id"])
    order = Permutation(180, 7).forward(np.arange(180)).tolist()
    in_order = [(0, i + 1) for i in range(100)] + [(1, i + 1) for i in range(50)] + [(2, i + 1) for i in range(30)]
    assert [(r.source, r.line) for r in rows] == [in_order[i] for i in order]
    assert all(r.error_code or r.input_ids.tolist() == [r.source + 1, r.line] for r in rows)

    register_engine(redis_client)
    job = coordinator.submit(mixed["dataset_id"])["job_id"]
    worker.drain(lambda: coordinator.job(job)["rows"]["open"] == 0)
    (error,) = coordinator.http.get(f"/v1/jobs/{job}/errors").json()["items"]
    assert (error["row"], error["file"], error["line"]) == (order.index(149), "b.jsonl", 50)


def test_the_same_sources_in_the_same_order_with_the_same_seed_are_the_same_dataset(
    coordinator: Coordinator, tmp_path: Path, redis_client: redis.Redis
) -> None:
    for name in "ab":
        (tmp_path / "data" / f"{name}.jsonl").write_bytes(jsonl(ord(name), 5))
    a, b = {"path": "a.jsonl"}, {"path": "b.jsonl"}

    def made(sources: list[dict[str, str]], **fields: Any) -> str:
        reply = post(coordinator, sources, **fields)
        assert reply.status_code == 202, reply.text
        return str(reply.json()["dataset_id"])

    first = made([a, b], shuffle=1)
    assert made([a, {"path": str(tmp_path / "data" / "b.jsonl")}], shuffle=1, name="other") == first
    others = [made([b, a], shuffle=1), made([a, b], shuffle=2), made([a, b]), made([a, b, a]), made([a]), made([a, b], shuffle=0)]
    single = coordinator.http.post("/v1/datasets", json={"path": "a.jsonl", "format": "tokenized"}).json()["dataset_id"]
    seeded = coordinator.http.post("/v1/datasets", json={"path": "a.jsonl", "format": "tokenized", "shuffle": 1}).json()["dataset_id"]
    form = coordinator.http.post("/v1/datasets", files={"file": ("a.jsonl", jsonl(1, 5))}, data={"shuffle": "1"}).json()
    assert form["shuffle_seed"] == 1
    assert len({first, single, seeded, form["dataset_id"], *others}) == 4 + len(others)
    (tmp_path / "data" / "b.jsonl").write_bytes(jsonl(9, 5) + b"\n")
    assert made([a, b], shuffle=1) != first, "a file that changed is another dataset"

    one, two = (uploaded(coordinator, "x.jsonl", jsonl(4, 3)) for _ in range(2))
    by_upload = made([a, {"upload_id": one}])
    assert made([a, {"upload_id": two}]) == by_upload, "uploads are what is in them"
    again = post(coordinator, [a, {"upload_id": one}])
    assert again.json()["dataset_id"] == by_upload, "the repeat of a request whose answer was lost"


def test_what_is_wrong_with_a_source_is_said_by_its_place(coordinator: Coordinator, tmp_path: Path) -> None:
    (tmp_path / "data" / "a.jsonl").write_bytes(jsonl(1, 5))
    (tmp_path / "secret.jsonl").write_bytes(jsonl(1, 5))
    good = {"path": "a.jsonl"}
    upload_id = uploaded(coordinator, "x.jsonl", jsonl(4, 3))
    begun = coordinator.http.post("/v1/uploads", json={"filename": "y.jsonl", "size": 100}).json()["upload_id"]

    def refused(sources: Any, status: int, code: str, field: str | None = None, **fields: Any) -> None:
        reply = post(coordinator, sources, **fields)
        assert (reply.status_code, reply.json()["code"]) == (status, code), reply.text
        assert field is None or reply.json()["field"] == field, reply.text

    refused([good, {"path": str(tmp_path / "secret.jsonl")}], 422, "path_not_allowed", "sources.1.path")
    refused([good, {"path": "none.jsonl"}], 422, "invalid_request", "sources.1.path")
    refused([good, {"upload_id": "up-" + "0" * 32}], 404, "not_found")
    refused([good, {"upload_id": begun}], 409, "conflict")
    refused([{"upload_id": upload_id}, {"upload_id": upload_id}], 422, "invalid_request")
    for sources in ([], {}, [{}], [{"path": "a", "upload_id": "b"}], ["a.jsonl"], [good] * 1001, [{"path": "a.jsonl", "x": 1}]):
        refused(sources, 422, "invalid_request")
    for seed in (-1, 1 << 63, 1.5, "x"):
        refused([good], 422, "invalid_request", "shuffle", shuffle=seed)
    both = coordinator.http.post("/v1/datasets", json={"path": "a.jsonl", "sources": [good]})
    assert (both.status_code, both.json()["code"]) == (422, "invalid_request")
    assert coordinator.http.get("/v1/datasets").json()["items"] == []
    assert coordinator.http.get(f"/v1/uploads/{upload_id}").json()["offset"] == len(jsonl(4, 3)), "an upload is not used up by a refusal"
    assert post(coordinator, [good, {"upload_id": upload_id}]).status_code == 202


def test_an_upload_outlives_a_killed_coordinator_until_a_dataset_is_made_of_it(coordinator: Coordinator, tmp_path: Path) -> None:
    (tmp_path / "data" / "a.jsonl").write_bytes(jsonl(1, 5))
    upload_id = uploaded(coordinator, "x.jsonl", jsonl(4, 3))
    coordinator.close()
    coordinator.start()
    reply = post(coordinator, [{"path": "a.jsonl"}, {"upload_id": upload_id}])
    assert reply.status_code == 202
    spec = json.loads((coordinator.store / "datasets" / reply.json()["dataset_id"] / "dataset.json").read_text())
    assert [Path(p).read_bytes() for p in spec["sources"]] == [jsonl(1, 5), jsonl(4, 3)]
    until(lambda: not list((coordinator.store / "datasets" / ".incoming").glob("*.part")), "the upload's own name is gone")
