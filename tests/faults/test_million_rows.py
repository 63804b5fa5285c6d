"""Resume of a big job: the first open row is prefilled within a minute of the start, and memory does not grow with the rows that are done."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from statetap.store.complete import load_completion
from tests.faults.forms import FULL, figure, times
from tests.support.big_job import make_big_job
from tests.support.coordinator import until
from tests.support.redis import RedisServer
from tests.support.service import Service

pytestmark = pytest.mark.timeout(times(120, 1_800))

COUNT = times(20_000, 1_000_000)
DONE = COUNT * 9 // 10 + 501  # and a part of a batch


class Memory:
    """The most that the coordinator (RSS) and the worker (parent and horse, pages that they share counted once) took, in bytes."""

    def __init__(self, coordinator: int, worker: int) -> None:
        self.coordinator = self.worker = 0
        self._of = coordinator, worker
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.1):
            coordinator, worker = map(psutil.Process, self._of)
            self.coordinator = max(self.coordinator, coordinator.memory_info().rss)
            total = 0
            for process in [worker, *worker.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            self.worker = max(self.worker, total)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def service(tmp_path: Path, redis_server: RedisServer) -> Iterator[Service]:
    made = Service(tmp_path, redis_server.url)
    try:
        make_big_job(made.rig.store, made.rig.profile, COUNT, DONE)
        yield made
    finally:
        made.__exit__(None, None, None)
        shutil.rmtree(made.rig.store, ignore_errors=True)  # pytest would keep a million files for two runs more


def test_a_big_job_goes_on_within_a_minute_and_in_little_memory(service: Service) -> None:
    """What is done is looked at by ledger, existence and size alone. Seen to fail with a resume that ignores the ledger: rows that are done
    were sent."""
    job = "job-test"
    service.rig.start_engine()
    began = time.monotonic()
    worker = service.rig.start_worker("worker")
    service.api.start()
    memory = Memory(service.api.pid, worker.pid)
    try:
        until(lambda: service.rig.stats()["requests"], "the first prefill", 120)
        seconds = time.monotonic() - began
        used = psutil.Process(service.api.pid).cpu_times()
        busy = (
            f"the coordinator had {used.user + used.system:.0f} s of CPU, at a load of {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
        )
        until(lambda: service.api.job(job)["rows"]["done"] > DONE + times(500, 5_000), "it goes on", 120)
    finally:
        memory.close()
    rows = {int(row): n for row, n in service.rig.stats()["rows"].items()}
    assert min(rows) == DONE and max(rows.values()) == 1
    note = f"{busy}; coordinator {memory.coordinator >> 20} MiB RSS, worker and horse {memory.worker >> 20} MiB PSS at most"
    if FULL:
        figure(
            "resume.million_rows_s",
            round(seconds, 2),
            "s",
            f"from the start of coordinator and worker to the first prefill; {DONE} of {COUNT} rows are done; {note}",
        )
        figure("resume.million_rows_coordinator_mib", memory.coordinator >> 20, "MiB", "RSS, most of the run")
        figure("resume.million_rows_worker_mib", memory.worker >> 20, "MiB", "PSS of worker and horse, most of the run")
    assert seconds < 60, note
    assert max(memory.coordinator, memory.worker) < 500 << 20, note
    if not FULL:
        service.api.until_state(job, "completed", seconds=60)
        completion = load_completion(service.path(job))
        assert completion is not None and (completion.rows, completion.done) == (COUNT, COUNT)
        assert service.rig.stats()["requests"] == COUNT - DONE
