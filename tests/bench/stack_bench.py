"""Figures of the whole stack as processes: rows a second with everything durable, the memory of ingestion, the time to the first prefill."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from statetap.store.plan import batch_tokens_for
from tests.support.jobs import token_rows
from tests.support.redis import RedisServer
from tests.support.workers import Process, Rig, eventually


@contextmanager
def stack(folder: Path) -> Iterator[Rig]:
    server = RedisServer(folder / "redis")
    server.start()
    try:
        with Rig(folder / "rig", server.url) as rig:
            yield rig
    finally:
        server.stop()


def start_coordinator(rig: Rig, **env: str) -> tuple[Process, str]:
    """The coordinator process and its URL."""
    port_file = rig.folder / "coordinator-port"
    env = {"STATETAP_PORT": "0", "STATETAP_PORT_FILE": str(port_file), "STATETAP_DATA_DIR": str(rig.folder), **env}
    process = rig.start_worker("coordinator", module="statetap.coordinator", **env)
    eventually("the coordinator listens", lambda: port_file.exists() or process.popen.poll() is not None)
    assert process.popen.poll() is None, process.log
    return process, f"http://127.0.0.1:{port_file.read_text().strip()}"


def call(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def rows_per_s(folder: Path, rows: int) -> tuple[float, float, str]:
    """(rows a second, fsyncs a row, how) at 64 KiB a row: redis-server, coordinator, two workers, stub engine."""
    with stack(folder) as rig:
        rig.start_engine()
        counts = rig.folder / "fsyncs"
        for n in range(2):
            rig.start_worker(f"worker-{n}", module="tests.bench.counting_worker", STATETAP_BENCH_FSYNCS=counts)
        start_coordinator(rig)
        eventually("both workers are registered", lambda: len(list(rig.redis.scan_iter("statetap:engine:*"))) == 2)
        job = rig.make_job(token_rows(rows, 128), batch_tokens=batch_tokens_for(rows * 128))  # 128 tokens x 512 B = 64 KiB
        job.wait_done(300)
        ended = max(record.at for record in job.ledger().values())
        seconds = ended - rig.stats()["first_at"]
        eventually("the job ends", lambda: (job.dir / "COMPLETE").exists())
        fsyncs = sum(map(int, counts.read_text().split()))
        assert job.finish().done == rows
        note = f"{rows} rows of 64 KiB in {len(job.batches)} batches: redis-server (AOF), coordinator, 2 workers, stub engine; first prefill to last commit"
        return rows / seconds, fsyncs / rows, note


def ingest_rss(folder: Path, rows: int) -> tuple[float, float, str]:
    """(peak MiB of coordinator + ingestion at ``rows`` rows of 2,000 tokens, that over the peak at a tenth, how)."""
    peaks = {n: _ingest_peak(folder / str(n), n) for n in (rows // 10, rows)}
    note = f"sum of RSS of coordinator, ingestion and its horse (pages they share counted each time), sampled each 20 ms; {rows // 10} rows: {peaks[rows // 10]:.0f} MiB"
    return peaks[rows], peaks[rows] / peaks[rows // 10], note


def _ingest_peak(folder: Path, rows: int) -> float:
    source = folder / "rig/rows.jsonl"
    with stack(folder) as rig:
        lines = [
            json.dumps({"input_ids": ids, "loss_mask": [1] * 2000}) + "\n"
            for ids in np.random.default_rng(2).integers(0, 32_000, (50, 2000)).tolist()
        ]
        with open(source, "w") as f:
            for n in range(rows):
                f.write(lines[n % 50])
        coordinator, url = start_coordinator(rig)
        ingestion = rig.start_worker("ingestion", module="statetap.datasets")
        with peak_rss(coordinator.pid, ingestion.pid) as peak:
            made = call(f"{url}/v1/datasets", {"path": str(source), "format": "tokenized", "name": "bench"})
            state: dict[str, Any] = {}

            def ended() -> bool:
                state.update(call(f"{url}/v1/datasets/{made['dataset_id']}"))
                return state["state"] != "ingesting"

            while not ended():
                time.sleep(0.2)  # between two looks
        assert state["state"] == "ready" and state["accepted"] == rows, state
        source.unlink()
        return peak[0] / (1 << 20)


@contextmanager
def peak_rss(*pids: int) -> Iterator[list[float]]:
    """The highest sum of the RSS of these processes and all their children, in bytes, as the list's one item."""
    peak, stop = [0.0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            total = 0
            for pid in pids:
                try:
                    parent = psutil.Process(pid)
                    total += sum(p.memory_info().rss for p in (parent, *parent.children(recursive=True)))
                except (psutil.NoSuchProcess, psutil.ZombieProcess):
                    continue
            peak[0] = max(peak[0], total)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def submit_to_prefill(folder: Path, rounds: int) -> tuple[float, str]:
    """(seconds, how): POST /v1/jobs to the stub's first prefill, on an idle stack; the worst of ``rounds``."""
    seconds = []
    for n in range(rounds):
        with stack(folder / str(n)) as rig:
            rig.start_engine()
            rig.start_worker()
            _, url = start_coordinator(rig)
            rig.start_worker("ingestion", module="statetap.datasets")
            source = rig.folder / "rows.jsonl"
            source.write_text("".join(json.dumps({"input_ids": ids, "loss_mask": [1] * 16}) + "\n" for ids in token_rows(20, 16)))
            eventually("the engine is registered", lambda url=url: call(f"{url}/v1/engines")["items"])
            made = call(f"{url}/v1/datasets", {"path": str(source), "format": "tokenized", "name": "bench"})
            eventually(
                "the dataset is ready", lambda url=url, made=made: call(f"{url}/v1/datasets/{made['dataset_id']}")["state"] == "ready"
            )
            posted = time.time()
            call(f"{url}/v1/jobs", {"dataset_id": made["dataset_id"]})
            first = eventually("the first prefill", lambda rig=rig: rig.stats()["first_at"])
            seconds.append(first - posted)
    return max(seconds), f"worst of {rounds} fresh stacks: " + ", ".join(f"{s:.2f}" for s in seconds)
