"""Jobs that keep a part of the boundaries, or other encodings, over the real coordinator, Redis and workers; workers are killed on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from statetap.store.reader import JobDataset
from statetap.store.stream import JobStream
from statetap.store.verify import verify_job
from tests.support.coordinator import until
from tests.support.jobs import token_rows
from tests.support.redis import RedisServer
from tests.support.service import Service

ENDED = ("completed", "completed_with_errors")


@pytest.fixture
def service(tmp_path: Path, redis_server: RedisServer):
    with Service(tmp_path, redis_server.url) as made:
        yield made


def rows_of(service: Service) -> Path:
    return service.rig.store / "datasets" / "ds-1" / "rows.arrow"


def test_each_encoding_is_done_whole_and_reused_by_its_like_alone(service: Service) -> None:
    """Seen to fail with FP8 values that are read without their scales."""
    service.start()
    dataset = service.dataset(token_rows(300, 40))
    done = {}
    for encoding in ("raw", "fp8", "zstd"):
        job = service.api.submit(dataset, encoding=encoding, boundaries=[5, 2])
        assert (job["encoding"], job["boundaries"]) == (encoding, [5, 2])
        end = service.api.until_state(job["job_id"], *ENDED, seconds=40)
        assert (end["rows"]["done"], end["rows"]["reused"], end["state"]) == (300, 0, "completed")
        if encoding == "zstd":
            assert end["bytes"]["committed"] < 0.9 * end["bytes"]["expected"]
        else:
            assert end["bytes"]["committed"] == end["bytes"]["expected"]
        path = service.path(job["job_id"])
        report = verify_job(path, rows_of(service))
        assert report.ok and report.bytes == end["bytes"]["committed"] == sum(p.stat().st_size for p in path.glob("rows_*/*"))
        done[encoding] = path
    sets = {encoding: JobDataset(path, final="pre") for encoding, path in done.items()}
    for i in (0, 7, 299):
        raw, fp8, zstd = (sets[e][i]["aux_hidden_states"] for e in ("raw", "fp8", "zstd"))
        assert torch.equal(raw, zstd) and not torch.equal(raw, fp8)
        assert (raw - fp8).float().abs().max() <= raw.float().abs().max() / 16
    again = service.api.until_state(service.api.submit(dataset, encoding="zstd", boundaries=[5, 2])["job_id"], *ENDED, seconds=40)
    assert again["rows"]["reused"] == 300
    assert set(service.rig.stats()["rows"].values()) == {3}
    # What zstd made of these states is known now.
    estimate = service.api.http.post("/v1/estimate", json={"dataset_id": dataset, "encoding": "zstd", "boundaries": [5, 2]}).json()
    assert not estimate["exact"] and estimate["expected_bytes"] == pytest.approx(again["bytes"]["committed"], rel=0.01)
    assert estimate["bytes"] == again["bytes"]["expected"]


@pytest.mark.parametrize("positions", ["loss_mask", "last:3"])
def test_states_of_some_positions_survive_killed_workers_and_are_reused_by_their_like_alone(service: Service, positions: str) -> None:
    """Exact in bytes, whole for each row. Seen to fail with positions where mask[t] is 1 alone."""
    service.start(tokens_per_s=30_000)
    dataset = service.dataset(token_rows(400, 100), mask=lambda n: [int(60 <= i < 64 or i == 80) for i in range(n)])
    all_of = service.api.until_state(service.api.submit(dataset)["job_id"], *ENDED, seconds=40)
    worker = service.rig.processes[-1]
    job = service.api.submit(dataset, positions=positions)
    assert job["positions"] == positions and job["bytes"]["expected"] < all_of["bytes"]["expected"] / 4
    until(lambda: service.api.job(job["job_id"])["rows"]["done"] >= 60, "60 rows", seconds=60)
    if (horse := worker.horse()) is not None:
        horse.kill()
    end = service.api.until_state(job["job_id"], *ENDED, seconds=60)
    assert (end["rows"]["done"], end["rows"]["reused"], end["state"]) == (400, 0, "completed")
    assert end["bytes"]["committed"] == end["bytes"]["expected"]
    report = verify_job(service.path(job["job_id"]), rows_of(service))
    assert report.ok and (report.files, report.extra, report.bytes) == (400, 0, end["bytes"]["committed"])
    at = [60, 61, 62, 63, 64, 80, 81] if positions == "loss_mask" else [97, 98, 99]
    want, got = JobDataset(service.path(all_of["job_id"])), JobDataset(service.path(job["job_id"]))
    for i in (0, 7, 399):
        assert got[i]["positions"].tolist() == at
        assert torch.equal(got[i]["aux_hidden_states"], want[i]["aux_hidden_states"][at])
    again = service.api.until_state(service.api.submit(dataset, positions=positions)["job_id"], *ENDED, seconds=40)
    assert again["rows"]["reused"] == 400
    refused = service.api.http.post("/v1/jobs", json={"dataset_id": dataset, "positions": "last:0"})
    assert refused.status_code == 422 and "positions" in refused.text


def test_a_job_of_few_positions_may_hold_little_until_it_is_read(service: Service) -> None:
    """Batches are given out by a bound of their bytes: were it that of all tokens, none of these would ever have room.

    Seen to fail with that bound."""
    service.start()
    dataset = service.dataset(token_rows(300, 500))
    whole = service.api.http.post("/v1/estimate", json={"dataset_id": dataset}).json()["bytes"]
    estimate = service.api.http.post("/v1/estimate", json={"dataset_id": dataset, "positions": "last:1"}).json()
    assert estimate["exact"] and estimate["bytes"] < whole / 10
    job = service.api.submit(dataset, positions="last:1", retain="until_read", retain_bytes=estimate["bytes"] // 2)["job_id"]
    read = 0
    for item in JobStream(service.path(job), ack=lambda rows: service.post(f"/v1/jobs/{job}/acks", 200, rows=rows), poll_s=0.05):
        assert item["positions"].tolist() == [499] and item["aux_hidden_states"].shape[0] == 1
        read += 1
    assert read == 300 and service.api.job(job)["state"] == "completed"


@pytest.mark.parametrize("encoding", ["fp8", "zstd"])
def test_killed_workers_lose_and_double_nothing(service: Service, encoding: str) -> None:
    """Seen to fail with a resume that leaves the temps of dead attempts."""
    service.start(tokens_per_s=9000)
    dataset = service.dataset(token_rows(600, 60))
    worker = service.rig.processes[-1]
    job = service.api.submit(dataset, encoding=encoding)["job_id"]
    for done in (60, 200, 350):
        until(lambda done=done: service.api.job(job)["rows"]["done"] >= done, f"{done} rows", seconds=60)
        if (horse := worker.horse()) is not None:
            horse.kill()
    end = service.api.until_state(job, *ENDED, seconds=120)
    assert (end["rows"]["done"], end["state"]) == (600, "completed")
    report = verify_job(service.path(job), rows_of(service))
    assert report.ok and (report.files, report.extra) == (600, 0)
    assert not list(service.path(job).rglob(".tmp-*"))


def test_a_boundary_that_no_engine_captures_is_refused_with_the_command_that_would(service: Service) -> None:
    """Seen to fail with a start command of the engine that is there."""
    service.start()
    dataset = service.dataset(token_rows(5, 20))
    reply = service.api.http.post("/v1/jobs", json={"dataset_id": dataset, "boundaries": [2, 3]})
    problem = reply.json()
    assert (reply.status_code, problem["code"], problem["field"]) == (409, "engine_mismatch", "boundaries")
    assert "--boundaries 2,3" in problem["start_command"]
    for wrong in ([2, 2], []):
        assert service.api.http.post("/v1/jobs", json={"dataset_id": dataset, "boundaries": wrong}).status_code == 422
