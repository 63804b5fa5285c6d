"""Workers that die, sleep or are told to go: no row is lost, none is doubled, and only what was in flight is repeated."""

from __future__ import annotations

import os
import signal

import psutil

from statetap.contracts import keys
from tests.faults.killer_worker import KILLER
from tests.support.jobs import token_rows
from tests.support.workers import Job, Process, Rig, eventually

WINDOW = 4
ROWS = 250


def running(rig: Rig) -> tuple[Process, Job, psutil.Process]:
    """A worker in the middle of its batch: (worker, job, horse)."""
    worker = rig.start_worker("victim", STATETAP_WINDOW=WINDOW)
    job = rig.make_job(token_rows(ROWS, 8))
    job.give()
    eventually("some rows are committed", lambda: job.committed() > 5)
    horse = worker.horse()
    assert horse is not None and job.committed() < ROWS
    return worker, job, horse


def test_a_killed_workers_horse_dies_with_it_and_its_rows_run_again(rig: Rig) -> None:
    """Seen to fail without the horse's PR_SET_PDEATHSIG: it lives on and does the batch to its end."""
    rig.start_engine(delay_ms=20)
    victim, job, horse = running(rig)
    victim.kill()
    eventually("the horse is gone", lambda: not horse.is_running() or horse.status() == psutil.STATUS_ZOMBIE)
    left = len(rig.redis.smembers(f"statetap:inflight:{job.id}:0"))
    assert left >= 1
    job.wait_lapsed()
    job.requeue(0)
    assert len(rig.redis.smembers(f"statetap:suspects:{job.id}:0")) == left
    rig.start_worker("heir", STATETAP_WINDOW=WINDOW)
    job.wait_done()
    for folder in rig.tap.glob("[0-9a-f]*"):  # of the dead worker: the engine sweeps it after half a minute
        os.utime(folder / "lease.json", (0, 0))
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    assert job.finish().done == ROWS
    assert ROWS <= rig.stats()["requests"] <= ROWS + left
    assert len({line["row"] for line in job.lines()}) == len(list(job.lines())) == ROWS


def test_a_killed_horse_is_replaced_and_its_lease_and_tap_folder_go_at_once(rig: Rig) -> None:
    """Seen to fail with a parent that leaves its dead horse's folder to the engine's sweep, and with one that leaves its lease to lapse."""
    rig.start_engine(delay_ms=20)
    worker, job, horse = running(rig)
    for _ in range(3):
        os.kill(horse.pid, signal.SIGKILL)
        eventually("its tap folder is gone", lambda: not list(rig.tap.glob("[0-9a-f]*")))
        eventually("its lease is given back", lambda: not rig.redis.exists(keys.lease(job.id, 0)), keys.LEASE_TTL_S / 2)
        job.requeue(0)
        before = job.committed()
        eventually("the next one works", lambda n=before: job.done() or job.committed() > n)
        if job.done():
            break
        horse = worker.horse() or horse
    job.wait_done()
    assert job.finish().done == ROWS
    assert rig.stats()["requests"] <= ROWS + 3 * (WINDOW + 128)


def test_sigterm_finishes_the_window_and_repeats_nothing(rig: Rig) -> None:
    """Seen to fail with a horse that does not install drain's handler: it goes on to the batch's end."""
    rig.start_engine(delay_ms=20)
    worker, job, _ = running(rig)
    assert worker.term(15) == 0
    assert job.outstanding() == {} and job.lease() is None
    done = job.committed()
    assert done < ROWS and rig.stats()["requests"] == done
    assert "reason=drain" in worker.log
    job.give()
    rig.start_worker("heir")
    job.wait_done()
    assert job.finish().done == ROWS and rig.stats()["requests"] == ROWS


def test_sigterm_does_not_wait_for_a_prefill_that_hangs(rig: Rig) -> None:
    """Seen to fail with a drain that waits for all prefills, without the limit of STATETAP_DRAIN_S."""
    rig.start_engine("hang@n=20", delay_ms=20)
    worker = rig.start_worker(STATETAP_WINDOW=WINDOW, STATETAP_DRAIN_S=1)
    job = rig.make_job(token_rows(ROWS, 8))
    job.give()
    eventually("rows behind the one that hangs are committed", lambda: job.committed() > 30)
    assert worker.term(15) == 0
    assert job.outstanding() == {} and job.committed() == rig.stats()["requests"] - 1
    assert all(record.state == "done" for record in job.ledger().values())


def test_a_row_that_kills_its_worker_is_quarantined_and_no_neighbour_is_charged(rig: Rig) -> None:
    """Seen to fail with a loss that charges every row in flight, not only one that was alone."""
    rig.start_engine(delay_ms=20)
    worker = rig.start_worker("killer", module="tests.faults.killer_worker", STATETAP_WINDOW=WINDOW)
    rows = token_rows(40, 8, vocab=6000)
    rows[11][3] = KILLER
    job = rig.make_job(rows)
    job.give()
    losses = 0
    while not job.done():
        started = eventually("the horse is lost, or the job done", lambda n=losses: job.done() or lost(worker, job, n))
        if started is True:
            break
        losses += 1
        job.wait_lapsed()
        job.requeue(0)
    report = job.finish()
    assert (report.done, report.failed) == (39, 1)
    assert job.ledger()[11].code == "poisoned" and losses == 4  # once among others, three times alone
    assert rig.redis.hgetall(f"statetap:losses:{job.id}") == {"11": "3"}


def lost(worker: Process, job: Job, losses: int) -> str | None:
    ended = worker.log.count("terminated unexpectedly")
    return "lost" if ended > losses and any(e["started"] for e in job.outstanding().values()) else None
