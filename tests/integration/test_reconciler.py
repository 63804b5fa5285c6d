"""The reconciler against a real redis-server and a real store: losses, wipes, restarts, pauses, fairness."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from statetap.contracts import keys
from statetap.store.ledger import fold, segments_by_batch
from tests.support.coordinator import PROFILE, Coordinator, FakeWorker, make_dataset, register_engine, until
from tests.support.redis import RedisServer

BIG = [90] * 4000  # 22 batches of 182 rows


def counted(store: Path, job_id: str) -> Counter[int]:
    """Ledger lines of each row: more than one is work done twice."""
    found: Counter[int] = Counter()
    for paths in segments_by_batch(store / "jobs" / job_id).values():
        for path in paths:
            found.update(fold([path]).keys())
    return found


def test_two_batches_a_worker_are_out_and_never_one_twice(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis, worker="w1")
    register_engine(worker.redis, worker="w2")
    job_id = coordinator.submit(make_dataset(coordinator.store, BIG))["job_id"]
    tasks = [worker.wait() for _ in range(4)]
    assert [t["batch"] for t in tasks] == [0, 1, 2, 3]
    worker.do(tasks[0])
    nxt = worker.wait()
    assert (nxt["batch"], nxt["attempt"]) == (4, 1)
    assert coordinator.job(job_id)["batches"]["outstanding"] <= 5
    assert worker.redis.hlen(keys.outstanding(PROFILE.profile_id)) in (4, 5)


def test_a_lapsed_lease_is_requeued_at_once_before_all_others_and_names_suspects(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    job_id = coordinator.submit(make_dataset(coordinator.store, BIG))["job_id"]
    task = worker.wait()
    assert worker.lease(task)
    worker.redis.sadd(keys.inflight(job_id, 0), 3, 5, 8)
    worker.redis.delete(keys.lease(job_id, 0))  # as its TTL does after a kill
    until(lambda: worker.queued_first(task, 2), "it is given out again, before all others")
    again = worker.wait()
    assert again == {"job_id": job_id, "batch": 0, "attempt": 2}
    assert worker.redis.smembers(keys.suspects(job_id, 0)) == {"3", "5", "8"}
    assert not worker.redis.exists(keys.inflight(job_id, 0))
    assert not worker.redis.exists(keys.losses(job_id)), "neighbours are not charged"
    for loss in (1, 2, 3):
        assert worker.lease(again)
        worker.redis.sadd(keys.inflight(job_id, 0), 5)
        worker.redis.delete(keys.lease(job_id, 0))
        until(lambda n=loss: worker.queued_first(task, 2 + n), "it is given out again, before all others")
        again = worker.wait()
        assert (again["batch"], again["attempt"]) == (0, 2 + loss)
        assert worker.redis.hgetall(keys.losses(job_id)) == {"5": str(loss)}
    assert not worker.lease({**again, "attempt": 2}), "an attempt that was given up cannot start"


def test_a_batch_that_left_the_queue_and_never_started_is_given_out_again(tmp_path, redis_server, redis_client) -> None:
    process = Coordinator(tmp_path, redis_server.url, REQUEUE_AFTER_S="0.5").start()
    worker = FakeWorker(redis_client, process.store)
    try:
        register_engine(redis_client)
        job_id = process.submit(make_dataset(process.store, BIG))["job_id"]
        task = worker.wait()  # dequeued, then nothing: killed between dequeue and start
        other = worker.wait()
        assert other["batch"] == 1
        worker.do(other)
        again = until(lambda: next((t for t in iter(worker.take, None) if t["batch"] == 0), None), "batch 0 is in the queue again")
        assert again == task | {"attempt": 2}
        assert process.job(job_id)["state"] == "running"
    finally:
        worker.close()
        process.close()


def test_a_wiped_redis_is_filled_from_the_store_and_no_row_is_done_twice(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    job_id = coordinator.submit(make_dataset(coordinator.store, BIG))["job_id"]
    for _ in range(5):
        worker.do(worker.wait())
    task = worker.wait()
    assert worker.lease(task)
    worker.run(task, rows=50)
    before = coordinator.job(job_id)["rows"]["done"]
    worker.redis.flushall()
    register_engine(worker.redis)
    until(lambda: worker.redis.exists(keys.known(job_id)), "the job is known again")
    # A horse that lives takes its lease again within LEASE_REFRESH_S, and is not cut off by a second one.
    worker.redis.set(keys.lease(job_id, task["batch"]), "the one from before", px=6000)
    later = worker.wait()
    # Not "the next one": a look that the wipe cut in two had given that out before it, and the one after it when all was gone.
    assert later["batch"] not in range(task["batch"] + 1)
    worker.do(later)
    after = coordinator.job(job_id)
    assert after["rows"]["done"] >= before
    assert worker.redis.hlen(keys.totals(job_id)) in (6, 7)
    worker.drain(lambda: coordinator.job(job_id)["state"] == "completed")
    found = counted(coordinator.store, job_id)
    assert len(found) == 4000 and set(found.values()) == {1}


def test_a_killed_coordinator_goes_on_where_it_was(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    job_id = coordinator.submit(make_dataset(coordinator.store, BIG))["job_id"]
    for _ in range(3):
        worker.do(worker.wait())
        coordinator.signal(signal.SIGKILL)
        coordinator.wait()
        while (task := worker.take()) is not None:  # a worker does not need it to go on
            worker.do(task)
        coordinator.start()
    worker.drain(lambda: coordinator.job(job_id)["state"] == "completed")
    found = counted(coordinator.store, job_id)
    assert len(found) == 4000 and set(found.values()) == {1}


def test_redis_killed_and_back_from_its_aof_loses_nothing(coordinator: Coordinator, worker: FakeWorker, redis_server: RedisServer) -> None:
    register_engine(worker.redis)
    job_id = coordinator.submit(make_dataset(coordinator.store, BIG))["job_id"]
    for _ in range(3):
        worker.do(worker.wait())
        redis_server.kill()
        redis_server.start()
    register_engine(worker.redis)
    worker.drain(lambda: coordinator.job(job_id)["state"] == "completed")
    assert len(counted(coordinator.store, job_id)) == 4000


def test_two_coordinators_on_one_store_give_each_attempt_out_once(
    coordinator: Coordinator, worker: FakeWorker, redis_server: RedisServer, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    second = Coordinator(tmp_path / "second", redis_server.url, STORE=str(coordinator.store)).start()
    try:
        for i in range(2):
            register_engine(worker.redis, worker=f"w{i}")
        dataset = make_dataset(coordinator.store, BIG)
        ids = [coordinator.submit(dataset)["job_id"] for _ in range(3)]
        seen: Counter[tuple[str, int, int]] = Counter()

        def ended() -> bool:
            return all(coordinator.job(i)["state"] == second.job(i)["state"] == "completed" for i in ids)

        deadline = time.monotonic() + 30
        while not ended():
            while (task := worker.take()) is not None:
                seen[task["job_id"], task["batch"], task["attempt"]] += 1
                worker.do(task)
            assert time.monotonic() < deadline
        assert set(seen.values()) == {1}
        for job_id in ids:
            assert set(counted(coordinator.store, job_id).values()) == {1}
    finally:
        second.close()


def test_a_job_without_an_engine_waits_and_says_so_and_goes_on_by_itself(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis, ttl_s=1)
    dataset = make_dataset(coordinator.store, [50] * 100)
    job_id = coordinator.submit(dataset)["job_id"]
    paused = coordinator.until_state(job_id, "paused", reason="no_engine")
    assert "statetap up --model tiny --boundaries 1,2,3 --final pre" in paused["message"]
    register_engine(worker.redis, healthy=False)
    coordinator.until_state(job_id, "paused", reason="engine_down")
    later = coordinator.submit(dataset, profile_id=PROFILE.profile_id)
    assert later["profile_id"] == PROFILE.profile_id
    register_engine(worker.redis)
    coordinator.until_state(job_id, "queued", "running")
    worker.drain(lambda: all(coordinator.job(i)["state"] == "completed" for i in (job_id, later["job_id"])))


def test_a_profile_that_only_an_earlier_job_had_is_accepted_when_asked_to_wait(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    dataset = make_dataset(coordinator.store, [50] * 100)
    coordinator.submit(dataset)
    worker.redis.delete(keys.engine(PROFILE.profile_id, "w1"))
    body = {"dataset_id": dataset, "profile_id": PROFILE.profile_id}
    refused = coordinator.http.post("/v1/jobs", json=body)
    assert (refused.status_code, refused.json()["code"]) == (409, "engine_mismatch")
    assert "--boundaries 1,2,3" in refused.json()["start_command"]
    job_id = coordinator.submit(**body, wait_for_engine=True)["job_id"]
    coordinator.until_state(job_id, "paused", reason="no_engine")


def test_a_horse_s_pause_holds_the_job_until_it_expires(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    job_id = coordinator.submit(make_dataset(coordinator.store, BIG))["job_id"]
    task = worker.wait()
    assert worker.lease(task)
    worker.redis.set(keys.pause(job_id), json.dumps({"reason": "low_disk", "message": "ENOSPC"}), px=1500)
    worker.hand_back(task)
    paused = coordinator.until_state(job_id, "paused", reason="low_disk")
    assert paused["message"] == "ENOSPC"
    coordinator.until_state(job_id, "queued", "running")
    worker.drain(lambda: coordinator.job(job_id)["state"] == "completed")


def test_a_full_store_pauses_horses_too(tmp_path, redis_server, redis_client) -> None:
    process = Coordinator(tmp_path, redis_server.url, MIN_FREE_BYTES=str(1 << 60)).start()
    try:
        register_engine(redis_client)
        dataset = make_dataset(process.store, [50] * 100)
        assert process.http.post("/v1/jobs", json={"dataset_id": dataset}).status_code == 507
        job_id = process.submit(dataset, force=True)["job_id"]
        process.until_state(job_id, "paused", reason="low_disk")
        until(lambda: redis_client.get(keys.control(job_id)) == "pause", "horses are told to drain")
    finally:
        process.close()


def test_attempts_that_bring_nothing_are_slowed_down_and_open_the_circuit(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    job_id = coordinator.submit(make_dataset(coordinator.store, BIG))["job_id"]
    attempts = 0
    deadline = time.monotonic() + 20
    while coordinator.job(job_id)["reason"] != "circuit_open":
        while (task := worker.take()) is not None:
            assert worker.lease(task)
            worker.hand_back(task)
            attempts += 1
        assert time.monotonic() < deadline
    assert 5 <= attempts <= 12
    assert "attempts in a row ended without a row" in coordinator.job(job_id)["message"]


def test_rows_that_turn_out_to_be_missing_at_the_end_are_run_again(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    job_id = coordinator.submit(make_dataset(coordinator.store, [50] * 100))["job_id"]
    task = worker.wait()
    assert worker.lease(task)
    worker.run(task, rows=10, publish=False)
    # Totals that claim more than the ledger has: no worker of ours writes such, and COMPLETE must not believe them.
    lie = {"batch": 0, "done": 100, "tokens": 5000, "bytes": 1}
    worker.redis.hset(keys.totals(job_id), "0", json.dumps(lie))
    worker.hand_back(task)
    worker.drain(lambda: coordinator.job(job_id)["state"] == "completed")
    assert len(counted(coordinator.store, job_id)) == 100


def test_a_job_whose_dataset_changed_fails_with_the_reason(tmp_path, redis_server, redis_client) -> None:
    process = Coordinator(tmp_path, redis_server.url).start()
    try:
        register_engine(redis_client)
        job_id = process.submit(make_dataset(process.store, BIG))["job_id"]
        process.signal(signal.SIGKILL)
        process.wait()
        report = process.store / "datasets" / "ds-0000000000000001" / "report.json"
        report.write_text(json.dumps(json.loads(report.read_text()) | {"content_hash": "f" * 32}))
        process.start()
        process.until_state(job_id, "failed", reason="plan_mismatch")
    finally:
        process.close()


def test_priority_goes_first_and_equals_take_turns(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis, worker="w1")
    register_engine(worker.redis, worker="w2")
    dataset = make_dataset(coordinator.store, BIG)
    for _ in range(2):
        coordinator.submit(dataset)
    first = [worker.wait() for _ in range(4)]
    high = coordinator.submit(dataset, priority=5)["job_id"]
    for task in first:
        worker.do(task)
    # Each job keeps one batch in the queue; those of the higher priority stand before them.
    until(lambda: [owner == high for owner in worker.queued()][:2] == [True] * 2, "the queue begins with the new job")
    after = [worker.wait() for _ in range(2)]
    assert coordinator.http.post(f"/v1/jobs/{high}/pause").status_code == 202
    coordinator.until_state(high, "paused")
    for task in after:
        worker.hand_back(task)
    taken = Counter[str]()
    while sum(taken.values()) < 20:  # of the paused job, those that were in the queue are taken as well: how many is the machine's speed
        task = worker.wait()
        worker.do(task)
        if task["job_id"] != high:
            taken[task["job_id"]] += 1
    assert len(taken) == 2 and min(taken.values()) >= 7


@pytest.mark.parametrize("other", [replace(PROFILE, model="other"), replace(PROFILE, max_length=99)])
def test_a_worker_of_another_profile_never_sees_the_work(coordinator: Coordinator, worker: FakeWorker, other) -> None:
    register_engine(worker.redis)
    register_engine(worker.redis, other, worker="w2")
    coordinator.submit(make_dataset(coordinator.store, BIG), profile_id=PROFILE.profile_id)
    assert worker.wait()["batch"] == 0
    assert worker.redis.llen(f"rq:queue:{keys.queue(other.profile_id)}") == 0


def test_ended_jobs_cost_a_tick_next_to_nothing(coordinator: Coordinator, worker: FakeWorker, redis_client: redis.Redis) -> None:
    register_engine(worker.redis)
    dataset = make_dataset(coordinator.store, [10] * 64)
    jobs = coordinator.store / "jobs"
    job_id = coordinator.submit(dataset)["job_id"]
    worker.drain(lambda: coordinator.job(job_id)["state"] == "completed")
    spec = json.loads((jobs / job_id / "job.json").read_text())
    for i in range(1000):
        folder = jobs / f"job-{i:016x}"
        folder.mkdir()
        for name in ("plan.parquet", "control.json"):
            (folder / name).write_bytes((jobs / job_id / name).read_bytes())
        (folder / "job.json").write_text(json.dumps(spec | {"job_id": folder.name}))
    until(lambda: coordinator.http.get("/v1/jobs", params={"limit": 1}).json()["next_cursor"], "they are listed")
    before = redis_client.info("stats")["total_commands_processed"]
    ticks = 0

    def cpu() -> float:
        fields = Path(f"/proc/{coordinator.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    began, used = time.monotonic(), cpu()
    until(lambda: time.monotonic() - began > 2, "ten ticks")
    ticks = int((time.monotonic() - began) / 0.2)
    assert (cpu() - used) / (time.monotonic() - began) < 0.5  # of a core, while it looks five times a second
    assert redis_client.info("stats")["total_commands_processed"] - before < 10 * ticks
