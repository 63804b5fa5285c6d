"""Row 3: ENOSPC, EIO and short writes at the Nth file operation, n = 1.. until a run meets none: nothing is called done that is not, the
job says why it stands, and goes on when the fault is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from statetap.contracts import keys
from statetap.store.delete import clean_job
from statetap.store.verify import verify_job
from tests.faults.forms import FULL, SEED, figure, times
from tests.faults.shim import Fault, Shim, step_of
from tests.support.coordinator import until
from tests.support.finished import FinishedJob
from tests.support.jobs import token_rows
from tests.support.redis import RedisServer
from tests.support.service import Service
from tests.support.workers import Job, Rig, eventually

pytestmark = pytest.mark.timeout(times(120, 1_800))

ROWS = 3
REASONS = {Fault.NO_SPACE: "low_disk", Fault.IO: "circuit_open"}
CODES = {Fault.NO_SPACE: "store_full", Fault.IO: "store_io"}


@pytest.fixture
def rig(tmp_path: Path, redis_server: RedisServer) -> Iterator[Rig]:
    with Rig(tmp_path / "rig", redis_server.url) as made:
        yield made


def check_what_is_called_done(job: Job) -> None:
    """Redis says no more than the ledger, and the ledger no more than the files."""
    records = job.ledger()
    assert {r.state for r in records.values()} <= {"done"}
    for record in records.values():
        data = (job.dir / record.path).read_bytes()
        assert (len(data), xxhash.xxh3_64_hexdigest(data)) == (record.bytes, record.xxh3)
    assert sum(t.done for t in job.totals().values()) <= len(records)


@pytest.mark.parametrize("fault", [Fault.NO_SPACE, Fault.IO, Fault.SHORT])
def test_a_fault_at_the_nth_file_operation_costs_no_row_and_calls_none_done(rig: Rig, tmp_path: Path, fault: Fault) -> None:
    """Seen to fail with a ledger that took an fdatasync that fails for one that works (full form), with a ``write_all`` that wrote once
    (short), with a worker that told a full disk as ``circuit_open``, and with one that paused for no error before its batch was open."""
    shim = Shim(tmp_path, rig.store)
    rig.start_engine()
    worker = rig.start_worker(**shim.env)
    eventually("the worker is up: it has probed the store", lambda: "event=worker_started" in worker.log)
    wanted = {"write temp", "write ledger"} if FULL else set()
    if FULL and fault is not Fault.SHORT:
        wanted |= {"open temp", "fsync temp", "link file", "fsync folder", "open ledger", "fdatasync ledger"}
    steps: set[str] = set()
    runs = paused = nth = 0
    stride, sweeps = times(6, 1), 3  # threads make the order of the operations: a sweep can miss a kind of which there are few
    while True:
        nth = nth + stride if nth else 1 + SEED % stride
        job = rig.make_job(token_rows(ROWS, 8), job_id=f"job-{sweeps}-{nth}")
        shim.arm(fault, nth)
        job.give()
        eventually("the batch is handed back", lambda job=job: not job.outstanding())
        hit = shim.disarm()
        if not hit:
            assert job.done()
            nth, sweeps = 0, sweeps - 1
            if wanted <= steps or not sweeps:
                break
            continue
        runs += 1
        steps.add(step_of(hit))
        check_what_is_called_done(job)
        pause = job.pause()
        if not job.done():
            assert pause is not None and (pause["reason"], pause["message"].partition(":")[0]) == (REASONS[fault], CODES[fault]), hit
            paused += 1
            rig.redis.delete(keys.pause(job.id))
            job.give()
            job.wait_done()
        if hit.startswith("unlink"):
            clean_job(job.dir)  # a temp that could not be removed, of a batch that has no next attempt, is gc's
        assert job.finish().done == ROWS, hit
        assert verify_job(job.dir, job.rows_path).ok
    assert worker.popen.poll() is None
    assert fault is Fault.SHORT or paused > 2
    assert wanted <= steps, wanted - steps
    if FULL:
        figure(
            f"faults.{fault.name.lower()}_points",
            runs,
            "runs",
            f"a fault at each file operation of an attempt; {paused} paused the job; 0 false done",
        )


def test_a_fault_at_the_nth_file_operation_of_the_jobs_end_leaves_no_false_complete(tmp_path: Path) -> None:
    """Seen to fail with a finish that wrote COMPLETE before it put the manifest in its place."""
    job = FinishedJob(tmp_path)
    shim = Shim(tmp_path, tmp_path / "jobs")
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.finisher", job.path, job.rows_path, shim.env["FAULTS_CONTROL"], str(times(4, 1))],
        env={**os.environ, **shim.env}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["false"] == [] and len(told["points"]) == 3, told


@pytest.fixture
def small_store(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "statetap-test", path], capture_output=True).returncode:
        pytest.skip("this test has to be allowed to mount a small tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_disk_that_fills_up_pauses_the_job_and_free_space_lets_it_go_on_by_itself(
    small_store: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    """Seen to fail with a worker that told a full disk as ``circuit_open`` beside a look that took no notice of free space. (Either of the
    two alone covers for the other.)"""
    made = Service(tmp_path, redis_server.url)
    made.rig.store.rmdir()
    made.rig.store.symlink_to(small_store)
    with made as service:
        service.start(delay_ms=5)
        dataset = service.dataset(token_rows(100, 100))  # 5.5 MB of files
        refused = service.api.http.post("/v1/jobs", json={"dataset_id": dataset})
        assert (refused.status_code, refused.json()["code"]) == (507, "store_full")
        job = service.api.submit(dataset, force=True)["job_id"]
        paused = service.api.until_state(job, "paused", reason="low_disk", seconds=30)
        assert "bytes free" in paused["message"] or "store_full" in paused["message"]
        until(lambda: service.api.job(job)["batches"]["outstanding"] == 0, "the workers have drained")
        rows = service.api.job(job)["rows"]
        assert rows["done"] < 100 and rows["failed"] == 0
        assert not (service.path(job) / "COMPLETE").exists()
        subprocess.run(["mount", "-o", "remount,size=32m", small_store], check=True)
        ended = service.api.until_state(job, "completed", seconds=60)
        assert ended["rows"]["done"] == 100
        report = verify_job(service.path(job))
        assert report.ok and (report.files, report.extra) == (100, 0)
