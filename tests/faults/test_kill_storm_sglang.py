"""Row 1 of reliability.md on the real SGLang: a storm of kills over ``statetap up``, whose supervisor starts again what was killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from statetap.engine.tiny import make_tiny
from tests.faults.forms import FULL, SEED
from tests.support.stack import Up, cli, ledger_lines, start_up, tokenized, wait_for

ROWS = 4_000
KILLS = 40


def victims(up: Up) -> list[int]:
    """The coordinator, the workers and their horses."""
    pids = [pid for name, pid in up.pids().items() if name == "coordinator" or name.startswith("worker-")]
    for pid in list(pids):
        with contextlib.suppress(psutil.NoSuchProcess):
            pids += [child.pid for child in psutil.Process(pid).children()]
    return pids


@pytest.mark.sglang
@pytest.mark.timeout(900)
@pytest.mark.skipif(not FULL, reason="minutes: in the full form, by `make faults`")
def test_a_storm_of_kills_over_the_real_engine_leaves_what_transformers_computes(tmp_path: Path) -> None:
    """Seen to fail with a supervisor that gives up a process for having been killed six times within minutes: the stack ended after 97 s."""
    model, data = make_tiny(tmp_path / "tiny"), tmp_path / "rows.jsonl"
    tokenized(data, ROWS, 150, seed=SEED)
    chosen, kills = random.Random(SEED), 0
    up = start_up(tmp_path / "store", model, tmp_path / "up.log", "--data-dir", str(tmp_path))
    try:
        dataset = up.post("/v1/datasets", json={"path": str(data)})["dataset_id"]
        wait_for("ingestion", lambda: up.get(f"/v1/datasets/{dataset}")["state"] == "ready")
        job = up.post("/v1/jobs", json={"dataset_id": dataset})
        control = Path(job["path"]) / "control.json"

        def over() -> bool:
            return bool(json.loads(control.read_bytes())["state"] == "completed")

        deadline = time.monotonic() + 600
        while not over():
            following = time.monotonic() + chosen.uniform(0.5, 2.0)
            found = victims(up)  # none while all are being started
            with contextlib.suppress(ProcessLookupError):
                if found:
                    os.kill(chosen.choice(found), signal.SIGKILL)
                    kills += 1
            wait_for("the next kill or the end", lambda f=following: over() or time.monotonic() > f)
            assert time.monotonic() < deadline, f"not over after {kills} kills"
        job_dir = Path(job["path"])
        assert Counter(line["row"] for line in ledger_lines(job_dir) if line["state"] == "done") == Counter(range(ROWS))
        assert len(list(job_dir.glob("rows_*/*"))) == ROWS
        assert cli("verify", job_dir).returncode == 0
        parity = cli("parity", job_dir, "--model", model, "--samples", "200", "--json")
        compared = json.loads(parity.stdout)
        worst = compared["worst"]
        print(f"\n{ROWS:,} rows, {kills} kills; worst relative error of 200 rows against transformers {worst:.1e}")
        assert compared["ok"] and compared["rows"] == 200 and kills >= KILLS
    finally:
        up.stop()
