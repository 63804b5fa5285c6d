"""What capture costs a running Statetap engine on a GPU, and how much of it reaches the disk: interleaved rounds of

    plain   requests without capture
    tap     the same with capture; tap files are removed after their reply, as a worker does
    other   as tap, of a second engine (--other URL TAP): one with other flags
    disk    a job: real Redis, two real workers that prefill, check and commit to STORE

and, in each round, the disk's own rate of durable files of the same size. Rates are of the middle of each round, between 15 % and 85 % of
its tokens: a job runs for hours, and neither its first request nor the last writes are what it costs.

    python -m tests.bench.gpu.rates URL TAP STORE [--rounds 3] [--tokens 800000] [--concurrency 32] [--length 2000] [--modes plain,tap,disk]

Prints a JSON object a round and at the end one a figure (``--figures gpu`` names them gpu.…).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import numpy as np

from statetap.contracts.capture import LEASE_FILE, READY_FILE, new_lease, new_rid
from statetap.contracts.profile import CaptureProfile
from statetap.contracts.sample_format import Encoding
from tests.support.redis import RedisServer
from tests.support.workers import Rig

LOW, HIGH = 0.15, 0.85
Curve = list[tuple[float, int]]
"""(seconds, tokens done by then)."""


def steady(curve: Curve) -> float:
    """Tokens a second between 15 % and 85 % of the last count."""
    times, counts = (np.array(column, float) for column in zip(*curve, strict=True))
    a, b = (float(np.interp(share * counts[-1], counts, times)) for share in (LOW, HIGH))
    return float((HIGH - LOW) * counts[-1] / (b - a))


def prompts(args: argparse.Namespace, seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    count = args.tokens // args.length
    return [
        random.integers(10, args.vocab, random.integers(args.length * 95 // 100, args.length * 105 // 100)).tolist() for _ in range(count)
    ]


async def requests(args: argparse.Namespace, seed: int, *, capture: bool, other: bool = False) -> Curve:
    lease, tokens = new_lease(), 0
    url, tap = (args.url, args.tap) if not other else (args.other[0], Path(args.other[1]))
    folder = tap / lease
    folder.mkdir()
    (folder / LEASE_FILE).write_text("{}")
    todo = iter(enumerate(prompts(args, seed)))
    started, curve = time.monotonic(), [(0.0, 0)]
    with ThreadPoolExecutor(2) as remover:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300)) as session:

            async def client() -> None:
                nonlocal tokens
                for i, ids in todo:
                    rid = new_rid(lease, i) if capture else f"plain-{lease}-{i}"
                    body = {"rid": rid, "input_ids": ids, "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
                    async with session.post(f"{url}/generate", json=body) as response:
                        reply = await response.json()
                        assert response.status == 200, reply
                    if capture:
                        outcome = reply["meta_info"]["capture"]
                        assert outcome["status"] == "ok" and outcome["rows"] == len(ids), outcome
                        remover.submit((tap / outcome["path"]).unlink)
                    tokens += len(ids)
                    curve.append((time.monotonic() - started, tokens))

            await asyncio.gather(*(client() for _ in range(args.concurrency)))
    shutil.rmtree(folder)
    return curve


class Workers:
    """A rig whose engine is the running one."""

    def __init__(self, args: argparse.Namespace, profile: CaptureProfile, redis_url: str) -> None:
        self.rig = Rig(args.store / "rig", redis_url, profile, window=args.concurrency // 2 * 2)
        shutil.rmtree(self.rig.tap)
        self.rig.tap = args.tap
        self.rig.env |= {"STATETAP_TAP": str(args.tap), "STATETAP_ENGINE_URL": args.url, "STATETAP_TAP_BYTES": str(args.tap_bytes)}
        self.rig.env |= {"STATETAP_WRITE_THREADS": str(args.write_threads)}
        for i in range(2):
            self.rig.start_worker(f"worker-{i}", STATETAP_WORKERS_PER_ENGINE=2)

    def job(self, args: argparse.Namespace, seed: int) -> Curve:
        name = f"job-{seed}"
        job = self.rig.make_job(
            prompts(args, seed), batch_tokens=args.tokens // 4, job_id=name, dataset_id=f"ds-{seed}", encoding=args.encoding
        )
        job.give()
        started, curve = time.monotonic(), [(0.0, 0)]
        want = len(prompts(args, seed))
        while (totals := job.totals()) is not None:
            tokens = sum(t.tokens for t in totals.values())
            if tokens > curve[-1][1]:
                curve.append((time.monotonic() - started, tokens))
            if sum(t.rows for t in totals.values()) == want and not job.outstanding():
                break
            assert time.monotonic() - started < 300, self.log()
            time.sleep(0.02)
        assert sum(t.done for t in totals.values()) == want, (totals, self.log())
        self.stall = max(b[0] - a[0] for a, b in itertools.pairwise(curve[1:]))
        shutil.rmtree(job.dir)
        shutil.rmtree(job.rows_path.parent)
        return curve

    def log(self) -> str:
        return "".join(p.log[-3000:] for p in self.rig.processes)

    def close(self) -> None:
        self.rig.tap = self.rig.folder / "not-ours"
        self.rig.__exit__()


def disk_rate(folder: Path, size: int, threads: int, total: int) -> float:
    """Bytes a second of files of ``size``, each fsynced, by so many threads."""
    folder.mkdir()
    data = memoryview(np.random.default_rng(1).bytes(size))
    count = max(threads, total // size)

    def write(i: int) -> None:
        with open(folder / str(i), "wb", buffering=0) as f:
            f.write(data)
            os.fsync(f.fileno())

    with ThreadPoolExecutor(threads) as pool:
        started = time.monotonic()
        list(pool.map(write, range(count)))
        rate = count * size / (time.monotonic() - started)
    shutil.rmtree(folder)
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("tap", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=800_000, help="a round and mode")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--vocab", type=int, default=128_000)
    parser.add_argument("--tap-bytes", type=int, default=24 << 30)
    parser.add_argument("--write-threads", type=int, default=2)
    parser.add_argument("--encoding", default="raw", choices=[e.value for e in Encoding], help="of the job's files")
    parser.add_argument("--modes", default="plain,tap,disk")
    parser.add_argument("--other", nargs=2, metavar=("URL", "TAP"), help="a second engine, for the mode `other`")
    parser.add_argument("--figures", default="", help="prefix of the figures' names")
    args = parser.parse_args()
    profile = CaptureProfile.from_dict(json.loads((args.tap / READY_FILE).read_text())["profile"])
    modes = args.modes.split(",")
    args.store.mkdir(parents=True, exist_ok=True)
    redis = workers = None
    if "disk" in modes:
        redis = RedisServer(args.store / "redis")
        redis.start()
        workers = Workers(args, profile, redis.url)
    run: dict[str, Callable[[int], Curve]] = {
        "plain": lambda seed: asyncio.run(requests(args, seed, capture=False)),
        "tap": lambda seed: asyncio.run(requests(args, seed, capture=True)),
        "other": lambda seed: asyncio.run(requests(args, seed, capture=True, other=True)),
        "disk": lambda seed: workers.job(args, seed) if workers else [],
    }
    rates: dict[str, list[float]] = {mode: [] for mode in [*modes, "disk_bytes"]}
    try:
        short, whole = args.tokens // 4, args.tokens
        for warm in (True, *[False] * args.rounds):
            args.tokens = short if warm else whole
            seed, told = time.time_ns() % 1_000_000, {}
            for mode in modes:
                rate = steady(run[mode](seed))
                told[mode] = round(rate)
                if not warm:
                    rates[mode].append(rate)
            if "disk" in modes and not warm:
                rates["disk_bytes"].append(
                    disk_rate(
                        args.store / "plain",
                        args.length * profile.bytes_per_token,
                        4,
                        min(6 << 30, 200 * args.length * profile.bytes_per_token),
                    )
                )
                told["disk_gb_s"] = round(rates["disk_bytes"][-1] / 1e9, 3)
            if workers is not None:
                told["longest_stall_s"] = round(workers.stall, 2)  # without a row committed
            print(json.dumps({"warm": warm, **told}), flush=True)
    finally:
        if workers is not None:
            workers.close()
        if redis is not None:
            redis.stop()
        shutil.rmtree(args.store, ignore_errors=True)
    report(args, profile, rates)


def report(args: argparse.Namespace, profile: CaptureProfile, rates: dict[str, list[float]]) -> None:
    from tests.support.figures import print_figure

    m = {k: statistics.median(v) for k, v in rates.items() if v}
    figures = {}
    if "tap" in m and "plain" in m:
        figures["capture_over_plain"] = statistics.median(a / b for a, b in zip(rates["tap"], rates["plain"], strict=True)), "ratio"
        figures["tap_tok_s"] = m["tap"], "tok/s"
        figures["tap_gb_s"] = m["tap"] * profile.bytes_per_token / 1e9, "GB/s"
    if "tap" in m and "other" in m:
        figures["tap_over_other"] = statistics.median(a / b for a, b in zip(rates["tap"], rates["other"], strict=True)), "ratio"
    if "disk" in m and "plain" not in m:
        figures[f"disk_{args.encoding}_tok_s"] = m["disk"], "tok/s"
    if "disk" in m and "plain" in m:
        least = [min(p, d / profile.bytes_per_token) for p, d in zip(rates["plain"], rates["disk_bytes"], strict=True)]
        figures["disk_over_min"] = statistics.median(a / b for a, b in zip(rates["disk"], least, strict=True)), "ratio"
        figures["disk_tok_s"] = m["disk"], "tok/s"
        figures["disk_own_gb_s"] = m["disk_bytes"] / 1e9, "GB/s"
    rounds = "; ".join(f"{mode} {', '.join(f'{r:,.0f}' for r in v)}" for mode, v in rates.items() if v)
    note = (
        f"SGLang {profile.sglang_version}, H {profile.hidden}, L {profile.num_layers}, {profile.dtype}, {args.rounds} interleaved rounds of {args.tokens:,} tokens, "
        f"prompts of about {args.length} tokens, concurrency {args.concurrency}, {args.write_threads} write threads a worker; {rounds}"
    )
    for name, (value, unit) in figures.items():
        prefix = f"{args.figures}." if args.figures else ""
        print_figure(prefix + name, round(value, 4 if unit == "ratio" else 1), unit, "python -m tests.bench.gpu.rates URL TAP STORE", note)


if __name__ == "__main__":
    main()
