"""bench.commit_over_copy: our way from the tap to the store against a plain copy of the same files."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from statetap.contracts.capture import new_lease
from statetap.contracts.sample_format import SampleFormat
from statetap.store.commit import Committer
from statetap.store.rows import RowsFile
from statetap.store.sample import SampleWriter
from tests.support.jobs import StateMaker, make_job, profile

FILES = 8  # a round is half a GiB: with fewer, the last fsync, which nothing overlaps, weighs as much as the rest
TOKENS = 1170  # x 57,344 B a token (the README's run: K = 3 of H = 7,168, and the final) = 64 MiB


def commit_over_copy(folder: Path, rounds: int) -> tuple[float, str]:
    """(ratio of bytes a second, how): median of the rounds' own ratios, with one thread and with two (the worker's default); the lower one."""
    p = profile(hidden=7168, layers=61, boundaries=(2, 30, 58), vocab=160_000, max_length=8192)
    tap = Path(tempfile.mkdtemp(prefix="statetap-bench-", dir="/dev/shm"))
    try:
        rows = np.random.default_rng(1).integers(0, 160_000, (FILES, TOKENS)).tolist()
        job_dir, rows_path, _ = make_job(folder / "store", p, rows)
        source, maker = RowsFile(rows_path), StateMaker(p)
        made = [maker.tap_file(row.input_ids) for row in source.read(0, FILES)]
        taps = [tap / f"{n}.safetensors" for n in range(FILES)]
        size = FILES * SampleFormat(p).bytes(TOKENS)
        target = folder / "copy"
        target.mkdir()

        def copy(path: Path) -> None:
            with open(path, "rb", buffering=0) as r, open(target / path.name, "wb", buffering=0) as w:
                while block := r.read(1 << 20):
                    w.write(block)
                os.fsync(w.fileno())

        def copies(pool: ThreadPoolExecutor) -> None:
            list(pool.map(copy, taps))

        def commits(pool: ThreadPoolExecutor) -> None:
            lease = new_lease()
            told: list[object] = []
            committer = Committer(job_dir, SampleFormat(p), 0, lease, told.extend)
            writer = SampleWriter(job_dir, SampleFormat(p), lease)
            for staged in pool.map(lambda row: writer.stage(row, 0, taps[row.row]), source.read(0, FILES)):
                committer.submit(staged)
            committer.hurry(True)
            committer.close()
            assert len(told) == FILES

        def timed(work: Callable[[ThreadPoolExecutor], None], pool: ThreadPoolExecutor) -> float:
            for path, data in zip(taps, made, strict=True):
                path.write_bytes(data)
            started = time.perf_counter()
            work(pool)
            seconds = time.perf_counter() - started
            for file in [*target.iterdir(), *job_dir.rglob("data_*"), *(job_dir / "ledger").glob("*")]:
                file.unlink()
            os.sync()  # what the removal costs is neither's
            return size / seconds / 1e9

        speeds: dict[str, list[float]] = {}
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(2) as two:
            for _ in range(rounds):
                for name, work, pool in (
                    ("commit1", commits, one),
                    ("copy1", copies, one),
                    ("commit2", commits, two),
                    ("copy2", copies, two),
                ):
                    speeds.setdefault(name, []).append(timed(work, pool))
        source.close()
        m = {name: statistics.median(values) for name, values in speeds.items()}
        note = ", ".join(f"{name} {m[name]:.2f} GB/s ({min(v):.2f}-{max(v):.2f})" for name, v in speeds.items())
        ratios = [statistics.median(a / b for a, b in zip(speeds[f"commit{n}"], speeds[f"copy{n}"], strict=True)) for n in (1, 2)]
        return min(ratios), f"{rounds} interleaved rounds of {FILES} files, ratios {ratios[0]:.2f} and {ratios[1]:.2f}: {note}"
    finally:
        shutil.rmtree(tap, ignore_errors=True)
