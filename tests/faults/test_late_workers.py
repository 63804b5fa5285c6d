"""Row 4 of reliability.md: a worker that is stopped past its lease and wakes when another has finished its batch."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.faults.forms import FULL, times
from tests.support.jobs import token_rows
from tests.support.workers import Job, Process, Rig, eventually

ROUNDS = times(5, 100)
ROWS = 40  # a batch: half a second of work
TOKENS = 8
Kept = dict[str, object]


@pytest.mark.timeout(900 if FULL else 120)
def test_what_a_worker_commits_after_its_lease_is_discarded(rig: Rig) -> None:
    """The lease lapses by itself. Nothing on the store changes when the stopped horse wakes with its window in its hands. Seen to fail with a
    commit that renames instead of linking: the late file takes the place of the first."""
    rig.start_engine(delay_ms=50)
    workers = [rig.start_worker(f"worker-{n}", module="tests.faults.short_lease_worker", STATETAP_WINDOW=4) for n in range(2)]
    spare = 3 + ROUNDS // 10  # a batch may be over before its horse is stopped
    job = rig.make_job(token_rows((ROUNDS + spare) * ROWS, TOKENS), batch_tokens=ROWS * TOKENS)
    caught = 0
    for batch in range(len(job.batches)):
        job.give(batch)
        caught += caught < ROUNDS and woke_late(job, batch, workers)
        eventually(f"batch {batch} is done", lambda b=batch: has_all(job, b), 60)
    assert caught == ROUNDS
    late = sum(worker.log.count("event=late_commit_discarded") for worker in workers)
    print(f"\n{caught} horses woke after their lease; {late} late commits were discarded")
    assert late >= caught
    assert len({(line["row"], line["path"], line["xxh3"]) for line in job.lines()}) == job.rows
    assert job.finish().done == job.rows


def woke_late(job: Job, batch: int, workers: list[Process]) -> bool:
    """Stop the batch's horse until another has finished the batch, then wake it; False when it was over too early."""
    eventually("it has begun", lambda: batch in job.totals() and job.totals()[batch].rows, 60)
    worker = next(w for w in workers if f"event=batch_started job={job.id} batch={batch} attempt=1" in w.log)
    horse = worker.horse()
    if horse is None:
        return False
    os.kill(horse.pid, signal.SIGSTOP)
    try:
        if has_all(job, batch) or job.totals()[batch].rows == ROWS:
            return False
        eventually("its lease has lapsed", lambda: job.lease(batch) is None, 60)
        job.requeue(batch)
        eventually("another has finished it", lambda: has_all(job, batch), 60)
        before = on_store(job, batch)
    finally:
        os.kill(horse.pid, signal.SIGCONT)
    eventually("it ends", lambda: f"event=batch_ended job={job.id} batch={batch} attempt=1" in worker.log, 60)
    ended = next(line for line in worker.log.splitlines() if f"event=batch_ended job={job.id} batch={batch} attempt=1" in line)
    assert "reason=lost" in ended, ended
    assert on_store(job, batch) == before
    return True


def has_all(job: Job, batch: int) -> bool:
    totals = job.totals().get(batch)
    return totals is not None and totals.rows == ROWS and f"{job.id}:{batch}" not in job.outstanding()


def on_store(job: Job, batch: int) -> tuple[dict[int, Kept], dict[str, tuple[int, int]], object]:
    """The batch's records, its files as (inode, change of the content), its totals."""
    kept: dict[int, Kept] = {}
    for line in (json.loads(text) for p in (job.dir / "ledger").glob(f"{batch}.*") for text in p.read_text().splitlines()):
        # A horse that is stopped between link and ledger wakes and records the file that the other has adopted: the same record once more.
        if "row" not in line:
            continue  # names the engine
        record = {k: v for k, v in line.items() if k not in ("at", "engine")}
        assert kept.setdefault(line["row"], record) == record
    files = {str(r["path"]): (job.dir / str(r["path"])).stat() for r in kept.values()}
    return kept, {p: (s.st_ino, s.st_mtime_ns) for p, s in files.items()}, job.totals()[batch]
