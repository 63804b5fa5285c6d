"""What a team sees of the service, with the stub engine computing at a known speed: fairness, the ETA, pause, and the status under watchers."""

from __future__ import annotations

import concurrent.futures
import json
import random
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np

from statetap.contracts.records import JobControl, JobSpec
from statetap.store.fs import to_json
from tests.support.coordinator import until
from tests.support.redis import RedisServer
from tests.support.service import Service

ENDED = ("completed", "completed_with_errors")


def same_length(count: int, tokens: int, seed: int = 1) -> Iterator[list[int]]:
    random_ids = np.random.default_rng(seed)
    for _ in range(count):
        yield random_ids.integers(1, 32_000, tokens).tolist()


def mixed(count: int, seed: int = 2) -> list[list[int]]:
    """Rows of 20 to 400 tokens, the long ones not spread evenly: the ETA goes by tokens, not rows."""
    random_ids = np.random.default_rng(seed)
    lengths = np.sort(random_ids.integers(20, 400, count))
    lengths = np.concatenate([lengths[::2], lengths[1::2][::-1]])
    return [random_ids.integers(1, 32_000, n).tolist() for n in lengths]


def _service(folder: Path) -> tuple[RedisServer, Service]:
    server = RedisServer(folder / "redis")
    server.start()
    return server, Service(folder, server.url, settings={"TICK_S": "1.0"})


def small_job_ratio(folder: Path, big_rows: int, tokens_per_s: float) -> tuple[float, str]:
    """Time of a 500-row job beside a big one of the same profile, over its time alone."""
    server, made = _service(folder)
    try:
        with made as service:
            service.start(workers=2, tokens_per_s=tokens_per_s)
            service.dataset(same_length(500, 100), "ds-small")
            service.dataset(same_length(big_rows, 100, seed=5), "ds-big")

            def small() -> float:
                began = time.monotonic()
                job = service.api.submit("ds-small", reuse=False)["job_id"]
                service.api.until_state(job, *ENDED, seconds=300)
                return time.monotonic() - began

            alone = small()
            big = service.api.submit("ds-big", reuse=False)["job_id"]
            until(lambda: service.api.job(big)["rows"]["done"] > 100, "the big job runs", 60)
            beside = small()
            state = service.api.job(big)
            service.api.http.post(f"/v1/jobs/{big}/cancel")
            assert state["state"] == "running", "the big job ended before the small one"
        return (
            beside / alone,
            f"500 rows of 100 tokens alone {alone:.1f} s, beside {big_rows:,} rows {beside:.1f} s; 2 workers, engine at {tokens_per_s:,.0f} tok/s",
        )
    finally:
        server.kill()


def eta_error(folder: Path, rows: int, tokens_per_s: float) -> tuple[float, str]:
    """The largest |predicted end - real end| over the job's whole time, of looks after the first 5 % of its tokens; and where it was."""
    server, made = _service(folder)
    try:
        with made as service:
            service.start(workers=2, tokens_per_s=tokens_per_s)
            job = service.api.submit(service.dataset(mixed(rows)))["job_id"]
            looks: list[tuple[float, float, float]] = []  # time, share of tokens, eta
            began = time.monotonic()
            while (now := service.api.job(job))["state"] not in ENDED:
                share = now["tokens"]["done"] / now["tokens"]["total"]
                if share >= 0.05 and now["eta_s"] is not None:
                    looks.append((time.monotonic() - began, share, now["eta_s"]))
                time.sleep(0.2)  # between two looks
            end = time.monotonic() - began
        assert looks[0][1] < 0.15, "no ETA before 15 % of the tokens were done"
        errors = [(abs(at + eta - end) / end, share) for at, share, eta in looks]
        worst, where = max(errors)
        middle = statistics.median(e for e, _ in errors)
        return worst, f"{rows:,} rows, {end:.0f} s, {len(looks)} looks; median {middle:.3f}; the worst at {where:.0%} of the tokens"
    finally:
        server.kill()


