"""Row 14: a worker of another schema version beside a coordinator never sees its work, is not taken for one that could, and drops nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from statetap.contracts import keys
from statetap.store.verify import verify_job
from tests.support.coordinator import until
from tests.support.jobs import token_rows
from tests.support.redis import RedisServer
from tests.support.service import Service
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
