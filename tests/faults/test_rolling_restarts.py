"""Row 11 of reliability.md: workers and coordinator restarted by SIGTERM, one after another, while a job runs."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.faults.forms import FULL, times
from tests.support.jobs import token_rows
from tests.support.redis import RedisServer
from tests.support.storm import Audit, audit, completed, storm_service, wait_tap_empty
from tests.support.workers import Process, eventually

RESTARTS = times(10, 100)
ROWS = times(900, 9_000)
PROGRESS = 40  # rows between two restarts
GRACE_S = 10.0  # STATETAP_DRAIN_S of these workers; compose and the chart give more than that
COORDINATOR_GRACE_S = 5.0


@pytest.mark.timeout(1200 if FULL else 120)
def test_rolling_restarts_repeat_no_row_and_end_in_time(tmp_path: Path, redis_server: RedisServer) -> None:
    """Seen to fail with a horse that SIGTERM ends at once: its window is prefilled twice."""
    with storm_service(tmp_path, redis_server.url, workers=3, window=8) as service:
        service.dataset(token_rows(ROWS, 150))
        service.start(workers=3, delay_ms=250)
        job = service.api.submit("ds-1")["job_id"]
        over = completed(service, job)
        workers = {p.name: p for p in service.rig.processes if p.name.startswith("worker")}
        took: list[float] = []
        while not over():
            name = f"worker-{len(took) % 3}"
            worker = workers[name]
            before = service.rig.stats()["requests"]

            def in_the_middle(worker: Process = worker, before: int = before) -> bool:
                """As an orchestrator does it: the others are at work when the next one goes, and it is at work itself."""
                return over() or (service.rig.stats()["requests"] > before + PROGRESS and worker.horse() is not None)

            eventually(f"{name} is at a batch, and rows were prefilled since the last restart", in_the_middle, 60)
            if over():
                break
            began = time.monotonic()
            assert worker.term(GRACE_S + 5) == 0, worker.log
            took.append(time.monotonic() - began)
            service.rig.processes.remove(worker)
            workers[name] = service.rig.start_worker(name)
            if len(took) % 5 == 0:
                service.api.wait_ready().signal(signal.SIGTERM)
                assert service.api.wait(COORDINATOR_GRACE_S) == 0
                service.api.spawn()
        stats = service.rig.stats()
        print(f"\n{len(took)} restarts of workers, the slowest in {max(took):.1f} s, {len(took) // 5} of the coordinator; {ROWS:,} rows")
        assert {row: n for row, n in stats["rows"].items() if n > 1} == {}
        assert stats["requests"] == service.api.wait_ready().job(job)["rows"]["done"] == ROWS
        assert len(took) >= RESTARTS and max(took) <= GRACE_S
        assert audit(service, job, ROWS) == Audit(lost=0, doubled=0, bad=0, quarantined=0, temps=0)
        wait_tap_empty(service)
