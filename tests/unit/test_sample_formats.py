"""What a job keeps of what its engine captures: a part of the boundaries, FP8, zstd. Each against the raw file of the same row."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file

from statetap.contracts.capture import new_lease
from statetap.contracts.errors import ErrorCode, RowError, StoreError
from statetap.contracts.layout import NORM
from statetap.contracts.sample_format import Encoding, SampleFormat
from statetap.contracts.tensors import AUX, FINAL_POST, FINAL_PRE, INPUT_IDS, LOSS_MASK, tap_header
from statetap.store.check import words_of
from statetap.store.export.registry import FORMATS
from statetap.store.export.run import export_job
from statetap.store.fp8 import quantise
from statetap.store.reader import JobDataset
from statetap.store.resume import resume_batch
from statetap.store.reuse import reuse_rows
from statetap.store.rows import RowsFile
from statetap.store.sample import SampleWriter, check_sample
from statetap.store.samples import FolderSamples
from statetap.store.verify import verify_job
from tests.support.finished import DTYPES, FinishedJob
from tests.support.jobs import profile

WIDE = 4099  # odd, and a token is several chunks of the check's blocks
ENCODINGS = [e.value for e in Encoding]


# ---------------------------------------------------------------- the cast
def quantised(x: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    raw = x.contiguous().view(torch.uint8).numpy().reshape(-1)
    values, scales = quantise(words_of(raw, dtype).reshape(x.shape), dtype)
    return torch.from_numpy(values).view(torch.float8_e4m3fn), torch.from_numpy(scales)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_fp8_is_the_cast_of_torch_to_the_bit(dtype: str, spread: float) -> None:
    random = torch.Generator().manual_seed(int(spread) + len(dtype))
    x = torch.randn(64, 257, generator=random) * torch.exp(spread * torch.randn(64, 257, generator=random))
    x[:, 3] *= 300  # one coordinate that is far larger, as real states have
    x = x.clamp(-6e4, 6e4).to(DTYPES[dtype])
    values, scales = quantised(x, dtype)
    wanted = x.float().abs().amax(-1) / 448
    assert torch.equal(scales, wanted)
    assert torch.equal(values.view(torch.uint8), (x.float() * (1 / wanted)[:, None]).to(torch.float8_e4m3fn).view(torch.uint8))
    back = values.float() * scales[:, None]
    # Half a step of 3 mantissa bits, and below the smallest normal number half a step of that.
    assert ((back - x.float()).abs() <= x.float().abs() / 16 * 1.001 + scales[:, None] * 2**-10 * 1.001).all()


def test_fp8_of_zeros_and_of_the_smallest_numbers() -> None:
    x = torch.zeros(3, 8)
    x[1, 2] = 1e-45
    x[2, 2] = -3e38
    values, scales = quantised(x, "F32")
    assert scales[0] == 1 and not values[0].float().any() and torch.isfinite(scales).all() and (scales > 0).all()
    assert values[2, 2].float() == -448 and torch.isfinite(values.float()).all()


# ---------------------------------------------------------------- staged files
class Staged:
    """One row of random states, staged in a format; ``captured`` are its tensors as the tap had them."""

    def __init__(self, folder: Path, format: SampleFormat, tokens: int, *, scale: float = 1.0, seed: int = 0) -> None:
        p = format.captured
        random = torch.Generator().manual_seed(seed)
        header = tap_header(p, tokens)
        ids = torch.randint(0, 500, (tokens,), generator=random, dtype=torch.int32)
        self.captured = {
            t.name: (torch.randn(t.shape, generator=random) * scale).to(DTYPES[p.dtype])
            for t in header.tensors.values()
            if t.name != INPUT_IDS
        }
        tap = folder / f"tap-{tokens}-{seed}"
        tap.write_bytes(
            b"".join([header.encode(), *(x.view(torch.uint8).numpy().tobytes() for x in self.captured.values()), ids.numpy().tobytes()])
        )
        self.row = _row(ids.numpy())
        self.format, self.folder = format, folder
        self.staged = SampleWriter(folder, format, new_lease()).stage(self.row, 0, tap)
        os.close(self.staged.fd)
        self.path = self.staged.final
        os.rename(self.staged.temp, self.path)

    def kept(self) -> dict[str, torch.Tensor]:
        """What the file should hold, before it is encoded."""
        p = self.format.captured
        states = dict(self.captured)
        states[AUX] = states[AUX].view(-1, len(p.boundaries), p.hidden)[:, self.format.columns].reshape(len(self.row.input_ids), -1)
        return states


def _row(ids: np.ndarray, row: int = 7):
    from statetap.store.rows import Row

    mask = (np.arange(len(ids)) % 3 > 0).astype(np.uint8)
    return Row(row=row, input_ids=ids, loss_mask=mask, source_id="s-7", line=8, error_code="", error_message="", source=0)


@pytest.mark.parametrize("final", ["pre", "both", "none"])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("keep", [(), (5, 2), (4,)])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("hidden", "tokens"), [(64, 1), (64, 700), (WIDE, 45)])
def test_a_file_of_any_format_holds_what_was_captured(
    tmp_path: Path, encoding: str, keep: tuple[int, ...], dtype: str, final: str, hidden: int, tokens: int
) -> None:
    if hidden == WIDE and encoding == "fp8":
        hidden += 1  # safetensors asks for scales at multiples of 4 bytes
    format = SampleFormat(profile(hidden=hidden, dtype=dtype, final=final), keep, encoding)
    s = Staged(tmp_path, format, tokens)
    record = s.staged.record
    size = s.path.stat().st_size
    assert record.bytes == size and (size == format.bytes(tokens) if format.exact else size <= format.bytes(tokens))
    checked = check_sample(FolderSamples(tmp_path), format, s.row, 0)
    assert (checked.xxh3, checked.bytes, checked.path) == (record.xxh3, record.bytes, record.path)

    from statetap.store.opened import open_sample

    with open_sample(FolderSamples(s.path.parent), s.path.name, format) as f:
        assert np.array_equal(f.get_tensor(INPUT_IDS).numpy(), s.row.input_ids)
        assert np.array_equal(f.get_tensor(LOSS_MASK).numpy(), s.row.loss_mask)
        for name, want in s.kept().items():
            got = f.get_tensor(name)
            assert got.shape == want.shape and got.dtype == want.dtype
            if encoding != "fp8":
                assert torch.equal(got, want), name
            else:
                rows = want.float().view(-1, hidden)
                scales = rows.abs().amax(-1, keepdim=True) / 448
                values = (rows * (1 / scales)).to(torch.float8_e4m3fn).float()
                assert torch.equal(got, (values * scales).to(want.dtype).view(want.shape)), name


def test_raw_and_fp8_files_are_plain_safetensors_and_zstd_ones_are_when_decompressed(tmp_path: Path) -> None:
    p = profile(hidden=64, boundaries=(0, 2, 4), final="pre")
    for encoding in ENCODINGS:
        format = SampleFormat(p, (4, 0), encoding)
        s = Staged(tmp_path, format, 500)
        if encoding == "zstd":
            assert s.path.name == "data_7.safetensors.zst"
            with pa.CompressedInputStream(pa.OSFile(str(s.path)), "zstd") as stream:
                tensors = load(stream.read())
            planes = tensors[FINAL_PRE + "_byte_planes"].view(2, -1)  # one chunk: all low bytes, then all high ones
            assert torch.equal(planes.T.contiguous().view(-1).view(torch.bfloat16).view(500, 64), s.captured[FINAL_PRE])
        else:
            assert s.path.name == "data_7.safetensors"
            tensors = load_file(s.path)
            assert tensors[AUX].shape == (500, 128)
            if encoding == "fp8":
                assert tensors[AUX].dtype == torch.float8_e4m3fn and tensors[AUX + "_scales"].shape == (500, 2)
        assert tensors[INPUT_IDS].tolist() == s.row.input_ids.tolist()
        s.path.unlink()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.sampled_from([1, 3, 9]), st.sampled_from([16, 512, 3000]), st.sampled_from(["none", "both"]))
def test_zstd_of_what_cannot_be_compressed_stays_under_the_bound(
    tmp_path_factory: pytest.TempPathFactory, T: int, K: int, H: int, final: str
) -> None:
    from statetap.store.check import StateChecker
    from statetap.store.encode import encoder

    p = profile(hidden=H, boundaries=range(K), layers=12, final=final)
    format = SampleFormat(p, (), "zstd")
    random = np.random.default_rng(T)
    written = encoder(format, random.bytes(4096), random.integers(0, 256, 4 * T, np.uint8), random.integers(0, 2, T, np.uint8), None)
    size = sum(len(memoryview(x).cast("B")) for x in written.head())
    for block in StateChecker(p, T).blocks():
        size += sum(len(memoryview(x).cast("B")) for x in written.block(block, random.integers(0, 256, block.stop - block.start, np.uint8)))
    size += sum(len(memoryview(x).cast("B")) for x in written.tail())
    assert size <= format.bytes(T) <= size + 16_000 + 0.02 * size


def test_real_states_become_smaller(tmp_path: Path) -> None:
    s = Staged(tmp_path, SampleFormat(profile(hidden=256), (), "zstd"), 400)
    assert s.staged.record.bytes < 0.8 * SampleFormat(profile(hidden=256)).bytes(400)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_same_file_whatever_else_was_captured(tmp_path: Path, encoding: str) -> None:
    """A job that keeps a part writes what an engine would give that captures only this part: they can take each other's files."""
    big = SampleFormat(profile(hidden=256, boundaries=(1, 2, 4, 5, 6)), (5, 2), encoding)
    small = SampleFormat(profile(hidden=256, boundaries=(5, 2)), (), encoding)
    assert big.format_id == small.format_id != SampleFormat(big.captured, (2, 5), encoding).format_id
    a = Staged(tmp_path, big, 900)
    planes = a.captured[AUX].view(900, 5, 256)[:, [3, 1]].reshape(900, -1)
    data = a.path.read_bytes()
    a.path.unlink()
    header = tap_header(small.captured, 900)
    tap = tmp_path / "tap"
    tap.write_bytes(
        b"".join(
            [header.encode(), *(x.view(torch.uint8).numpy().tobytes() for x in (planes, a.captured[FINAL_PRE])), a.row.input_ids.tobytes()]
        )
    )
    staged = SampleWriter(tmp_path, small, new_lease()).stage(a.row, 0, tap)
    os.close(staged.fd)
    assert staged.temp.read_bytes() == data


