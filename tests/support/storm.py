"""A storm of SIGKILLs over a running service. Whoever is killed is started again at once, as a restart policy would.

Of each killed worker or horse that held a batch it is measured how long the batch was without a holder. What the storm left on the
store is counted by :func:`audit`, which trusts nothing that the service says of itself.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import dataclass
from pathlib import Path

import psutil
import xxhash

from statetap.contracts import keys
from statetap.contracts.capture import LEASE_FILE
from statetap.contracts.layout import ROWS, TEMP_PREFIX, dataset_dir
from statetap.engine.sweep import LEASE_DEAD_AFTER_S, sweep
from statetap.store.jobs import load_job
from statetap.store.ledger import fold, segments_by_batch
from statetap.store.plan import read_plan
from statetap.store.verify import verify_job
from tests.support.redis import RedisServer, free_port
from tests.support.service import Service, verified
from tests.support.stack import ledger_lines
from tests.support.workers import Process, eventually


@dataclass
class Loss:
    """A batch whose holder was killed. ``back``: when another attempt had it (monotonic); 0 while none has."""

    batch: int
    holder: str
    at: float
    back: float = 0.0
    ended: bool = False  # its rows all had their outcome already: nothing was to be run again
    alone: bool = True  # the coordinator lived until it was back: no second fault


class Storm:
    """Use as a context manager around the job's run."""

    def __init__(self, service: Service, redis_server: RedisServer, job_id: str, seed: int, every_s: tuple[float, float]) -> None:
        self.service = service
        self.job_id = job_id
        self.kills: Counter[str] = Counter()
        self.losses: list[Loss] = []
        self._random = random.Random(seed)
        self._every_s = every_s
        self._workers = {p.name: p for p in service.rig.processes if p.name.startswith("worker")}
        self._restarts: Counter[str] = Counter()
        self._redis = redis_server.client()
        self._outstanding = keys.outstanding(service.rig.profile.profile_id)
        self._closing = threading.Event()
        self._path = service.path(job_id)
        self.read: dict[str, str] = {}
        """Name of each sample file -> xxh3 of what a reader found that read it as soon as it was there."""
        self._threads = [threading.Thread(target=f, name=f.__name__) for f in (self._watch, self._read)]

    def __enter__(self) -> Storm:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._redis.close()

    def run(self, over: Callable[[], bool], timeout_s: float) -> None:
        """Kill until ``over()``."""
        deadline = time.monotonic() + timeout_s
        while not over():
            following = time.monotonic() + self._random.uniform(*self._every_s)
            living = self._living()
            if living:
                self.kill(*self._random.choice(living))
            while time.monotonic() < following and not over():
                self._closing.wait(0.02)  # between two looks
            assert time.monotonic() < deadline, f"not over after {timeout_s:.0f} s and {sum(self.kills.values())} kills"

    def _living(self) -> list[tuple[str, str]]:
        """(kind, worker's name) of every process that has come up: what is killed while it starts has not been at work since its last kill."""
        up = [n for n, w in sorted(self._workers.items()) if w.log.count("event=worker_started") > self._restarts[n]]
        coordinator = [("coordinator", "")] if self.service.api.listens() else []
        return coordinator + [("worker", n) for n in up] + [("horse", n) for n in up if self._workers[n].horse()]

    def kill(self, kind: str, name: str) -> None:
        """Kill ``coordinator``, or the worker of this name, or its ``horse`` (the worker, where that has just ended)."""
        if kind == "coordinator":
            for loss in self.losses:
                loss.alone &= bool(loss.back) or loss.ended
            self.service.api.kill()
            self.service.api.spawn()
        else:
            worker = self._workers[name]
            horse = worker.horse()
            holds = self._held_by(horse) if horse else None
            if kind == "horse" and horse is not None:
                os.kill(horse.pid, signal.SIGKILL)
            else:
                kind = "worker"
                self._restart(worker)
            if holds:
                self.losses.append(Loss(batch=holds[0], holder=holds[1], at=time.monotonic(), alone=self.service.api.listens()))
        self.kills[kind] += 1

    def _restart(self, worker: Process) -> None:
        worker.kill()
        self._restarts[worker.name] += 1
        self.service.rig.processes.remove(worker)
        self._workers[worker.name] = self.service.rig.start_worker(worker.name)

    def _held_by(self, horse: psutil.Process) -> tuple[int, str] | None:
        """(batch, lease) of a horse, by its note in the tap."""
        for note in self.service.rig.tap.glob(f"*/{LEASE_FILE}"):
            try:
                if json.loads(note.read_bytes()).get("pid") != horse.pid:
                    continue
            except (OSError, ValueError):
                continue  # just being written or removed
            batches = [int(f.rpartition(":")[2]) for f in self._redis.hkeys(self._outstanding)]
            holders = self._holders(batches)
            return next(((b, h) for b, h in zip(batches, holders, strict=True) if h == note.parent.name), None)
        return None

    def _holders(self, batches: list[int]) -> list[str | None]:
        return self._redis.mget([keys.lease(self.job_id, b) for b in batches]) if batches else []

    def _watch(self) -> None:
        while not self._closing.wait(0.05):  # between two looks
            waiting = [loss for loss in self.losses if not loss.back and not loss.ended]
            if not waiting:
                continue
            holders = self._holders([loss.batch for loss in waiting])
            given = self._redis.hmget(self._outstanding, [f"{self.job_id}:{loss.batch}" for loss in waiting])
            now = time.monotonic()
            for loss, holder, entry in zip(waiting, holders, given, strict=True):
                if holder is not None and holder != loss.holder:
                    loss.back = now
                elif holder is None and entry is None:
                    loss.ended = self._all_rows(loss.batch)

    def _read(self) -> None:
        """The reader of promise 2: it looks at names only, as a trainer would, and knows nothing of ledgers."""
        while True:
            last = self._closing.wait(0.5)  # between two looks
            for folder in [e for e in os.scandir(self._path) if e.name.startswith("rows_")]:
                for entry in os.scandir(folder):
                    name = f"{folder.name}/{entry.name}"
                    if name not in self.read and not entry.name.startswith(TEMP_PREFIX):
                        self.read[name] = xxhash.xxh3_64_hexdigest(Path(entry.path).read_bytes())
            if last:
                return

    def _all_rows(self, batch: int) -> bool:
        path = self.service.path(self.job_id)
        return len(fold(segments_by_batch(path).get(batch, []))) == read_plan(path)[batch].rows

    def recovery_s(self, *, alone: bool = False) -> list[float]:
        """Seconds for which each lost batch had no holder, sorted. All that were lost are back, or had nothing left to do. ``alone``: only of
        those meanwhile no coordinator was killed."""
        never = [loss for loss in self.losses if not loss.back and not loss.ended]
        assert not never, never
        return sorted(loss.back - loss.at for loss in self.losses if loss.back and (loss.alone or not alone))