def pause_s(folder: Path, times: int) -> tuple[float, str]:
    """Seconds from POST pause to the last prefill that the engine got; the slowest of several."""
    server, made = _service(folder)
    try:
        with made as service:
            service.start(workers=2, tokens_per_s=20_000)
            job = service.api.submit(service.dataset(same_length(30_000, 100)))["job_id"]
            seconds = []
            for i in range(times):
                before = service.api.job(job)["rows"]["done"]
                until(lambda b=before: service.api.job(job)["rows"]["done"] > b + 200, "it runs", 60)
                time.sleep(0.17 * i)  # at different places of the workers' seconds
                asked = time.time()
                service.post(f"/v1/jobs/{job}/pause")
                until(lambda: service.api.job(job)["batches"]["outstanding"] == 0, "the workers have handed back", 60)
                seconds.append(max(service.rig.stats()["last_at"] - asked, 0.0))
                service.post(f"/v1/jobs/{job}/resume")
        return max(seconds), f"the slowest of {times}: {', '.join(f'{s:.2f}' for s in seconds)}"
    finally:
        server.kill()


def status_p99_ms(folder: Path, jobs: int, watchers: int, requests: int) -> tuple[float, str]:
    """GET on jobs, with many jobs on the store, one of them running, and as many watchers of its events."""
    server, made = _service(folder)
    try:
        with made as service:
            service.start(tokens_per_s=2_000)
            job = service.api.submit(service.dataset(same_length(2_000, 100)))["job_id"]
            folder_of = service.rig.store / "jobs"
            spec = JobSpec.from_dict(json.loads((folder_of / job / "job.json").read_text()))
            ids = [job]
            for i in range(jobs - 1):
                ids.append(f"job-{i:016x}")
                path = folder_of / ids[-1]
                path.mkdir()
                (path / "plan.parquet").write_bytes((folder_of / job / "plan.parquet").read_bytes())
                control = JobControl(state="completed", ended_at=time.time(), updated_at=time.time(), final={"done": spec.rows})
                (path / "control.json").write_bytes(to_json(control.to_dict()))
                (path / "job.json").write_bytes(to_json(spec.to_dict() | {"job_id": ids[-1]}))
            stop, events = threading.Event(), [0] * watchers
            url = str(service.api.http.base_url)

            def watch(i: int) -> None:
                with httpx.Client(base_url=url, timeout=60) as client, client.stream("GET", f"/v1/jobs/{job}/events") as stream:
                    for line in stream.iter_lines():
                        events[i] += line.startswith("data:")
                        if stop.is_set():
                            return

            pool = concurrent.futures.ThreadPoolExecutor(watchers)
            watching = [pool.submit(watch, i) for i in range(watchers)]
            until(lambda: min(events) >= 2, "all watchers have got events", 60)
            times = []
            chosen = random.Random(4)
            for i in range(requests):
                path = "/v1/jobs?limit=50" if i % 10 == 0 else f"/v1/jobs/{job if i % 2 else chosen.choice(ids)}"
                began = time.perf_counter()
                assert service.api.http.get(path).status_code == 200
                times.append(time.perf_counter() - began)
            assert service.api.job(job)["state"] == "running", "the job ended while it was measured"
            got = min(events)
            stop.set()
            service.api.http.post(f"/v1/jobs/{job}/cancel")
            for w in watching:
                w.result(30)
            pool.shutdown()
        ordered = sorted(times)
        p99 = ordered[int(len(ordered) * 0.99)] * 1000
        note = f"{requests} GETs (one in ten a list of 50) with {jobs} jobs and {watchers} watchers by SSE, each of which got {got} events or more; "
        return p99, note + f"median {ordered[len(ordered) // 2] * 1000:.1f} ms; the watchers' client runs on the same cores"
    finally:
        server.kill()
