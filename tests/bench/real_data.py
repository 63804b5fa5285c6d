"""Takes real datasets through the whole stack (real SGLang on this CPU, the tiny model) to COMPLETE and prints what was seen.

    python -m tests.bench.real_data DATA [DATA ...]        one JSON object a figure on stdout, progress on stderr

Rates are from the first to the last moment of the job; RSS is the largest sum of a service's processes, sampled four times a second
(a horse shares most of its pages with its parent, so the sum overstates).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from statetap.engine.tiny import make_tiny
from tests.support.figures import print_figure
from tests.support.stack import Up, cli, process_tree, start_up

ROOT = Path(__file__).resolve().parents[2]
ENDED = ("completed", "completed_with_errors", "failed", "cancelled")


class Rss:
    """Peak RSS in MiB of each kind of process of a stack."""

    def __init__(self, up: Up) -> None:
        self._up, self.peak, self._stop = up, {}, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(0.25):
            sums: dict[str, float] = {}
            for name, pid in self._up.pids().items():
                kind = name.split("-")[0]
                sums[kind] = max(sums.get(kind, 0.0), sum(map(_rss_mib, process_tree(pid))))
            for kind, mib in sums.items():
                self.peak[kind] = max(self.peak.get(kind, 0.0), mib)

    def stop(self) -> dict[str, float]:
        self._stop.set()
        self._thread.join()
        return self.peak


def _rss_mib(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS")), 0.0)


def one(up: Up, data: Path, tokenizer: Path) -> bool:
    """Submit, wait, verify, print; True when it is whole."""
    rss = Rss(up)
    with data.open("rb") as f:
        dataset = up.post("/v1/datasets", files={"file": (data.name, f)}, data={"tokenizer": str(tokenizer)})
    while dataset["state"] == "ingesting":
        time.sleep(0.2)
        dataset = up.get(f"/v1/datasets/{dataset['dataset_id']}")
    assert dataset["state"] == "ready", dataset
    job = up.post("/v1/jobs", json={"dataset_id": dataset["dataset_id"]})
    while job["state"] not in ENDED:
        time.sleep(0.5)
        job = up.job(job["job_id"])
        print(f"{data.name}: {job['rows']} {job['rates']['tokens_per_s']:.0f} tok/s", file=sys.stderr, flush=True)
    rows, seconds = job["rows"], job["ended_at"] - job["started_at"]
    verified = cli("verify", job["path"], timeout=600)
    whole = (
        rows["done"] + rows["failed"] + rows["skipped"] == rows["total"]
        and verified.returncode == 0
        and (Path(job["path"]) / "COMPLETE").exists()
    )
    note = f"{rows['done']} done + {rows['failed']} failed + {rows['skipped']} skipped = {rows['total']} rows, {job['tokens']['done']} tokens, {job['state']}"
    stem = data.stem.split(".")[0]
    command = f"python -m tests.bench.real_data {data.name}"
    for name, value, unit in [
        ("rows_per_s", rows["done"] / seconds, "rows/s"),
        ("tok_per_s", job["tokens"]["done"] / seconds, "tokens/s"),
        *((f"rss_{kind}_mib", mib, "MiB") for kind, mib in rss.stop().items()),
    ]:
        print_figure(f"real_data.{stem}.{name}", round(value, 1), unit, command, note)
    if not whole:
        print(verified.stdout, job, file=sys.stderr)
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="+", type=Path)
    data = parser.parse_args().data
    base = ROOT / ".statetap"
    base.mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="real-data-", dir=base))
    try:
        model = make_tiny(work / "model")
        up = start_up(work / "store", model, work / "up.log")
        try:
            results = [one(up, d, model) for d in data]
            return 0 if all(results) else 1
        finally:
            up.stop()
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
