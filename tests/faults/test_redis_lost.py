"""Rows 5 and 6 of reliability.md: Redis killed again and again under load, wiped, and lost with its disk. The store is the truth."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import httpx
import pytest

from statetap.store.ledger import read_segment
from tests.faults.forms import FULL, SEED, figure, times
from tests.support.jobs import token_rows
from tests.support.redis import RedisServer
from tests.support.service import Service
from tests.support.storm import Audit, audit, completed, storm_service, wait_tap_empty
from tests.support.workers import eventually

CLEAN = Audit(lost=0, doubled=0, bad=0, quarantined=0, temps=0)
KILLS = times(5, 50)
WIPES = times(2, 10)
SMALL, BIG = 60, times(600, 6_000)


class Submitter(threading.Thread):
    """Submits small jobs one after another, a few at a time. ``acknowledged``: those that were answered by 202."""

    def __init__(self, service: Service) -> None:
        super().__init__(name="submitter")
        self._url = str(service.api.http.base_url)
        self._service = service
        self._closing = threading.Event()
        self.acknowledged: list[str] = []
        self.refused: list[str] = []

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._closing.wait(0.02):  # between two looks
                if sum(not completed(self._service, job)() for job in self.acknowledged[-8:]) > 3:
                    continue
                try:
                    reply = client.post("/v1/jobs", json={"dataset_id": "ds-1", "reuse": False})
                except httpx.TransportError as e:  # not answered: not acknowledged
                    self.refused.append(type(e).__name__)
                    continue
                if reply.status_code == 202:
                    self.acknowledged.append(reply.json()["job_id"])
                else:
                    assert reply.status_code == 503, reply.text
                    self.refused.append(reply.json()["code"])

    def close(self) -> None:
        self._closing.set()
        self.join()


@pytest.mark.timeout(900 if FULL else 180)
@pytest.mark.parametrize("victim", ["redis", "coordinator"])
def test_no_acknowledged_submission_is_lost_with_what_is_killed(tmp_path: Path, redis_server: RedisServer, victim: str) -> None:
    """Seen to fail with a job that is written after the answer (killing the coordinator) and a reconciler that ends at an error of Redis."""
    with storm_service(tmp_path, redis_server.url, workers=2, window=4) as service:
        service.dataset(token_rows(SMALL, 8))
        service.start(workers=2, delay_ms=20)
        submitter = Submitter(service)
        submitter.start()
        try:
            for n in range(KILLS):
                jobs, rows = len(submitter.acknowledged), service.rig.stats()["requests"]
                # At once after a 202, while the next one is being answered.
                eventually("rows are prefilled", lambda k=rows: service.rig.stats()["requests"] > k + 10, 60)
                eventually("a job is acknowledged", lambda k=jobs: len(submitter.acknowledged) > k or not submitter.is_alive(), 60)
                if victim == "redis":
                    noticed = service.api.log.read_text().count("Redis is away")
                    redis_server.kill()
                    if n % 5 == 0:  # else it is back before anybody looks
                        eventually("the reconciler notices", lambda k=noticed: service.api.log.read_text().count("Redis is away") > k)
                    redis_server.start()
                else:
                    service.api.kill()
                    service.api.start()
        finally:
            submitter.close()
        for job in submitter.acknowledged:
            service.api.until_state(job, "completed", seconds=60)
        note = f"{KILLS} kills, {len(submitter.acknowledged)} jobs acknowledged, {len(submitter.refused)} refused: {sorted(set(submitter.refused))}"
        print(f"\n{note}")
        assert [job for job in submitter.acknowledged if audit(service, job, SMALL) != CLEAN] == []
        assert len(submitter.acknowledged) >= KILLS
        if victim == "redis":
            figure("faults.redis_kills", KILLS, "kills", f"SIGKILL under load, restart from the AOF; {note}; 0 acknowledged lost")
        wait_tap_empty(service)


@pytest.mark.parametrize("disk", ["kept", "lost"])
@pytest.mark.timeout(600 if FULL else 120)
def test_a_job_whose_redis_is_wiped_is_rebuilt_from_the_store_and_no_row_is_redone(
    tmp_path: Path, redis_server: RedisServer, disk: str
) -> None:
    """Seen to fail with a resume that does not believe the ledger (FLUSHALL)."""
    with storm_service(tmp_path, redis_server.url, workers=2, window=4) as service:
        service.dataset(token_rows(BIG, 120, seed=SEED))
        service.start(workers=2, delay_ms=50)
        job = service.api.submit("ds-1")["job_id"]
        over = completed(service, job)
        wipes = 0
        while wipes < WIPES:
            before = service.rig.stats()["requests"]
            eventually("rows are prefilled", lambda n=before: over() or service.rig.stats()["requests"] > n + 100, 60)
            assert not over(), f"completed after {wipes} wipes"
            wipe(redis_server, disk)
            wipes += 1
        done = service.api.until_state(job, "completed", seconds=300)
        stats = service.rig.stats()
        assert {row: n for row, n in stats["rows"].items() if n > 1} == {}
        assert stats["requests"] == done["rows"]["done"] == BIG
        assert audit(service, job, BIG) == CLEAN
        wait_tap_empty(service)


def wipe(redis_server: RedisServer, disk: str) -> None:
    if disk == "kept":
        with redis_server.client() as client:
            client.flushall()
        return
    redis_server.kill()
    shutil.rmtree(redis_server.folder)
    redis_server.start()


@pytest.mark.timeout(180)
def test_a_host_that_lost_everything_but_its_store_goes_on_from_there(tmp_path: Path, redis_server: RedisServer) -> None:
    """All processes are killed and Redis comes back empty: only what was in flight is prefilled twice. Seen to fail
    with a resume that does not believe the ledger."""
    with storm_service(tmp_path, redis_server.url, workers=2, window=4) as service:
        service.dataset(token_rows(600, 240))
        service.start(workers=2, delay_ms=50)
        job = service.api.submit("ds-1")["job_id"]
        eventually("rows are prefilled", lambda: service.rig.stats()["requests"] > 200, 60)
        service.api.kill()
        for name in ("worker-0", "worker-1"):
            worker = next(p for p in service.rig.processes if p.name == name)
            worker.kill()
            service.rig.processes.remove(worker)
        wipe(redis_server, "lost")
        ledger = service.path(job) / "ledger"
        finished = {str(r.row) for p in ledger.iterdir() for r in read_segment(p)}
        before = service.rig.stats()["rows"]
        for name in ("worker-0", "worker-1"):
            service.rig.start_worker(name)
        service.api.start().until_state(job, "completed", seconds=90)
        after = service.rig.stats()["rows"]
        assert len(finished) > 50 and {row for row in finished if after[row] != before[row]} == set()
        assert sum(n > 1 for n in after.values()) <= 2 * (4 + 128)
        assert audit(service, job, 600) == CLEAN
        wait_tap_empty(service)
