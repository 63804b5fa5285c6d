"""The real stack by its command line, and what a test asks of the store afterwards."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

T = TypeVar("T")

STATETAP = [sys.executable, "-m", "statetap.cli"]


def cli(*args: str | Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*STATETAP, *map(str, args)], capture_output=True, text=True, timeout=timeout)


def wait_for(what: str, look: Callable[[], T | None], timeout: float = 120.0, every: float = 0.05) -> T:
    """The first true value that ``look`` gives; an AssertionError that names ``what`` when none comes in time."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = look()
        if value:
            return value
        time.sleep(every)
    raise AssertionError(f"not within {timeout:.0f} s: {what}")


def tokenized(path: Path, rows: int, length: int, *, seed: int = 1, vocab: int = 600) -> list[list[int]]:
    """A dataset of tokenised rows of about ``length`` tokens; the ids are returned."""
    rnd = random.Random(seed)
    ids = [[rnd.randint(5, vocab - 1) for _ in range(rnd.randint(length // 2, length * 3 // 2))] for _ in range(rows)]
    path.write_text(
        "".join(json.dumps({"id": f"r{i}", "input_ids": row, "loss_mask": [0] + [1] * (len(row) - 1)}) + "\n" for i, row in enumerate(ids))
    )
    return ids


def process_tree(pid: int) -> list[int]:
    """A process and all below it, by /proc."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
        except OSError:
            continue
    tree, todo = [], [pid]
    while todo:
        tree.append(todo.pop())
        todo += parents.get(tree[-1], [])
    return tree


def kill_tree(pid: int) -> None:
    for one in process_tree(pid):
        try:
            os.kill(one, signal.SIGKILL)
        except ProcessLookupError:
            continue


@dataclass(kw_only=True)
class Up:
    """``statetap up`` as a process."""

    process: subprocess.Popen[str]
    store: Path
    log: Path
    url: str = ""

    def get(self, path: str) -> dict[str, Any]:
        response = httpx.get(self.url + path, timeout=30)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def post(self, path: str, **kwargs: Any) -> dict[str, Any]:
        response = httpx.post(self.url + path, timeout=60, **kwargs)
        assert response.status_code in (200, 202), response.text
        return dict(response.json())

    def job(self, job_id: str) -> dict[str, Any]:
        return self.get(f"/v1/jobs/{job_id}")

    def pids(self) -> dict[str, int]:
        """Name of each process of the stack -> its id."""
        return dict(json.loads((self.store / ".stack" / "processes.json").read_text()))

    def stop(self, timeout: float = 120) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


def start_up(store: Path, model: Path, log: Path, *args: str) -> Up:
    """Start, and wait until the API answers and the engine is registered."""
    with log.open("w") as out:
        process = subprocess.Popen(
            [*STATETAP, "up", "--cpu", "--model", str(model), "--store", str(store), "--port", "0", *args],
            stdout=out,
            stderr=out,
            text=True,
        )
    up = Up(process=process, store=store, log=log)

    def api() -> str | None:
        assert process.poll() is None, log.read_text()
        return next(
            (w for line in log.read_text().splitlines() if " API at " in line for w in line.split() if w.startswith("http://")), None
        )

    up.url = wait_for("the API", api)
    wait_for("a live engine", lambda: up.get("/v1/engines")["items"])
    return up


def ledger_lines(job_dir: Path) -> list[dict[str, Any]]:
    """All whole lines of a job's ledger that are of a row (a killed writer may leave a torn one)."""
    lines = [line for f in sorted((job_dir / "ledger").iterdir()) for line in f.read_text().splitlines(keepends=True)]
    return [found for found in (json.loads(line) for line in lines if line.endswith("\n")) if "row" in found]
