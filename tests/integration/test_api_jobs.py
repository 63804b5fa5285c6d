"""Jobs by the API of a real coordinator process, with a real Redis and a worker that plays the protocol."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest
import redis

from statetap.contracts import keys
from statetap.contracts.profile import ITEM_SIZES
from statetap.contracts.sample_format import SampleFormat
from tests.support.coordinator import PROFILE, Coordinator, FakeWorker, make_dataset, register_engine, until
from tests.support.redis import RedisServer

LENGTHS = [10 + i % 50 for i in range(300)]


def test_a_job_runs_to_its_end_and_its_numbers_add_up(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    dataset = make_dataset(coordinator.store, [*LENGTHS, 101], bad=[7])
    job = coordinator.submit(dataset, name="first")
    assert job["state"] == "queued"
    assert job["rows"] == {"total": 301, "done": 0, "reused": 0, "failed": 0, "skipped": 0, "open": 301}
    sent = [n for i, n in enumerate(LENGTHS) if i != 7]
    assert job["tokens"]["total"] == sum(sent)
    assert job["bytes"]["expected"] == sum(SampleFormat(PROFILE).bytes(n) for n in sent)
    worker.drain(lambda: coordinator.job(job["job_id"])["state"].startswith("completed"), fail=[3, 5])
    end = coordinator.job(job["job_id"])
    assert end["state"] == "completed_with_errors"
    assert end["rows"] == {"total": 301, "done": 297, "reused": 0, "failed": 2, "skipped": 2, "open": 0}
    assert end["errors"] == {"nonfinite_states": 2, "bad_row": 1, "prompt_too_long": 1}
    assert end["bytes"]["committed"] == end["bytes"]["expected"] - SampleFormat(PROFILE).bytes(LENGTHS[3]) - SampleFormat(PROFILE).bytes(
        LENGTHS[5]
    )
    assert end["ended_at"] >= end["started_at"] >= end["created_at"]
    assert end["eta_s"] is None
    assert (coordinator.store / "jobs" / job["job_id"] / "COMPLETE").exists()
    left = {k for k in worker.redis.scan_iter("statetap:*") if job["job_id"] in k and worker.redis.ttl(k) < 0}
    assert not left, "an ended job leaves nothing without a TTL in Redis"
    assert worker.redis.hlen(keys.outstanding(PROFILE.profile_id)) == 0


def test_errors_are_paged_and_name_line_and_source(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    dataset = make_dataset(coordinator.store, LENGTHS, bad=[7])
    job = coordinator.submit(dataset)
    worker.drain(lambda: coordinator.job(job["job_id"])["state"].startswith("completed"), fail=range(0, 300, 10))
    seen, cursor = [], None
    for _ in range(100):
        params = {"limit": 7} | ({"cursor": cursor} if cursor else {})
        page = coordinator.http.get(f"/v1/jobs/{job['job_id']}/errors", params=params).json()
        assert len(page["items"]) <= 7
        seen += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert [e["row"] for e in seen] == sorted([*range(0, 300, 10), 7])
    assert seen[1] == {
        "row": 7,
        "file": None,
        "line": 8,
        "source_id": "source-7",
        "state": "skipped",
        "code": "bad_row",
        "message": "no messages",
        "retryable": False,
        "next_step": seen[1]["next_step"],
        "generation": 0,
    }
    only = coordinator.http.get(f"/v1/jobs/{job['job_id']}/errors", params={"code": "bad_row"}).json()
    assert [e["row"] for e in only["items"]] == [7]
    for wrong in ("x", "300", "-1", "9" * 30):
        reply = coordinator.http.get(f"/v1/jobs/{job['job_id']}/errors", params={"cursor": wrong})
        assert (reply.status_code, reply.json()["field"]) == (422, "cursor")


def test_a_first_batch_is_in_the_queue_by_the_submissions_wake_up_and_not_by_the_tick(tmp_path, redis_server, redis_client) -> None:
    slow = Coordinator(tmp_path, redis_server.url, TICK_S="30")  # so that only the wake-up can do it
    try:
        slow.start()
        worker = FakeWorker(redis_client, slow.store)
        register_engine(redis_client)
        dataset = make_dataset(slow.store, LENGTHS)
        started = time.monotonic()
        slow.submit(dataset)
        worker.wait(10)
        assert time.monotonic() - started < 10
        worker.close()
    finally:
        slow.close()


def test_what_cannot_be_a_job_is_refused_with_the_reason(coordinator: Coordinator, redis_client: redis.Redis) -> None:
    http = coordinator.http
    dataset = make_dataset(coordinator.store, LENGTHS, tokenizer="org/model")

    def refused(**body: object) -> dict:
        reply = http.post("/v1/jobs", json=body)
        assert reply.headers["content-type"] == "application/problem+json"
        problem = reply.json()
        assert problem["status"] == reply.status_code
        assert problem["next_step"]
        return problem

    assert refused(dataset_id="ds-none")["code"] == "not_found"
    assert refused(dataset_id="../jobs")["code"] == "not_found"
    wrong = refused(dataset_id=dataset, colour=1)
    assert (wrong["status"], wrong["field"]) == (422, "colour")
    nothing = refused(dataset_id=dataset)
    assert (nothing["status"], nothing["code"]) == (409, "engine_mismatch")
    assert nothing["start_command"] == "statetap up --model org/model"
    register_engine(redis_client)
    assert refused(dataset_id=dataset, profile_id="f" * 16)["code"] == "engine_mismatch"
    other = replace(PROFILE, boundaries=(0, 1, 2))
    register_engine(redis_client, other, worker="w2")
    several = refused(dataset_id=dataset)
    assert (several["status"], several["field"]) == (422, "profile_id")
    assert PROFILE.profile_id in several["detail"] and other.profile_id in several["detail"]
    assert coordinator.submit(dataset, profile_id=other.profile_id)["profile_id"] == other.profile_id
    long = make_dataset(coordinator.store, [101, 500], "ds-0000000000000002")
    none = refused(dataset_id=long, profile_id=other.profile_id)
    assert none["code"] == "dataset_failed" and "500 tokens" in none["detail"]


def test_a_job_that_does_not_fit_is_refused_with_the_numbers_unless_forced(coordinator: Coordinator, redis_client: redis.Redis) -> None:
    huge = replace(PROFILE, hidden=1 << 40)
    register_engine(redis_client, huge)
    dataset = make_dataset(coordinator.store, LENGTHS)
    reply = coordinator.http.post("/v1/jobs", json={"dataset_id": dataset})
    assert reply.status_code == 507
    numbers = reply.json()["numbers"]
    assert numbers["needed"] == sum(SampleFormat(huge).bytes(n) for n in LENGTHS)
    assert numbers["missing"] == numbers["needed"] - (numbers["free"] - numbers["reserved"] - numbers["kept_free"])
    assert coordinator.submit(dataset, force=True)["bytes"]["expected"] == numbers["needed"]
    register_engine(redis_client, PROFILE, worker="w2")
    again = coordinator.http.post("/v1/jobs", json={"dataset_id": dataset, "profile_id": PROFILE.profile_id})
    assert again.status_code == 507, "what the running job still needs is not free"
    assert again.json()["numbers"]["reserved"] == numbers["needed"]


def test_a_refusal_lists_the_encodings_that_would_fit_and_they_do(coordinator: Coordinator, redis_client: redis.Redis) -> None:
    dataset = make_dataset(coordinator.store, LENGTHS)
    register_engine(redis_client, PROFILE)
    room = coordinator.http.post("/v1/estimate", json={"dataset_id": dataset}).json()
    available = room["free"] - room["reserved"] - room["kept_free"]
    planes = PROFILE.num_planes * sum(LENGTHS)
    big = replace(PROFILE, hidden=int(available * 1.4) // planes // ITEM_SIZES[PROFILE.dtype])  # raw: 1.4 of what there is
    register_engine(redis_client, big, worker="w2")
    asked = {"dataset_id": dataset, "profile_id": big.profile_id}
    problem = coordinator.http.post("/v1/jobs", json=asked).json()
    assert problem["status"] == 507
    half = sum(SampleFormat(big, (), "fp8").bytes(n) for n in LENGTHS)
    assert problem["numbers"]["fits_fp8_bytes"] == half and f"encoding=fp8: {half:,} bytes" in problem["detail"]
    assert problem["numbers"]["most_zstd_bytes"] == sum(SampleFormat(big, (), "zstd").bytes(n) for n in LENGTHS)
    estimate = coordinator.http.post("/v1/estimate", json=asked).json()
    found = {a["value"]: a for a in estimate["alternatives"] if a["field"] == "encoding"}
    assert found["fp8"]["fits"] and found["fp8"]["bytes"] == half and not found["zstd"]["fits"]
    one = coordinator.http.post("/v1/estimate", json=asked | {"boundaries": [big.boundaries[0]]}).json()
    assert one["fits"] and one["bytes"] == sum(SampleFormat(big, big.boundaries[:1]).bytes(n) for n in LENGTHS)
    job = coordinator.submit(dataset, profile_id=big.profile_id, encoding="fp8")
    assert (job["encoding"], job["bytes"]["expected"]) == ("fp8", half)


def test_pause_resume_and_cancel_are_idempotent_and_an_ended_job_conflicts(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    job_id = coordinator.submit(make_dataset(coordinator.store, [90] * 4000))["job_id"]
    task = worker.wait()
    assert worker.lease(task)
    coordinator.until_state(job_id, "running")
    for _ in range(2):
        reply = coordinator.http.post(f"/v1/jobs/{job_id}/pause")
        assert (reply.status_code, reply.json()["state"], reply.json()["reason"]) == (202, "paused", "user")
    assert worker.redis.get(keys.control(job_id)) == "pause"
    worker.hand_back(task)
    while (left := worker.take()) is not None:
        worker.hand_back(left)
    for _ in range(2):
        assert coordinator.http.post(f"/v1/jobs/{job_id}/resume").status_code == 202
    until(lambda: worker.redis.get(keys.control(job_id)) == "run", "the control is run again")
    task = worker.wait()
    assert worker.lease(task)
    worker.run(task, rows=10, publish=False)
    assert coordinator.http.post(f"/v1/jobs/{job_id}/cancel").status_code == 202
    assert coordinator.job(job_id)["control"] == "cancel"
    assert coordinator.http.post(f"/v1/jobs/{job_id}/resume").json()["code"] == "conflict"
    worker.hand_back(task)
    end = coordinator.until_state(job_id, "cancelled")
    assert end["rows"]["done"] == 10, "rows that were committed count, published or not"
    assert coordinator.http.post(f"/v1/jobs/{job_id}/cancel").status_code == 202
    for verb in ("pause", "resume"):
        reply = coordinator.http.post(f"/v1/jobs/{job_id}/{verb}")
        assert (reply.status_code, reply.json()["code"]) == (409, "conflict")
    assert coordinator.http.get("/v1/jobs", params={"state": "cancelled"}).json()["items"][0]["job_id"] == job_id
    assert coordinator.http.get("/v1/jobs", params={"state": "running"}).json()["items"] == []


def test_jobs_are_listed_in_pages_newest_first(coordinator: Coordinator, redis_client: redis.Redis) -> None:
    register_engine(redis_client)
    dataset = make_dataset(coordinator.store, LENGTHS)
    made = [coordinator.submit(dataset, name=f"n{i}")["job_id"] for i in range(5)]
    first = coordinator.http.get("/v1/jobs", params={"limit": 3}).json()
    second = coordinator.http.get("/v1/jobs", params={"limit": 3, "cursor": first["next_cursor"]}).json()
    assert [j["job_id"] for j in first["items"] + second["items"]] == made[::-1]
    assert second["next_cursor"] is None
    assert coordinator.http.get("/v1/jobs", params={"cursor": "job-x"}).status_code == 422


def test_rates_and_eta_come_from_work_seen_and_end_with_it(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    job_id = coordinator.submit(make_dataset(coordinator.store, [90] * 4000))["job_id"]
    assert coordinator.job(job_id)["eta_s"] is None
    task = worker.wait()
    assert worker.lease(task, ttl_ms=60_000)
    worker.run(task, rows=40)  # the window begins where the first rows are seen
    until(lambda: coordinator.job(job_id)["rows"]["done"] == 40, "the first rows are told")
    assert coordinator.job(job_id)["rates"]["tokens_per_s"] == 0
    worker.run(task, rows=60)

    def moving() -> dict | None:
        job = coordinator.job(job_id)
        return job if job["rates"]["tokens_per_s"] > 0 else None

    job = until(moving, "rates are told")
    assert job["tokens"]["done"] == 9000
    assert job["eta_s"] == pytest.approx((job["tokens"]["total"] - 9000) / job["rates"]["tokens_per_s"])
    assert job["rates"]["rows_per_s"] == pytest.approx(job["rates"]["tokens_per_s"] / 90)
    assert job["rates"]["tokens_per_s"] <= 5400


def test_status_of_an_ended_job_needs_no_redis_and_others_say_that_it_is_away(
    coordinator: Coordinator, worker: FakeWorker, redis_server: RedisServer
) -> None:
    register_engine(worker.redis)
    dataset = make_dataset(coordinator.store, LENGTHS)
    ended = coordinator.submit(dataset)["job_id"]
    worker.drain(lambda: coordinator.job(ended)["state"] == "completed")
    open_id = coordinator.submit(dataset)["job_id"]
    redis_server.kill()
    assert coordinator.job(ended)["rows"]["done"] == 300
    away = until(lambda: (r := coordinator.http.get(f"/v1/jobs/{open_id}")).status_code != 200 and r, "the cached sums are too old")
    assert (away.status_code, away.json()["code"]) == (503, "redis_unavailable")
    ready = coordinator.http.get("/readyz")
    assert (ready.status_code, ready.json()["code"]) == (503, "redis_unavailable")
    assert coordinator.http.get("/healthz").status_code == 200
    paused = coordinator.http.post(f"/v1/jobs/{open_id}/pause")
    assert (paused.status_code, paused.json()["state"]) == (202, "paused")
    redis_server.start()
    until(lambda: worker.redis.get(keys.control(open_id)) == "pause", "the pause reached Redis once it is back")
    assert coordinator.job(open_id)["reason"] == "user"


def test_it_ends_soon_after_sigterm_though_redis_is_away_and_logs_no_secret(tmp_path, redis_server: RedisServer, redis_client) -> None:
    redis_client.config_set("requirepass", "hunter2")
    redis_client.auth("hunter2")
    process = Coordinator(tmp_path, redis_server.url.replace("redis://", "redis://:hunter2@"))
    try:
        process.start()
        assert process.http.get("/readyz").status_code == 200
        redis_server.kill()
        assert process.http.get("/readyz").status_code == 503
        started = time.monotonic()
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert time.monotonic() - started < 8  # its own limit is 3 s; this machine may be slow
        assert "hunter2" not in process.log.read_text()
    finally:
        process.close()


def test_a_wrong_setting_ends_the_start_with_its_name(tmp_path, redis_server: RedisServer) -> None:
    process = Coordinator(tmp_path, redis_server.url, PORT="eighty")
    with pytest.raises(AssertionError, match="STATETAP_PORT"):
        process.start()
    process.close()


def test_the_process_never_loads_torch_or_transformers(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    job_id = coordinator.submit(make_dataset(coordinator.store, LENGTHS))["job_id"]
    worker.drain(lambda: coordinator.job(job_id)["state"] == "completed")
    with open(f"/proc/{coordinator.pid}/maps") as maps:
        assert not [line for line in maps if "/torch/" in line or "/tokenizers/" in line]
