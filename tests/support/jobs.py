"""Datasets, jobs and tap files for tests, made by the project's own contracts: what ingestion, coordinator and engine would leave."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from statetap.contracts.layout import DATASETS, REPORT, ROWS, ROWS_PER_RECORD_BATCH
from statetap.contracts.profile import CaptureProfile, NormSpec
from statetap.contracts.records import Batch, DatasetStatus, JobSpec
from statetap.contracts.sample_format import SampleFormat
from statetap.contracts.tensors import BLOCK, tap_header
from statetap.store.fs import to_json
from statetap.store.jobs import create_job
from statetap.store.plan import cut
from statetap.store.rows import SCHEMA, RowsFile

_BITS = {"BF16": (np.uint16, 0x3F80, 0x80FF), "F16": (np.uint16, 0x3C00, 0x83FF), "F32": (np.uint32, 0x3F800000, 0x807FFFFF)}


def profile(
    *,
    hidden: int = 64,
    layers: int = 8,
    boundaries: Sequence[int] = (2, 4, 5),
    final: str = "pre",
    dtype: str = "BF16",
    vocab: int = 32_000,
    max_length: int = 4_096,
    sglang_version: str = "",
) -> CaptureProfile:
    return CaptureProfile(
        model="stub",
        revision="",
        quantization="",
        boundaries=tuple(boundaries),
        final=final,
        dtype=dtype,
        hidden=hidden,
        num_layers=layers,
        vocab_size=vocab,
        max_length=max_length,
        norm=NormSpec(variant="rmsnorm", eps=1e-6),
        sglang_version=sglang_version,
    )


class StateMaker:
    """Finite states without a zero, the same for the same ids: cut from one pseudo-random block at a place that the ids give."""

    def __init__(self, profile: CaptureProfile, seed: int = 7) -> None:
        word, one, noise = _BITS[profile.dtype]
        self._profile = profile
        size = max(1 << 20, 2 * profile.bytes_per_token) // np.dtype(word).itemsize
        random = np.random.default_rng(seed).integers(0, np.iinfo(word).max, size, dtype=word, endpoint=True)
        # Magnitudes in [1, 2) with either sign: exponent of one, random fraction.
        self._block: npt.NDArray[np.uint8] = ((random & word(noise)) | word(one)).view(np.uint8)

    def states(self, ids: npt.NDArray[np.int32]) -> Iterator[memoryview]:
        """The payload of the tap file of ``ids``, in pieces."""
        left = len(ids) * self._profile.bytes_per_token
        at = xxhash.xxh3_64_intdigest(ids.tobytes()) % (len(self._block) // 8) * 4
        while left:
            piece = self._block[at : at + left]
            yield piece.data
            left -= len(piece)
            at = 0

    def tap_file(self, ids: npt.NDArray[np.int32]) -> bytes:
        """A right tap file of ``ids``."""
        header = tap_header(self._profile, len(ids)).encode()
        return b"".join([header, *self.states(ids), ids.astype(np.int32).tobytes()])


def sample_payload(data: bytes, profile: CaptureProfile, num_tokens: int) -> bytes:
    """The states of a tap or sample file."""
    return data[BLOCK : BLOCK + num_tokens * profile.bytes_per_token]


Mask = Callable[[int], Sequence[int]]
"""The loss mask of a row of n tokens."""


def every_second(n: int) -> list[int]:
    return [i % 2 for i in range(n)]


def write_rows(
    path: Path,
    rows: Sequence[Sequence[int]] | Iterator[Sequence[int]],
    errors: dict[int, str] | None = None,
    mask: Mask = every_second,
) -> int:
    """rows.arrow of token rows; ``errors``: row -> error code. Returns the number of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    total = 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        held: list[Sequence[int]] = []

        def flush() -> None:
            nonlocal total
            numbers = range(total, total + len(held))
            codes = [(errors or {}).get(n, "") for n in numbers]
            columns = [
                pa.array([list(r) for r in held], pa.list_(pa.int32())),
                pa.array([mask(len(r)) for r in held], pa.list_(pa.uint8())),
                pa.array([f"id-{n}" for n in numbers]),
                pa.array([n + 1 for n in numbers], pa.int64()),
                pa.array(codes),
                pa.array([f"row {n}: {c}" if c else "" for n, c in zip(numbers, codes, strict=True)]),
                pa.array([0 for _ in numbers], pa.int32()),
            ]
            writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
            total += len(held)
            held.clear()

        for row in rows:
            held.append(row)
            if len(held) == ROWS_PER_RECORD_BATCH:
                flush()
        if held:
            flush()
    return total


def token_rows(count: int, tokens: int, vocab: int = 32_000, seed: int = 3) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, vocab, (count, tokens)).tolist()


def make_job(
    store: Path,
    profile: CaptureProfile,
    rows: Sequence[Sequence[int]],
    *,
    errors: dict[int, str] | None = None,
    batch_tokens: int = 1_000_000,
    job_id: str = "job-test",
    dataset_id: str = "ds-test",
    boundaries: Sequence[int] = (),
    encoding: str = "raw",
    positions: str = "all",
) -> tuple[Path, Path, list[Batch]]:
    """(job folder, rows file, batches) of a job that was accepted."""
    rows_path = store / DATASETS / dataset_id / ROWS
    if not rows_path.exists():
        write_rows(rows_path, rows, errors)
    source = RowsFile(rows_path)
    batches = list(cut(source.lengths(), batch_tokens))
    tokens = sum(b.tokens for b in batches)
    format = SampleFormat(profile, tuple(boundaries), encoding, positions)
    kept = sum(int(k.sum()) for _, k in source.counts(format.where))
    accepted = sum(int((n > 0).sum()) for n in source.lengths())
    spec = JobSpec(
        job_id=job_id,
        dataset_id=dataset_id,
        content_hash="0" * 32,
        profile=profile.to_dict(),
        rows=source.rows,
        tokens=tokens,
        bytes=format.bytes(tokens, kept, accepted),
        batches=len(batches),
        boundaries=list(boundaries),
        encoding=encoding,
        positions=positions,
    )
    report = DatasetStatus(
        dataset_id=dataset_id,
        state="ready",
        rows=source.rows,
        accepted=source.rows - len(errors or {}),
        tokens=tokens,
        content_hash=spec.content_hash,
    )
    (rows_path.parent / REPORT).write_bytes(to_json(report.to_dict()))
    source.close()
    return create_job(store, spec, batches), rows_path, batches


def ready(profile: CaptureProfile, engine_id: str = "stub-engine", pid: int = 0, boot_id: str = "boot-1") -> bytes:
    """READY.json as an engine writes it."""
    data = {
        "profile": profile.to_dict(),
        "engine_id": engine_id,
        "self_check": {"ok": True},
        "pid": pid,
        "started_at": 0.0,
        "boot_id": boot_id,
    }
    return json.dumps(data).encode()
