"""Failed rows are opened again and nothing else is; a cause that fails row after row stops the job before it has failed them all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from statetap.contracts import keys
from statetap.contracts.records import Retry
from statetap.store.complete import load_completion
from statetap.store.ledger import JobLedger
from statetap.store.retries import add_retry
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


def marked(count: int, bad: dict[int, int]) -> list[list[int]]:
    rows = token_rows(count, 12, vocab=30_000)
    for row, token in bad.items():
        rows[row][5] = token
    return rows


def test_retry_runs_the_failed_rows_alone_and_the_job_is_whole_again(service: Service) -> None:
    """Seen to fail with retries that opened rows whatever their generation (a row that failed again was open for ever)."""
    # Three tries a row: the first attempt fails, the retry meets an engine that is well.
    service.start("nan@token=31000:3", "zeros@token=31001:3", "400@token=31002")
    dataset = service.dataset(marked(60, {7: 31000, 20: 31001, 33: 31002}))
    job = service.api.submit(dataset)["job_id"]
    done = service.api.until_state(job, *ENDED, seconds=30)
    assert done["errors"] == {"nonfinite_states": 1, "zero_states": 1, "engine_rejected": 1}
    refused = service.api.http.post(f"/v1/jobs/{job}/retry", json={"codes": ["poisoned"]})
    assert refused.status_code == 409 and "nonfinite_states" in refused.json()["detail"]

    again = service.post(f"/v1/jobs/{job}/retry", codes=["nonfinite_states"])
    assert again["rows"]["open"] == 1 or again["state"] in ENDED
    one = service.api.until_state(job, *ENDED, seconds=30)
    assert one["errors"] == {"zero_states": 1, "engine_rejected": 1} and one["rows"]["done"] == 58
    both = service.api.http.post(f"/v1/jobs/{job}/retry")
    assert both.status_code == 202
    last = service.api.until_state(job, *ENDED, seconds=30)
    assert last["errors"] == {"engine_rejected": 1} and last["rows"]["done"] == 59

    stats = service.rig.stats()["rows"]
    assert {stats["7"], stats["20"]} == {4} and stats["33"] == 2 and {n for r, n in stats.items() if r not in ("7", "20", "33")} == {1}
    path = service.path(job)
    assert (path / "rows_0-2000" / "data_7.g1.safetensors").exists() and (path / "rows_0-2000" / "data_20.g2.safetensors").exists()
    report = verify_job(path)
    assert report.ok and report.files == 59 and report.extra == 0
    completion = load_completion(path)
    assert completion is not None and (completion.done, completion.failed, completion.retries) == (59, 1, 2)
    errors = service.api.http.get(f"/v1/jobs/{job}/errors").json()["items"]
    assert [(e["row"], e["generation"]) for e in errors] == [(33, 2)]


def test_a_retry_that_crashed_half_way_is_made_good_by_asking_again(service: Service) -> None:
    """Seen to fail with a COMPLETE that counted though rows were opened since."""
    service.start("nan@token=31000:3")
    job = service.api.submit(service.dataset(marked(40, {7: 31000})))["job_id"]
    service.api.until_state(job, "completed_with_errors", seconds=30)
    # As a coordinator killed right after the retry's file: the job still says that it ended, and COMPLETE lies there.
    assert add_retry(service.path(job), Retry(generation=1))
    assert load_completion(service.path(job)) is None and not verify_job(service.path(job)).ok
    service.post(f"/v1/jobs/{job}/retry")
    assert service.api.until_state(job, *ENDED, seconds=30)["state"] == "completed"
    assert [r.generation for r in JobLedger(service.path(job)).retries] == [1]
    assert service.api.http.post(f"/v1/jobs/{job}/retry").status_code == 409


def test_rows_that_are_retried_while_the_job_runs_are_run_before_it_ends(service: Service) -> None:
    """Seen to fail with an end of the job that did not give incomplete batches out again."""
    service.start("400@token=31000:1", delay_ms=15, STATETAP_WINDOW=2)
    job = service.api.submit(service.dataset(marked(600, {3: 31000})))["job_id"]
    until(lambda: service.api.job(job)["rows"]["failed"], "the row has failed", 30)
    service.post(f"/v1/jobs/{job}/retry")
    ended = service.api.until_state(job, *ENDED, seconds=60)
    assert (ended["state"], ended["rows"]["done"]) == ("completed", 600)
    counts = service.rig.stats()["rows"]
    assert counts.pop("3") == 2 and set(counts.values()) == {1}
    assert verify_job(service.path(job)).ok


def test_rows_that_fail_one_after_another_with_one_cause_pause_the_job(service: Service) -> None:
    """Seen to fail with a circuit whose pause was not kept in control.json."""
    # Every prompt of a healthy engine is refused; then, after a person has looked, it is well again.
    service.start("nocapture@all", workers=2, STATETAP_CIRCUIT_FAILURES=10, STATETAP_WINDOW=4)
    job = service.api.submit(service.dataset(token_rows(3000, 40)))["job_id"]
    paused = service.api.until_state(job, "paused", reason="circuit_open", seconds=30)
    assert "10 rows in a row failed with protocol_mismatch" in paused["message"] and "retry" in paused["message"]
    until(lambda: not service.rig.redis.hgetall(keys.outstanding(service.rig.profile.profile_id)), "the workers have drained")
    stopped = service.api.job(job)
    assert stopped["rows"]["failed"] <= 2 * 10 and stopped["rows"]["done"] == 0
    assert (stopped["state"], stopped["reason"], stopped["control"]) == ("paused", "circuit_open", "pause")
    sent = service.rig.stats()["requests"]
    # It stays so, whatever restarts: control.json has it, not a key that expires.
    service.api.close()
    service.rig.redis.delete(keys.pause(job))
    service.api.start()
    until(lambda: service.rig.redis.get(keys.control(job)) == "pause", "horses are told")
    assert service.rig.stats()["requests"] == sent
    port = service.rig.engine_port
    service.rig.processes[0].kill()
    service.rig.start_engine(port=port)
    service.post(f"/v1/jobs/{job}/retry")
    ended = service.api.until_state(job, *ENDED, seconds=90)
    assert (ended["state"], ended["rows"]["done"]) == ("completed", 3000)


def test_a_streak_is_remembered_from_one_batch_to_the_next(service: Service) -> None:
    """Seen to fail with a circuit that began anew with each batch."""
    service.start("400@all", STATETAP_CIRCUIT_FAILURES=12)
    rows = token_rows(40, 16)
    job = service.api.submit(service.dataset([r * 256 for r in rows]))["job_id"]  # 4,096 tokens a row: four rows a batch
    paused = service.api.until_state(job, "paused", reason="circuit_open", seconds=30)
    assert paused["rows"]["failed"] < 20
    assert json.loads(service.rig.redis.get(keys.streak(job)))["code"] == "engine_rejected"
    service.post(f"/v1/jobs/{job}/resume")
    assert service.api.until_state(job, "paused", reason="circuit_open", seconds=30)["rows"]["failed"] > paused["rows"]["failed"]
