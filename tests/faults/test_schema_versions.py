"""Row 14: a worker of another schema version beside a coordinator never sees its work, is not taken for one that could, and drops nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from statetap.contracts import keys
from statetap.contracts.errors import ErrorCode, StoreError
from statetap.store.complete import finish_job
from statetap.store.export.registry import FORMATS
from statetap.store.export.run import export_job
from statetap.store.reader import JobDataset
from statetap.store.verify import verify_job
from tests.support.coordinator import until
from tests.support.jobs import token_rows
from tests.support.redis import RedisServer
from tests.support.service import Service
from tests.support.stack import cli
from tests.support.workers import eventually


@pytest.fixture
def service(tmp_path: Path, redis_server: RedisServer) -> Iterator[Service]:
    with Service(tmp_path, redis_server.url) as made:
        yield made


def test_a_worker_of_another_schema_version_never_sees_the_work_and_nothing_is_dropped(service: Service) -> None:
    """Seen to fail with a queue's name without the version (the other worker did the batches), and with an engine's record without it
    (the job said that it was queued, and waited for ever for a worker that never came)."""
    service.start()
    first = service.api.submit(service.dataset(token_rows(50, 12)))["job_id"]
    service.api.until_state(first, "completed", seconds=30)
    right = service.rig.processes[-1]
    assert right.term(15) == 0
    other = service.rig.start_worker("other", module="tests.faults.other_schema_worker")
    eventually("the other worker is up", lambda: "event=worker_started" in other.log)
    eventually(
        "it waits at a queue of its own", lambda: "rq:workers:statetap:v99:" in " ".join(service.rig.redis.scan_iter("rq:workers:*"))
    )
    job = service.api.submit(
        service.dataset(token_rows(200, 12, seed=9), "ds-2"), wait_for_engine=True, profile_id=service.rig.profile.profile_id
    )["job_id"]
    paused = service.api.until_state(job, "paused", reason="no_engine", seconds=30)
    assert "start one with" in paused["message"]
    assert service.api.http.get("/v1/engines").json()["items"] == []
    assert "event=batch_started" not in other.log and service.rig.stats()["requests"] == 50

    service.rig.start_worker("right")
    until(lambda: len(service.worker_ids()) == 1, "a worker of this version has registered", 30)
    ended = service.api.until_state(job, "completed", seconds=40)
    assert ended["rows"]["done"] == 200 and verify_job(service.path(job)).ok
    assert service.rig.stats()["requests"] == 250 and "event=batch_started" not in other.log
    assert other.popen.poll() is None
    assert not service.rig.redis.hgetall(keys.outstanding(service.rig.profile.profile_id))


def test_a_job_of_a_later_schema_version_is_refused_by_name_and_holds_up_no_other(service: Service, tmp_path: Path) -> None:
    """Seen to fail with a job.json whose version nobody reads, with a list that ends at the job, and with a dataset that is deleted under it."""
    service.start()
    service.dataset(token_rows(20, 12))
    later = service.api.submit("ds-1")["job_id"]
    service.api.until_state(later, "completed", seconds=30)
    path = service.path(later)
    assert len(JobDataset(path)) == 20
    _raise_version(path)
    assert service.rig.processes[-1].term(15) == 0
    running = service.api.submit("ds-1", wait_for_engine=True, profile_id=service.rig.profile.profile_id)["job_id"]
    service.api.kill()
    _raise_version(service.path(running))
    service.api.start()
    assert service.api.http.get("/v1/jobs").json()["items"] == []
    service.rig.start_worker("again")
    until(lambda: len(service.worker_ids()) == 1, "a worker has registered", 30)

    refused = service.api.http.get(f"/v1/jobs/{later}")
    assert refused.json()["code"] == "protocol_mismatch" and "schema version 2" in refused.json()["detail"]
    assert "Use the Statetap that made the job" in refused.json()["next_step"]
    assert service.api.http.delete(f"/v1/jobs/{later}").json()["code"] == "protocol_mismatch" and path.exists()
    other = service.api.submit("ds-1")["job_id"]
    assert service.api.until_state(other, "completed", seconds=30)["rows"]["reused"] == 0
    assert [j["job_id"] for j in service.api.http.get("/v1/jobs").json()["items"]] == [other]
    assert service.api.http.post("/v1/gc", json={"dry_run": False}).status_code == 200
    assert service.api.http.delete(f"/v1/jobs/{other}").status_code == 200
    kept = service.api.http.delete("/v1/datasets/ds-1", params={"force": True})
    assert kept.json()["code"] == "conflict" and running in kept.json()["detail"]
    log = service.api.log.read_text().partition("schema version 2")
    assert log[1] and log[2].count(f"{running}: ") <= 2, "it is not said at each look"

    for read in (
        lambda: JobDataset(path),
        lambda: verify_job(path),
        lambda: export_job(path, tmp_path / "out", FORMATS["speculators"]),
        lambda: finish_job(path, service.rig.store / "datasets" / "ds-1" / "rows.arrow") if not (path / "COMPLETE").unlink() else None,
    ):
        with pytest.raises(StoreError, match="schema version 2") as e:
            read()
        assert e.value.code is ErrorCode.PROTOCOL_MISMATCH
    told = cli("verify", path)
    assert told.returncode == 1 and "protocol_mismatch" in told.stderr and "Use the Statetap that made the job" in told.stderr


def _raise_version(job_dir: Path) -> None:
    data = json.loads((job_dir / "job.json").read_text())
    (job_dir / "job.json").write_text(json.dumps(data | {"schema_version": 2}))