@pytest.mark.parametrize("encoding", ["raw", "fp8", "zstd"])
@pytest.mark.parametrize("plane", [0, 1, 2, 3])
def test_bad_states_are_refused_before_they_are_encoded_and_nothing_stays(tmp_path: Path, encoding: str, plane: int) -> None:
    """Planes 0 and 2 are not kept: a tap file with a bad one is wrong all the same."""
    p = profile(hidden=64, boundaries=(2, 4, 5))
    format = SampleFormat(p, (4,), encoding)
    s = Staged(tmp_path, format, 30)
    s.path.unlink()
    for bad, code in ((float("nan"), ErrorCode.NONFINITE_STATES), (0.0, ErrorCode.ZERO_STATES)):
        states = {k: v.clone() for k, v in s.captured.items()}
        target = states[AUX].view(30, 3, 64)[:, plane] if plane < 3 else states[FINAL_PRE]
        target[11] = bad
        tap = tmp_path / "bad"
        header = tap_header(p, 30)
        tap.write_bytes(
            b"".join([header.encode(), *(x.view(torch.uint8).numpy().tobytes() for x in states.values()), s.row.input_ids.tobytes()])
        )
        with pytest.raises(RowError, match="token 11") as e:
            SampleWriter(tmp_path, format, new_lease()).stage(s.row, 0, tap)
        assert e.value.code == code
        assert not [x for x in tmp_path.rglob("*") if x.is_file() and x.parent != tmp_path]


