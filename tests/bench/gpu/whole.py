"""The whole service on a GPU, by its command line, as a user has it:

    python -m tests.bench.gpu.whole MODEL STORE [--dummy FOLDER] [--tokens 1000000] -- FLAGS OF SGLANG

1. ``statetap run`` of conversations on MODEL (a folder of tests.bench.gpu.models; it gets a tokenizer), ``verify``, ``parity``.
2. ``statetap up`` on the shape in FOLDER with dummy weights: plain requests to its engine, a job over the same prompts by REST, and a second
   job whose engine is killed in the middle.

Prints what was found, and at the end one JSON object a figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from statetap.engine.tiny import make_tokenizer
from statetap.store.ledger import JobLedger
from tests.bench.gpu.rates import Curve, prompts, requests, steady
from tests.support.figures import print_figure
from tests.support.stack import STATETAP, Up, cli, kill_tree, wait_for

COMMAND = "python -m tests.bench.gpu.whole MODEL STORE --dummy FOLDER -- FLAGS"
ENDED = ("completed", "completed_with_errors", "failed", "cancelled")


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def conversations(path: Path, rows: int) -> None:
    with path.open("w") as f:
        for i in range(rows):
            turns = [
                {"role": "user", "content": f"Question {i}: what is {i} times {i + 1}? " * (1 + i % 40)},
                {"role": "assistant", "content": f"It is {i * (i + 1)}. " * (1 + i % 30)},
            ]
            f.write(json.dumps({"id": f"c{i}", "messages": turns}) + "\n")


def run_and_compare(model: Path, store: Path, cpu: list[str], flags: list[str]) -> None:
    """Raises AssertionError with what was said."""
    make_tokenizer(model)
    data = store / "chat.jsonl"
    conversations(data, 2_000)
    began = time.monotonic()
    done = cli("run", data, *cpu, "--model", model, "--out", store / "states", "--", *flags, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    took = time.monotonic() - began
    (job,) = (store / "states" / "jobs").iterdir()
    complete = json.loads((job / "COMPLETE").read_text())
    assert (complete["done"], sum(e["rows"] for e in complete["engines"])) == (2_000, 2_000), complete
    verified = cli("verify", job, "--json")
    assert verified.returncode == 0 and json.loads(verified.stdout)["files"] == 2_000, verified.stdout
    parity = cli("parity", job, "--model", model, "--samples", "16", "--json", timeout=400)
    assert parity.returncode == 0, parity.stdout + parity.stderr
    found = json.loads(parity.stdout)
    note = f"statetap run of 2,000 conversations, {complete['tokens']:,} tokens, SGLang {complete['engines'][0]['sglang_version']}"
    worst = f"the worst boundary, against transformers; one boundary off: {found['shifted']:.2f}; {note}"
    print_figure("gpu.run_s", round(took, 1), "s", COMMAND, f"from the command to its end: {note}")
    print_figure("gpu.run_parity", round(found["worst"], 4), "relative error", COMMAND, worst)


def start(model: Path, store: Path, cpu: list[str], flags: list[str]) -> Up:
    store.mkdir(parents=True, exist_ok=True)
    log = store / "up.log"
    env = {**os.environ, "STATETAP_ENGINE_ALLOW_UNCHECKED": "1"}  # dummy weights change the stream too little for the controls
    command = [*STATETAP, "up", *cpu, "--model", str(model), "--store", str(store), "--port", "0", "--", *flags, "--load-format", "dummy"]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, text=True, env=env)
    up = Up(process=process, store=store, log=log)

    def url() -> str:
        assert process.poll() is None, log.read_text()[-3000:]
        found = [word for word in log.read_text().split() if word.startswith("http://")]
        return found[0].rstrip("/") if found else ""

    up.url = wait_for("the API", url)
    wait_for("the engine", lambda: process.poll() is not None or up.get("/v1/engines")["items"], 300)
    return up


def submit(up: Up, rows: list[list[int]], name: str) -> str:
    data = up.store / f"{name}.jsonl"
    data.write_text("".join(json.dumps({"input_ids": r, "loss_mask": [1] * len(r)}) + "\n" for r in rows))
    with data.open("rb") as f:
        dataset = up.post("/v1/datasets", files={"file": (data.name, f)}, data={"name": name})["dataset_id"]
    ended = wait_for("ingestion", lambda: (d := up.get(f"/v1/datasets/{dataset}"))["state"] != "ingesting" and d)
    assert ended["state"] == "ready", ended
    return str(up.post("/v1/jobs", json={"dataset_id": dataset, "name": name})["job_id"])


def job_curve(up: Up, job: str, kill_at: float = 2.0) -> tuple[Curve, float]:
    """Tokens over time by the status, and when the engine was killed, at this share of the tokens (Unix time)."""
    began, curve, killed = time.monotonic(), [(0.0, 0)], 0.0
    while True:
        seen, at = up.job(job), time.monotonic() - began
        tokens = seen["tokens"]["done"]
        if tokens > curve[-1][1]:
            curve.append((at, tokens))
        if not killed and tokens > kill_at * seen["tokens"]["total"]:
            kill_tree(up.pids()["engine-0"])
            killed = time.time()
        if seen["state"] in ENDED:
            assert seen["state"] == "completed" and not seen["rows"]["open"], seen
            return curve, killed
        assert at < 400, seen
        time.sleep(0.1)


def loaded(args: argparse.Namespace, cpu: list[str], flags: list[str]) -> None:
    up = start(args.dummy, args.store / "big", cpu, flags)
    try:
        (engine,) = up.get("/v1/engines")["items"]
        args.url = engine["url"]
        (tap,) = {p.parent for p in Path("/dev/shm").glob("statetap-*/engine-0/READY.json")}
        args.tap = tap
        rates: list[tuple[float, float]] = []  # plain, job
        whole, args.tokens = args.tokens, args.tokens // 4
        for n in range(1 + args.rounds):
            plain = steady(asyncio.run(requests(args, n, capture=False)))
            job = submit(up, prompts(args, n), f"measured-{n}")
            rates.append((plain, steady(job_curve(up, job)[0])))
            assert cli("rm", job, "--yes", "--url", up.url).returncode == 0  # the disk is not for all of them
            args.tokens = whole
        rates = rates[1:]  # the first warms up
        job = submit(up, prompts(args, 99), "killed")
        _, killed = job_curve(up, job, kill_at=0.3)
        shown = up.job(job)
        starts = shown["engines"]
        assert len(starts) == 2 and sum(e["rows"] for e in starts) == shown["rows"]["done"], starts
        ledger = JobLedger(Path(shown["path"]))
        second = [r.at for b in ledger.batches() for r in ledger.records(b).values() if r.engine == starts[1]["boot_id"]]
        back = min(second) - killed
        report = cli("verify", shown["path"], "--json", timeout=300)
        assert report.returncode == 0, report.stdout[-2000:]
        say(plain_and_job=[[round(r) for r in pair] for pair in rates], back_s=round(back, 1), starts=starts)
        profile = engine["profile"]
        note = (
            f"SGLang {profile['sglang_version']}, H {profile['hidden']}, L {profile['num_layers']}, {profile['dtype']}; {args.rounds} rounds of {whole:,} tokens, prompts of about "
            f"{args.length}; statetap up, the job by REST; plain: requests without capture to the same engine; "
            f"plain and job {', '.join(f'{p:,.0f} {j:,.0f}' for p, j in rates)}"
        )
        print_figure("gpu.service_over_plain", round(statistics.median(j / p for p, j in rates), 4), "ratio", COMMAND, note)
        print_figure("gpu.service_tok_s", round(statistics.median(j for _, j in rates)), "tok/s", COMMAND, note)
        print_figure(
            "gpu.engine_back_s",
            round(back, 1),
            "s",
            COMMAND,
            "SIGKILL of the engine in a job until the next row is committed; dummy weights",
        )
    except BaseException:
        print(up.log.read_text()[-3000:], file=sys.stderr)
        for log in sorted((up.store / ".stack" / "logs").glob("*.log")):
            print(f"== {log.name}\n{log.read_text()[-1500:]}", file=sys.stderr)
        raise
    finally:
        up.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--dummy", type=Path, help="folder with the config.json of a shape")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=800_000, help="a round")
    parser.add_argument("--length", type=int, default=2_000)
    parser.add_argument("--vocab", type=int, default=128_000)
    parser.add_argument("--cpu", action="store_true", help="without a GPU, to try this script")
    parser.add_argument("--concurrency", type=int, default=64)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, flags = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    cpu = ["--cpu"] if args.cpu else []
    args.store.mkdir(parents=True, exist_ok=True)
    try:
        run_and_compare(args.model, args.store, cpu, flags)
        if args.dummy:
            loaded(args, cpu, flags)
    finally:
        shutil.rmtree(args.store, ignore_errors=True)


if __name__ == "__main__":
    main()
