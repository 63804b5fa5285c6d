"""store.fp8_over_raw, store.zstd_over_raw: what an encoding costs on the way from the tap to the store; and what it brings.

States are normal numbers with a spread of their own a channel, in bfloat16: a stand-in, since no big model is at hand. What zstd makes of a
real model's is measured by ``statetap estimate --encoding zstd --probe``.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from statetap.contracts.capture import new_lease
from statetap.contracts.sample_format import Encoding, SampleFormat
from statetap.contracts.tensors import AUX, tap_header
from statetap.store.commit import Committer
from statetap.store.opened import open_sample
from statetap.store.rows import RowsFile
from statetap.store.sample import SampleWriter
from statetap.store.samples import FolderSamples
from tests.support.jobs import make_job, profile

FILES, TOKENS, THREADS = 8, 1000, 2


def encodings(folder: Path, rounds: int) -> tuple[dict[str, float], str]:
    """(figure -> value, how): rates of captured bytes over those of raw (median of the rounds' own ratios), size ratios, FP8's error."""
    p = profile(hidden=4096, layers=32, boundaries=(2, 16, 29), vocab=128_000, max_length=8192)
    tap = Path(tempfile.mkdtemp(prefix="statetap-bench-", dir="/dev/shm"))
    try:
        rows = np.random.default_rng(1).integers(0, 128_000, (FILES, TOKENS)).tolist()
        random = torch.Generator().manual_seed(2)
        spread = torch.exp(0.7 * torch.randn(p.num_planes * p.hidden, generator=random))
        spread[::1024] *= 200
        states = (torch.randn(TOKENS, p.num_planes * p.hidden, generator=random) * spread).bfloat16()
        aux, final = states[:, : 3 * p.hidden].contiguous(), states[:, 3 * p.hidden :].contiguous()
        payload = b"".join(x.view(torch.uint8).numpy().tobytes() for x in (aux, final))
        header = tap_header(p, TOKENS)
        taps = [tap / f"{n}.safetensors" for n in range(FILES)]
        speeds: dict[str, list[float]] = {e.value: [] for e in Encoding}
        sizes: dict[str, int] = {}
        error = 0.0
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in range(rounds):
                for encoding in speeds:
                    format = SampleFormat(p, (), encoding)
                    job_dir, rows_path, _ = make_job(folder / "store", p, rows, encoding=encoding, job_id=f"job-{encoding}")
                    source = RowsFile(rows_path)
                    wanted = list(source.read(0, FILES))
                    for row, path in zip(wanted, taps, strict=True):
                        path.write_bytes(header.encode() + payload + row.input_ids.tobytes())
                    lease = new_lease()
                    started = time.perf_counter()
                    told: list[object] = []
                    committer = Committer(job_dir, format, 0, lease, told.extend)
                    writer = SampleWriter(job_dir, format, lease)
                    for staged in pool.map(lambda row, w=writer: w.stage(row, 0, taps[row.row]), wanted):  # type: ignore[misc]
                        committer.submit(staged)
                    committer.hurry(True)
                    committer.close()
                    speeds[encoding].append(FILES * header.size / (time.perf_counter() - started) / 1e9)
                    assert len(told) == FILES
                    files = list(job_dir.rglob("data_*"))
                    sizes[encoding] = sum(f.stat().st_size for f in files)
                    if encoding == Encoding.FP8:
                        with open_sample(FolderSamples(files[0].parent), files[0].name, format) as f:
                            error = float((f.get_tensor(AUX).float() - aux.float()).norm() / aux.float().norm())
                    source.close()
                    for file in [*files, *(job_dir / "ledger").glob("*")]:
                        file.unlink()
                    os.sync()
        m = {name: statistics.median(values) for name, values in speeds.items()}
        found = {
            f"store.{e}_over_raw": statistics.median(a / b for a, b in zip(speeds[e], speeds["raw"], strict=True)) for e in ("fp8", "zstd")
        } | {f"store.{e}_size": sizes[e] / sizes["raw"] for e in ("fp8", "zstd")}
        found["store.fp8_error"] = error
        rates = ", ".join(f"{name} {m[name]:.2f} ({min(v):.2f}-{max(v):.2f})" for name, v in speeds.items())
        return (
            found,
            f"{rounds} interleaved rounds of {FILES} files of {header.size >> 20} MiB, {THREADS} threads, GB/s of captured bytes: {rates}",
        )
    finally:
        shutil.rmtree(tap, ignore_errors=True)
