"""Row 2: the horse is killed (SIGKILL) at every file operation of an attempt, and in the middle of every write: each point reopens clean."""

from __future__ import annotations

import itertools
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from statetap.contracts.capture import new_lease
from statetap.contracts.layout import TEMP_PREFIX
from statetap.store.complete import finish_job
from statetap.store.jobs import load_job
from statetap.store.resume import resume_batch
from statetap.store.rows import RowsFile
from statetap.store.verify import verify_job
from tests.faults.forms import FULL, SEED, figure, times
from tests.faults.shim import Fault, Shim, step_of
from tests.support.jobs import token_rows
from tests.support.redis import RedisServer
from tests.support.workers import Process, Rig, eventually

pytestmark = pytest.mark.timeout(times(120, 1_800))

ROWS = 3
STEPS = {
    "mkdir folder", "open temp", "write temp", "fsync temp", "link file", "fsync folder",
    "mkdir ledger folder", "open ledger", "fsync ledger folder", "write ledger", "fdatasync ledger", "unlink temp",
    "open norm", "write norm", "fsync norm", "link norm",
}  # fmt: skip


class Crashing:
    """A worker under the shim, and a job for each run."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig = rig
        self.shim = Shim(folder, rig.store)
        rig.start_engine()
        self.worker: Process = rig.start_worker(**self.shim.env)
        eventually("the worker is up: it has probed the store", lambda: "event=worker_started" in self.worker.log)
        self.runs = self.repeated = 0

    def run(self, fault: Fault, nth: int, part: int = -1) -> str:
        """A job whose first attempt meets the fault, and the next one ends it; what was hit."""
        self.runs += 1
        job = self.rig.make_job(token_rows(ROWS, 8), job_id=f"job-{self.runs}")
        lost = self.worker.log.count("terminated unexpectedly")
        sent = Counter(self.rig.stats()["rows"])
        self.shim.arm(fault, nth, part)
        job.give()
        eventually("the horse is lost, or all is done", lambda: job.done() or self.worker.log.count("terminated unexpectedly") > lost)
        hit = self.shim.disarm()
        left = len(self.rig.redis.smembers(f"statetap:inflight:{job.id}:0"))
        there = {int(p.name.split("_")[1].split(".")[0]) for p in job.dir.glob("rows_*/data_*")}
        for record in job.ledger().values():
            assert xxhash.xxh3_64_hexdigest((job.dir / record.path).read_bytes()) == record.xxh3, hit
        if not job.done():
            job.wait_lapsed()
            job.requeue(0)
            job.wait_done()
        assert job.finish().done == ROWS, hit
        report = verify_job(job.dir, job.rows_path)
        assert report.ok and report.extra == 0, (hit, report)
        runs = Counter(self.rig.stats()["rows"]) - sent
        assert runs.total() - ROWS <= left, hit
        assert {int(row) for row, n in runs.items() if n > 1}.isdisjoint(there), hit  # a file that was linked is not captured again
        self.repeated += runs.total() - ROWS
        return hit


@pytest.fixture
def crashing(tmp_path: Path, redis_server: RedisServer) -> Iterator[Crashing]:
    with Rig(tmp_path / "rig", redis_server.url) as rig:
        yield Crashing(rig, tmp_path)


def walk(crashing: Crashing, fault: Fault, stride: int) -> tuple[set[str], int]:
    """Runs with n = 1, 1 + stride, … until one meets no fault: (steps that were hit, runs with a fault)."""
    steps: set[str] = set()
    for runs, nth in enumerate(itertools.count(1 + SEED % stride, stride)):
        hit = crashing.run(fault, nth)
        if not hit:
            return steps, runs
        steps.add(step_of(hit))
    raise AssertionError


def test_a_kill_at_every_file_operation_reopens_clean(crashing: Crashing) -> None:
    """Seen to fail with a commit that appends to the ledger before it links (a row done without a file), with a resume that does not adopt
    linked files (their rows were prefilled again), and with one that leaves the temps of dead attempts."""
    stride = times(5, 1)
    before, runs = walk(crashing, Fault.KILL_BEFORE, stride)
    after, more = walk(crashing, Fault.KILL_AFTER, stride)
    assert runs > 20 // stride and more > 20 // stride
    if FULL:
        # Which operation is the nth depends on how rows fall into groups: what a walk stepped over, another one meets.
        for fault, seen in ((Fault.KILL_BEFORE, before), (Fault.KILL_AFTER, after)):
            for _ in range(4):
                if not seen >= STEPS:
                    again, count = walk(crashing, fault, stride)
                    seen |= again
                    more += count
        assert before >= STEPS and after >= STEPS, (STEPS - before, STEPS - after)
        torn, writes = walk(crashing, Fault.TORN, 1)
        assert torn >= {"write temp", "write ledger", "write norm"}
        figure(
            "faults.commit_crash_points",
            runs + more + writes,
            "kills",
            f"SIGKILL before, after and within each file operation of an attempt; 0 unclean; {crashing.repeated} prefills repeated",
        )


def test_a_kill_at_every_byte_of_the_ledgers_write_reopens_clean(crashing: Crashing) -> None:
    """Seen to fail with a ledger reader for which a torn line is an error, and with a resume that leaves the temps of dead attempts."""
    stage = next(n for n in itertools.count(1) if step_of(crashing.run(Fault.TORN, n, 0)) == "write ledger")
    whole, cut = 0, 0
    for part in itertools.count(1 + SEED % times(97, 5), times(97, 5)):
        hit = crashing.run(Fault.TORN, stage, part)
        # Which write is the ledger's depends on how rows fall into groups: a run that hit a temp file is one more of those.
        cut += step_of(hit) == "write ledger"
        whole = part
        if part > 150 * ROWS:
            break
    assert cut, whole


def test_a_ledger_cut_at_every_byte_costs_at_most_its_torn_row(rig: Rig, tmp_path: Path) -> None:
    """Seen to fail with a reader that takes a last line without its newline (at the byte before the newline the line parses: its row
    would be recorded without the fsync that stands behind it, and the next append would join two lines)."""
    rig.start_engine()
    rig.start_worker()
    job = rig.make_job(token_rows(4, 8))
    job.give()
    job.wait_done()
    (segment,) = (job.dir / "ledger").iterdir()
    data = segment.read_bytes()
    source = RowsFile(job.rows_path)
    format = load_job(job.dir).sample_format
    ends = [at for at, byte in enumerate(data) if byte == ord("\n")]
    for cut in sorted({*range(0, len(data), times(7, 1)), *ends, *(at + 1 for at in ends)}):
        copy = tmp_path / "copy"
        shutil.copytree(job.dir, copy, copy_function=os.link)
        (copy / "ledger" / segment.name).unlink()
        (copy / "ledger" / segment.name).write_bytes(data[:cut])
        resumed = resume_batch(copy, format, job.batches[0], source, new_lease())
        assert resumed.open_rows == {} and len(resumed.records) == 4
        assert resumed.adopted == 4 - sum(b'"row"' in line for line in data[:cut].split(b"\n")[:-1]), cut
        assert finish_job(copy, job.rows_path).done == 4 and verify_job(copy, job.rows_path).ok
        assert not list(copy.rglob(f"{TEMP_PREFIX}*"))
        shutil.rmtree(copy)
    source.close()
