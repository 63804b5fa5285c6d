"""``python -m tests.bench.engine_soak [--requests 10000]``: a real engine under a long run of short requests; does its memory grow?

Captured requests, requests of others, aborts and closed connections; every file is taken (removed) after its reply, as a worker does.
Prints figures, one JSON object a line, and ends with 1 when a bound is passed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from statetap.contracts.tensors import tap_header
from statetap.engine.tiny import make_tiny
from tests.support.engine import Engine, start_engine, wait_ready
from tests.support.engine_load import Load, load, prompts
from tests.support.figures import print_figure

AT_ONCE = 32
SLOPE_MIB = 8.0  # RSS that a process may gain in 10,000 requests, over the second half of the run
COMMAND = "python -m tests.bench.engine_soak"
FLAGS = ("--chunked-prefill-size", "64", "--enable-mixed-chunk")


@dataclass(kw_only=True)
class Soak:
    """``samples``: process name -> (requests done, RSS in MiB)."""

    requests: int
    seconds: float
    captured: int
    counted: dict[str, float]
    left: set[str]
    samples: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def slope(self, name: str) -> float:
        """MiB a 10,000 requests, by least squares over the second half."""
        half = [(n, mib) for n, mib in self.samples[name] if n >= self.requests / 2]
        x, y = [n for n, _ in half], [mib for _, mib in half]
        mx, my = sum(x) / len(x), sum(y) / len(y)
        return 10_000 * sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def processes(engine: Engine) -> dict[str, int]:
    """The HTTP process and the scheduler of an engine, by name."""
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            lines[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # it has ended meanwhile
    found = {}
    for pid in parents:
        up = pid
        while up in parents and up != engine.process.pid:
            up = parents[up]
        if up == engine.process.pid and pid != up:
            if "sglang::scheduler" in lines[pid]:
                found["scheduler"] = pid
            elif parents[pid] == engine.process.pid:
                found["http"] = pid
    return found


def rss_mib(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


async def soak(engine: Engine, requests: int, *, seed: int = 1) -> Soak:
    """Run it. The engine is idle afterwards; raises AssertionError for a reply that is not what was asked for."""
    rnd, pids, done, captured = random.Random(seed), processes(engine), 0, 0
    samples: dict[str, list[tuple[int, float]]] = {name: [] for name in pids}
    texts = prompts(seed, [rnd.randint(1, 60) for _ in range(199)])
    start = time.monotonic()
    async with load(engine) as on:
        at_once = asyncio.Semaphore(AT_ONCE)
        before = await on.idle()

        async def one(kind: float) -> None:
            nonlocal done, captured
            async with at_once:
                ids = rnd.choice(texts)
                if kind < 0.1:
                    assert (await on.plain(ids, new=2)).status == 200
                elif kind < 0.15:
                    rid = on.rid()
                    task = asyncio.create_task(on.post(rid, ids, new=20))
                    await asyncio.sleep(rnd.uniform(0, 0.1))
                    await on.abort(rid)
                    sent = await task  # apart from the sum, which would be read before it
                    captured += sent.ok
                elif kind < 0.17:
                    await on.leave(ids, rnd.uniform(0, 0.1), new=20)
                else:
                    sent = await on.capture(ids)
                    assert sent.ok, sent
                    assert on.path(sent).stat().st_size == tap_header(engine.profile, len(ids)).size
                    on.path(sent).unlink()
                    captured += 1
                done += 1
                if done % max(requests // 100, 5) == 0:
                    for name, pid in pids.items():
                        samples[name].append((done, rss_mib(pid)))

        kinds = [rnd.random() for _ in range(requests)]
        for at in range(0, requests, 500):
            await asyncio.gather(*(one(kind) for kind in kinds[at : at + 500]))
            beat(on)
        seconds = time.monotonic() - start
        after = await on.idle()
        for _ in range(60):  # closed connections are noticed every 4 s; what was aborted at the last moment may have its file
            left = {n for n in on.files() if not n.endswith(".safetensors")}
            if not left:
                break
            await asyncio.sleep(0.1)
        shutil.rmtree(engine.tap / on.lease)
    counted = {name: value - before.get(name, 0) for name, value in after.items()}
    return Soak(requests=requests, seconds=seconds, captured=captured, counted=counted, left=left, samples=samples)


def shared_memory() -> set[str]:
    """What engines and Python's multiprocessing leave in /dev/shm when they are killed, and our own taps."""
    return {n for n in os.listdir("/dev/shm") if n.startswith(("sglang_loads_", "sem.mp-", "psm_", "statetap-soak-"))}


def beat(on: Load) -> None:
    """The lease lives, and its files do not pile up: those of aborted requests are of nobody."""
    folder = on.engine.tap / on.lease
    for path in folder.glob("*.safetensors"):
        path.unlink()
    os.utime(next(folder.glob("*.json")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    requests = parser.parse_args().requests
    shm = shared_memory()
    with tempfile.TemporaryDirectory() as folder:
        tap = Path(tempfile.mkdtemp(prefix="statetap-soak-", dir="/dev/shm"))
        engine = start_engine(make_tiny(Path(folder) / "tiny"), tap, Path(folder) / "log", sglang=FLAGS)
        try:
            wait_ready(engine)
            found = asyncio.run(soak(engine, requests))
        finally:
            engine.stop()
            shutil.rmtree(tap, ignore_errors=True)
    note = f"{requests} requests of 1-60 tokens, {AT_ONCE} at once: 83 % captured, 10 % of others, 5 % aborted, 2 % closed connections"
    problems = [f"{left} was left" for left in sorted(found.left)]
    if found.counted["statetap_engine_captured_requests_total"] < found.captured:
        problems.append(f"the engine counted fewer than {found.captured} captured requests")
    problems += [f"{name} was left in /dev/shm" for name in sorted(shared_memory() - shm)]
    for name in found.samples:
        slope, last = found.slope(name), found.samples[name][-1][1]
        print_figure(
            f"engine.soak_{name}_mib_per_10k",
            round(slope, 2),
            "MiB",
            COMMAND,
            f"RSS over the second half of {note}; {last:.0f} MiB at its end",
        )
        if slope > SLOPE_MIB:
            problems.append(f"{name} grows by {slope:.1f} MiB in 10,000 requests (bound {SLOPE_MIB})")
    print_figure("engine.soak_requests_per_s", round(requests / found.seconds, 1), "1/s", COMMAND, f"tiny model on the CPU; {note}")
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
