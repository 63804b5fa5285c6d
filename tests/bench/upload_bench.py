"""That uploads stream: what a large one costs in memory, on both sides, and how fast it goes, with a client killed in its middle.

A real coordinator process on a real disk, and ``Client.upload`` in a process of its own. The first client is killed (SIGKILL) while it
sends a piece past the half; a second one goes on by offset (``resume=``) to the end, which is a dataset of the bytes. Nothing ingests it:
the request to do so stays in redis. What is stored is compared with the source after the clock has stopped.

``python -m tests.bench.upload_bench URL FILE [UPLOAD_ID]`` is that client; the benchmark is ``python -m tests.bench.bench --only upload``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import xxhash

from statetap.client import Client
from statetap.client.flows import BLOCK

MIB = 1 << 20
GROWTH_LIMIT_MIB = 64.0  # a few pieces and blocks; a coordinator that held an upload would grow by all of it
SPARE_BYTES = 2 << 30  # of the disk, beyond what is uploaded: the coordinator itself pauses work below 1 GiB
MARK = 32  # random bytes in each MiB of the source


def upload(folder: Path, size: int) -> tuple[float, float, str]:
    """(MiB by which the coordinator's RSS grew, MiB/s from the first byte to the dataset, how) of an upload of ``size`` bytes."""
    # Here, not above: the client's process shall hold the client and no pyarrow, rq or numpy.
    import psutil

    from tests.support.coordinator import Coordinator
    from tests.support.redis import RedisServer

    free = shutil.disk_usage(folder).free
    assert free > size + SPARE_BYTES, f"the upload needs {size + SPARE_BYTES:,} bytes of disk in {folder}, and {free:,} are free"
    source = folder / "rows.jsonl"
    _make_source(source, size)
    server = RedisServer(folder / "redis")
    server.start()
    (folder / "coordinator").mkdir()
    coordinator = Coordinator(folder / "coordinator", server.url)
    clients: list[_ClientProcess] = []
    try:
        coordinator.start()
        assert coordinator.http.get("/readyz").status_code == 200
        before = _start_peak(coordinator.pid)

        clients.append(_ClientProcess(str(coordinator.http.base_url), source))
        part = _killed_past(clients[0], coordinator.store, size // 2)
        killed_at = time.monotonic()
        clients.append(_ClientProcess(str(coordinator.http.base_url), source, part.stem))
        result = clients[1].result(seconds=3600)

        growth = _status_mib(coordinator.pid, "VmHWM") - before
        cpu, load = psutil.Process(coordinator.pid).cpu_times(), os.getloadavg()[0]
        dataset = coordinator.http.get(f"/v1/datasets/{result['dataset_id']}").json()
        assert dataset["state"] == "ingesting", dataset  # and stays so: nobody takes it
        assert size // 2 <= result["resumed_at"] < size, result
        stored = list((coordinator.store / "datasets" / result["dataset_id"] / "raw").iterdir())
        assert [p.stat().st_size for p in stored] == [size], stored
        assert not part.exists()
        assert _xxh3(stored[0]) == _xxh3(source), "the stored bytes are not the source's"
    finally:
        for client in clients:
            client.kill()
        coordinator.close()
        server.kill()

    rate = size / MIB / (result["ended"] - clients[0].ready["began"])
    client_growth = max(clients[0].growth_mib, result["growth_mib"])
    note = (
        f"{size / 1e9:g} GB by Client.upload in pieces of {BLOCK // MIB} MiB, each fsynced before its answer; the first client killed past the half, "
        f"resumed at byte {result['resumed_at']:,} ({result['resumed_at'] % BLOCK:,} of a piece kept) {result['began'] - killed_at:.1f} s later, "
        f"which counts; RSS of the coordinator {before:.0f} MiB before, its peak (VmHWM) {before + growth:.0f} MiB; "
        f"of the client it grew by {client_growth:.1f} MiB; stored size and xxh3 equal; source sparse, on the same disk; no ingestion; "
        f"CPU of the coordinator {cpu.user + cpu.system:.0f} s; load average at the end {load:.1f}, of all that runs there"
    )
    assert growth <= GROWTH_LIMIT_MIB, f"the coordinator grew by {growth:.1f} MiB: {note}"
    assert client_growth <= GROWTH_LIMIT_MIB, f"the client grew by {client_growth:.1f} MiB: {note}"
    return growth, rate, note


def _make_source(path: Path, size: int) -> None:
    """A sparse file; random bytes at another place in each MiB, so that a piece that is lost, doubled or moved changes what is stored."""
    chosen = random.Random(6)
    with path.open("wb") as f:
        f.truncate(size)
        for start in range(0, size - MIB, MIB):
            f.seek(start + chosen.randrange(MIB - MARK))
            f.write(chosen.randbytes(MARK))


def _killed_past(client: _ClientProcess, store: Path, offset: int) -> Path:
    """Kill the client early in the first piece that begins at ``offset`` or later; the file of the upload's bytes."""
    incoming = store / "datasets" / ".incoming"
    while True:
        assert client.running, "the client ended before it was to be killed"
        for part in incoming.glob("up-*.part"):
            at = part.stat().st_size
            # Early in a piece, since what the kernel has taken of it still arrives.
            if at >= offset and 0 < at % BLOCK <= 2 * MIB:
                client.kill()
                return part
        time.sleep(0.0005)  # between two looks


class _ClientProcess:
    """This module as a process. ``ready`` is what it said before it began: its RSS, and when."""

    def __init__(self, url: str, source: Path, *resume: str) -> None:
        command = [sys.executable, "-m", "tests.bench.upload_bench", url, str(source), *resume]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.ready = self._line()
        self.growth_mib = 0.0  # until it was killed

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        if self.running:
            self.growth_mib = _status_mib(self._process.pid, "VmHWM") - self.ready["rss_mib"]
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def result(self, seconds: float) -> dict[str, Any]:
        assert self._process.wait(seconds) == 0, "the client failed; its message is above"
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found


def _start_peak(pid: int | str) -> float:
    """The RSS now, from which VmHWM counts from here on. Where the kernel does not let us, VmHWM is of the start too: growth only looks
    larger than it is."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status_mib(pid, "VmRSS")


def _status_mib(pid: int | str, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def _xxh3(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as f:
        # What is on disk, not what is still in memory: pages that were fsynced can be dropped.
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := f.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _client(url: str, source: Path, resume: str | None) -> None:
    """Upload, and tell on stdout how it is before and after."""
    offsets: list[int] = []  # the first two that were told: 0, and where the coordinator stands

    def progress(sent: int, total: int) -> None:
        if len(offsets) < 2:
            offsets.append(sent)

    with Client(url, api_key="") as client:
        before, began = _start_peak("self"), time.monotonic()
        print(json.dumps({"rss_mib": before, "began": began}), flush=True)
        dataset = client.upload(source, resume=resume, progress=progress, resumable_above=0, format="tokenized", name="bench")
        ended = time.monotonic()  # one clock for all processes
    growth = _status_mib("self", "VmHWM") - before
    told = {"dataset_id": dataset.dataset_id, "resumed_at": offsets[1], "growth_mib": growth, "began": began, "ended": ended}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    _client(sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
