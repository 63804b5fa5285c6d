"""Redis that goes away or is wiped, and a store that is full: nothing acknowledged is lost, and the job goes on by itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from statetap.contracts import keys
from tests.support.jobs import token_rows
from tests.support.redis import RedisServer
from tests.support.workers import Rig, eventually

ROWS = 300


def test_redis_killed_under_load_comes_back_and_the_batch_goes_on(rig: Rig, redis_server: RedisServer) -> None:
    """Seen to fail with calls of the horse that give up at the first error of the connection."""
    rig.start_engine(delay_ms=20)
    worker = rig.start_worker(STATETAP_WINDOW=4)
    job = rig.make_job(token_rows(ROWS, 8))
    job.give()
    for _ in range(3):
        before = job.committed()
        eventually("rows are committed", lambda n=before: job.committed() > n + 5)
        redis_server.kill()
        redis_server.start()
    job.wait_done()
    assert job.finish().done == ROWS and rig.stats()["requests"] == ROWS
    assert worker.popen.poll() is None and "Traceback" not in worker.log


def test_a_redis_that_takes_no_writes_for_a_while_loses_no_worker(rig: Rig) -> None:
    """Seen to fail with a keeper that heard only of broken connections: its thread ended, and the engine was never registered again."""
    rig.start_engine()
    worker = rig.start_worker()
    eventually("the engine is registered", lambda: list(rig.redis.scan_iter(keys.ENGINES_PATTERN)))
    rig.redis.config_set("maxmemory", 1)
    eventually("a registration was refused", lambda: "doing=register error=OutOfMemoryError" in worker.log)
    rig.redis.delete(*rig.redis.scan_iter(keys.ENGINES_PATTERN))
    rig.redis.config_set("maxmemory", 0)
    eventually("the engine is registered again", lambda: list(rig.redis.scan_iter(keys.ENGINES_PATTERN)))
    job = rig.make_job(token_rows(20, 8))
    job.give()
    job.wait_done()
    # RQ may tell of it with a traceback of its own; it is started again.
    assert job.finish().done == 20 and worker.popen.poll() is None


def test_redis_wiped_under_load_costs_no_row(rig: Rig) -> None:
    """Seen to fail with a lease that is not taken again when Redis has forgotten it."""
    rig.start_engine(delay_ms=20)
    rig.start_worker(STATETAP_WINDOW=4)
    job = rig.make_job(token_rows(ROWS, 8))
    job.give()
    eventually("rows are committed", lambda: job.committed() > 5)
    rig.redis.flushall()
    job.wait_done()
    assert job.finish().done == ROWS and rig.stats()["requests"] == ROWS


def test_a_worker_starts_before_redis_and_serves_when_it_is_there(rig: Rig, redis_server: RedisServer) -> None:
    """Seen to fail with a serve() that lets the error of RQ's own start end the process."""
    rig.start_engine()
    redis_server.kill()
    worker = rig.start_worker()
    eventually("it notices", lambda: "event=redis_away doing=work" in worker.log)  # RQ has given up, after its own tries
    redis_server.start()
    job = rig.make_job(token_rows(10, 8))
    job.give()
    job.wait_done(40)
    assert job.finish().done == 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "statetap-test", path], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount")
    if done.returncode:
        pytest.skip("this test has to be allowed to mount a small tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_full_store_pauses_the_job_and_free_space_lets_it_go_on(small_disk: Path, redis_server: RedisServer, tmp_path: Path) -> None:
    """Seen to fail with a full disk that is told as any other error of the store: circuit_open, which a person has to end."""
    with Rig(tmp_path / "rig", redis_server.url) as rig:
        os.rmdir(rig.store)
        rig.store.symlink_to(small_disk)
        rig.start_engine(delay_ms=5)
        rig.start_worker()
        job = rig.make_job(token_rows(100, 100))  # 5.5 MB of files
        job.give()
        eventually("the batch is handed back", lambda: not job.outstanding())
        pause = job.pause()
        assert pause is not None and pause["reason"] == "low_disk"
        kept = job.ledger()
        assert 0 < len(kept) < 100 and {r.state for r in kept.values()} == {"done"}
        assert all((job.dir / r.path).stat().st_size == r.bytes for r in kept.values())
        subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
        job.give()
        job.wait_done()
        assert job.finish().done == 100