@pytest.mark.parametrize("encoding", ["fp8", "zstd"])
def test_a_damaged_file_is_found_by_the_full_check(tmp_path: Path, encoding: str) -> None:
    format = SampleFormat(profile(hidden=64), (), encoding)
    s = Staged(tmp_path, format, 200)
    good = s.path.read_bytes()

    def refused(data: bytes) -> str:
        s.path.write_bytes(data)
        with pytest.raises(RowError) as e:
            check_sample(FolderSamples(tmp_path), format, s.row, 0)
        return e.value.code.value

    assert refused(good[:-1]) == refused(good[: len(good) // 2]) == refused(good + b"x" * 70_000) == "file_corrupt"
    assert refused(good[:100] + b"\xff" + good[101:]) == "file_corrupt"  # in the header
    if encoding == "fp8":
        header = format.header(200, 200, row=7, source_id="s-7", ids_xxh3="", schema_version=1)
        scales = header.tensors[AUX + "_scales"]
        assert refused(good[: scales.start] + np.float32("nan").tobytes() + good[scales.start + 4 :]) == "nonfinite_states"
        values = header.tensors[AUX]
        assert refused(good[: values.start + 9] + b"\x7f" + good[values.start + 10 :]) == "nonfinite_states"
        assert refused(good[: values.start] + bytes(64) + good[values.start + 64 :]) == "zero_states"


# ---------------------------------------------------------------- whole jobs
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_job_of_any_format_is_read_verified_resumed_and_exported(tmp_path: Path, encoding: str) -> None:
    raw = FinishedJob(tmp_path / "raw", lengths=(5, 9, 40, 7, 1), hidden=64)
    job = FinishedJob(tmp_path / "job", lengths=(5, 9, 40, 7, 1), hidden=64, keep=(29, 2), encoding=encoding)
    report = verify_job(job.path, job.rows_path)
    assert report.ok and report.files == 4 and report.bytes == sum(p.stat().st_size for p in job.path.glob("rows_*/*"))
    want, got = JobDataset(raw.path, boundaries=(29, 2), final="pre"), JobDataset(job.path, final="pre")
    assert got.boundaries == (29, 2) and len(got) == len(want) == 4
    for a, b in zip(want, got, strict=True):
        assert a.keys() == b.keys() and torch.equal(a[INPUT_IDS], b[INPUT_IDS]) and torch.equal(a[LOSS_MASK], b[LOSS_MASK])
        for name in (AUX, FINAL_POST):
            assert a[name].dtype == b[name].dtype
            if encoding == "fp8":
                assert (a[name] - b[name]).float().abs().max() <= a[name].float().abs().max() / 16
            else:
                assert torch.equal(a[name], b[name])
    assert torch.equal(JobDataset(job.path, boundaries=(2,), final="post")[2][AUX], got[2][AUX][:, 64:])

    export_job(job.path, tmp_path / "out", FORMATS["vllm"])
    item = load_file(next((tmp_path / "out").rglob("2.safetensors")))
    assert len(list((tmp_path / "out").rglob("*.safetensors"))) == 4 and item["token_ids"].tolist() == got[1][INPUT_IDS].tolist()
    assert torch.equal(item["hidden_states"][:, 0], got[1][AUX][:, :64])

    # A flipped bit is found, whatever the encoding, and only there.
    file = job.file(2)
    data = bytearray(file.read_bytes())
    data[-20] ^= 4
    file.write_bytes(bytes(data))
    report = verify_job(job.path, job.rows_path)
    assert [(p.row, p.code) for p in report.problems] == [(2, "file_corrupt")]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_files_without_a_ledger_line_are_adopted(tmp_path: Path, encoding: str) -> None:
    job = FinishedJob(tmp_path / "job", lengths=(5, 9, 40), bad=(), hidden=64, keep=(16,), encoding=encoding)
    for segment in (job.path / "ledger").iterdir():
        segment.unlink()
    good = job.file(1).read_bytes()
    job.file(1).write_bytes(good[:-3])
    source = RowsFile(job.rows_path)
    resumed = resume_batch(job.path, job.format, job.batches[0], source, new_lease())
    source.close()
    assert resumed.adopted == 2 and list(resumed.open_rows) == [1]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_rows_are_taken_from_jobs_of_the_same_format_only(tmp_path: Path, encoding: str) -> None:
    store = tmp_path / "store"
    job = FinishedJob(store, lengths=(5, 9, 40), bad=(), hidden=64, keep=(16,), encoding=encoding)
    source = RowsFile(job.rows_path)
    rows = list(source.read(0, 3))
    for other in [e for e in ENCODINGS if e != encoding]:
        format = SampleFormat(job.profile, (16,), other)
        assert not reuse_rows(store, store / "jobs/new", format, [job.path.name], 0, new_lease(), rows, dict.fromkeys(range(3), 0))
    assert not reuse_rows(
        store, store / "jobs/new", SampleFormat(job.profile, (2,), encoding), [job.path.name], 0, new_lease(), rows, {0: 0, 1: 0, 2: 0}
    )
    taken = reuse_rows(store, store / "jobs/new", job.format, [job.path.name], 0, new_lease(), rows, dict.fromkeys(range(3), 0))
    assert [r.row for r in taken] == [0, 1, 2]
    for r in taken:
        assert os.path.samefile(store / "jobs/new" / r.path, job.file(r.row))
    source.close()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_norm_that_is_not_there_is_not_called_a_corrupt_sample(tmp_path: Path, encoding: str) -> None:
    job = FinishedJob(tmp_path / "job", lengths=(5,), bad=(), hidden=64, encoding=encoding)
    items = JobDataset(job.path, final="post")
    (job.path / NORM).unlink()
    with pytest.raises(StoreError, match="final norm") as e:
        items[0]
    assert e.value.code == ErrorCode.FILE_MISSING


def test_a_file_of_another_encoding_is_no_file_of_this_job(tmp_path: Path) -> None:
    s = Staged(tmp_path, SampleFormat(profile(hidden=64), (), "zstd"), 20)
    with pytest.raises(StoreError, match="file_corrupt"):
        from statetap.store.opened import open_sample

        with open_sample(FolderSamples(s.path.parent), s.path.name, SampleFormat(profile(hidden=64))) as f:
            f.get_tensor(AUX)
