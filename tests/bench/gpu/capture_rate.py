"""Prefill rate of a running Statetap engine without and with capture to the tap, in interleaved rounds.

    python -m tests.bench.gpu.capture_rate URL TAP [--rounds 3] [--requests 128] [--concurrency 32] [--length 2000] [--vocab 128000]

Both kinds of requests go to the same engine: those without capture carry an ordinary rid. Tap files are removed as a worker does,
after their reply. Prints JSON lines: tok/s of every round, medians, their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp

from statetap.contracts.capture import LEASE_FILE, new_lease, new_rid


async def one_round(args: argparse.Namespace, capture: bool) -> tuple[float, float]:
    """(tok/s, captured bytes/s) of one round."""
    rnd = random.Random(time.time_ns())
    prompts = [
        [rnd.randrange(10, args.vocab) for _ in range(rnd.randint(args.length * 95 // 100, args.length * 105 // 100))]
        for _ in range(args.requests)
    ]
    lease = new_lease()
    folder = args.tap / lease
    folder.mkdir()
    (folder / LEASE_FILE).write_text("{}")
    todo, tokens, written = iter(enumerate(prompts)), 0, 0
    remover = ThreadPoolExecutor(2)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:

        async def client() -> None:
            nonlocal tokens, written
            for i, ids in todo:
                rid = new_rid(lease, i) if capture else f"plain-{lease}-{i}"
                body = {"rid": rid, "input_ids": ids, "sampling_params": {"max_new_tokens": args.new_tokens, "temperature": 0}}
                async with session.post(f"{args.url}/generate", json=body) as response:
                    reply = await response.json()
                    assert response.status == 200, reply
                if capture:
                    outcome = reply["meta_info"]["capture"]
                    assert outcome["status"] == "ok" and outcome["rows"] == len(ids), outcome
                    path = args.tap / outcome["path"]
                    written += path.stat().st_size
                    remover.submit(path.unlink)
                tokens += len(ids)

        started = time.monotonic()
        await asyncio.gather(*(client() for _ in range(args.concurrency)))
        seconds = time.monotonic() - started
    remover.shutdown()
    (folder / LEASE_FILE).unlink()
    folder.rmdir()
    return tokens / seconds, written / seconds


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("tap", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--vocab", type=int, default=128_000)
    parser.add_argument("--new-tokens", type=int, default=0)
    args = parser.parse_args()
    for capture in (False, True):
        await one_round(args, capture)  # warm
    rates: dict[bool, list[float]] = {False: [], True: []}
    gigabytes = []
    for _ in range(args.rounds):
        for capture in (False, True):
            rate, written = await one_round(args, capture)
            rates[capture].append(rate)
            if capture:
                gigabytes.append(written / 1e9)
    plain, captured = statistics.median(rates[False]), statistics.median(rates[True])
    print(json.dumps({"plain_tok_s": rates[False], "capture_tok_s": rates[True], "capture_gb_s": gigabytes}))
    print(json.dumps({"capture_over_plain": captured / plain, "tap_tok_s": captured, "gb_s": statistics.median(gigabytes)}))


if __name__ == "__main__":
    asyncio.run(main())