def p99(values: list[float]) -> float:
    """Of sorted values."""
    return values[min(int(len(values) * 0.99), len(values) - 1)]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Counts over the files of a job: all are 0 where the promises were kept."""

    lost: int  # rows without a terminal record
    doubled: int  # rows with more than one file or more than one record, and files that no record names
    bad: int  # files that are not what was recorded and what the dataset asks for
    quarantined: int
    temps: int  # beside the samples; what a killed coordinator leaves of the job's own files, gc removes
    torn: int = 0  # files that a reader found to be something else when they had just appeared


def audit(service: Service, job_id: str, rows: int, read: dict[str, str] | None = None) -> Audit:
    """Count on the store what the storm left of a job of ``rows`` good rows. ``read``: of a reader beside it, as ``Storm.read``."""
    path = service.path(job_id)
    records = {row: record for segments in segments_by_batch(path).values() for row, record in fold(segments).items()}
    lines = Counter(line["row"] for line in ledger_lines(path))
    files = {str(p.relative_to(path)) for p in path.glob("rows_*/*") if not p.name.startswith(TEMP_PREFIX)}
    report = verify_job(path, service.rig.store / dataset_dir(load_job(path).dataset_id) / ROWS)
    return Audit(
        lost=rows - sum(r.state == "done" for r in records.values()),
        doubled=sum(n > 1 for n in lines.values()) + len(files ^ {r.path for r in records.values()}),
        bad=sum(report.counts.values()),
        quarantined=sum(r.code == "poisoned" for r in records.values()),
        temps=len(list(path.glob(f"rows_*/{TEMP_PREFIX}*"))),
        torn=sum(read.get(r.path) != r.xxh3 for r in records.values()) if read is not None else 0,
    )


def assert_each_row_once(service: Service, job_id: str, rows: int, objects: Sized) -> None:
    """Of a job of the dataset ds-1 in a bucket that has ``objects`` of it: one line and one object a row, no others, and all are right."""
    done = Counter(line["row"] for line in ledger_lines(service.path(job_id)) if line["state"] == "done")
    assert done == Counter(range(rows)) and len(objects) == rows
    assert verified(service, {"job_id": job_id}) == {}


def wait_tap_empty(service: Service) -> None:
    """Wait for the horses' last moments; what dead workers left, the engine's own sweep removes (here with a clock that is ahead)."""
    tap = service.rig.tap
    eventually("no batch is given out", lambda: not service.rig.redis.hlen(keys.outstanding(service.rig.profile.profile_id)), 30)
    sweep(tap, time.time() + LEASE_DEAD_AFTER_S + 1)
    eventually("the tap is empty", lambda: sorted(p.name for p in tap.iterdir()) == ["READY.json", "norm.safetensors"])


def completed(service: Service, job_id: str) -> Callable[[], bool]:
    """A look at the store: has the job ended, and well?"""
    control = service.path(job_id) / "control.json"

    def look() -> bool:
        state = json.loads(control.read_bytes())["state"]
        assert state not in ("failed", "cancelled", "completed_with_errors"), control.read_text()
        return bool(state == "completed")

    return look


def samples(path: Path) -> dict[str, Path]:
    """Name below the job's folder -> file."""
    return {str(p.relative_to(path)): p for p in path.glob("rows_*/*")}


def storm_service(folder: Path, redis_url: str, *, workers: int, window: int) -> Service:
    """A service whose coordinator keeps its port and whose workers come back with the same settings. Not entered yet."""
    settings = {"PORT": str(free_port()), "TICK_S": "1.0"}
    return Service(folder, redis_url, settings=settings, window=window, workers_per_engine=workers)
