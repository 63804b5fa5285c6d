"""The reader of a finished job: which rows it serves, and the numbers that it derives."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from statetap.contracts.errors import ErrorCode, RequestError, StatetapError, StoreError
from statetap.contracts.layout import COMPLETE, JOB, MANIFEST, NORM, PLAN, sample
from statetap.contracts.profile import CaptureProfile, NormSpec
from statetap.contracts.records import JobSpec, RowRecord
from statetap.contracts.sample_format import SampleFormat
from statetap.store.ledger import LedgerWriter
from statetap.store.reader import JobDataset, apply_final_norm

H, L, K = 8, 6, 3
LENGTHS = [5, 0, 3, 7, 1]  # row 1 was skipped
COMPLETED = {"rows": 5, "done": 4, "failed": 0, "skipped": 1, "tokens": 16, "bytes": 0, "state": "completed_with_errors"}
COMPLETED |= {"manifest_xxh3": "", "completed_at": 0.0}
NAMES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def profile_of(**changes: Any) -> CaptureProfile:
    return CaptureProfile(
        **{
            **{"model": "m", "revision": "", "quantization": "", "boundaries": (1, 3, 5), "final": "pre", "dtype": "BF16"},
            **{"hidden": H, "num_layers": L, "vocab_size": 100, "max_length": 64, "norm": NormSpec(variant="rmsnorm", eps=1e-6)},
            **changes,
        }
    )


class Job:
    """A job on disk, written with the contracts' own header, and the tensors that were put into it."""

    def __init__(self, folder: Path, *, complete: bool = True, **profile: Any) -> None:
        self.path = folder
        self.profile = profile_of(**profile)
        self.tensors: dict[int, dict[str, torch.Tensor]] = {}
        self.records: list[RowRecord] = []
        random = torch.Generator().manual_seed(11)
        dtype = NAMES[self.profile.dtype]
        self.weight = torch.rand(H, generator=random).to(dtype)
        for row, T in enumerate(LENGTHS):
            if not T:
                self.records.append(RowRecord(row=row, state="skipped", code="empty_prompt"))
                continue
            header = SampleFormat(self.profile).header(T, T, row=row, source_id=f"s{row}", ids_xxh3="", schema_version=1)
            self.tensors[row] = {
                name: (
                    torch.randn(t.shape, generator=random).to(dtype)
                    if t.dtype == self.profile.dtype
                    else torch.randint(0, 2, t.shape, generator=random).to({"I32": torch.int32, "U8": torch.uint8}[t.dtype])
                )
                for name, t in header.tensors.items()
            }
            path = folder / sample(row)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(header.encode() + b"".join(x.view(torch.uint8).numpy().tobytes() for x in self.tensors[row].values()))
            self.records.append(RowRecord(row=row, state="done", tokens=T, bytes=header.size, path=sample(row)))
        spec = JobSpec(
            job_id="j", dataset_id="d", content_hash="", profile=self.profile.to_dict(), rows=len(LENGTHS), tokens=16, bytes=0, batches=1
        )
        (folder / JOB).write_text(json.dumps(spec.to_dict()))
        (folder / PLAN).touch()
        norm = {"variant": self.profile.norm.variant, "eps": repr(self.profile.norm.eps)}
        save_file({"weight": self.weight}, folder / NORM, metadata=norm)
        writer = LedgerWriter(folder, 0, "a")
        writer.append(reversed(self.records))
        writer.close()
        if complete:
            names = ["row", "state", "tokens", "path"]
            pq.write_table(pa.table({n: [getattr(r, n) for r in self.records] for n in names}), folder / MANIFEST)
            (folder / COMPLETE).write_text(json.dumps(COMPLETED))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_done_rows_come_in_order_with_the_tensors_of_their_files(job: Job) -> None:
    data = JobDataset(job.path, final="pre")
    assert len(data) == 4
    assert [data.row(i) for i in range(4)] == [0, 2, 3, 4]
    assert [data.num_tokens(i) for i in range(4)] == [5, 3, 7, 1]
    for i, row in enumerate([0, 2, 3, 4]):
        want, got = job.tensors[row], data[i]
        assert list(got) == ["input_ids", "loss_mask", "aux_hidden_states", "final_hidden_states"]
        assert got["input_ids"].dtype == got["loss_mask"].dtype == torch.int64
        assert torch.equal(got["input_ids"], want["input_ids"].long())
        assert torch.equal(got["loss_mask"], want["loss_mask"].long())
        assert got["aux_hidden_states"].shape == (LENGTHS[row], K * H)
        assert torch.equal(got["aux_hidden_states"], want["aux_hidden_states"])
        assert torch.equal(got["final_hidden_states"], want["final_hidden_states_prenorm"])
    assert torch.equal(data[-1]["input_ids"], data[3]["input_ids"])
    for i in (4, -5):
        with pytest.raises(IndexError):
            data[i]


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("variant", ["rmsnorm", "gemma_rmsnorm"])
def test_post_is_derived_from_pre_by_the_jobs_norm(tmp_path: Path, dtype: str, variant: str) -> None:
    job = Job(tmp_path, dtype=dtype, norm=NormSpec(variant=variant, eps=1e-3))
    got = JobDataset(tmp_path)[0]["final_hidden_states"]
    assert got.dtype == NAMES[dtype]
    x = job.tensors[0]["final_hidden_states_prenorm"].double().numpy()
    w = job.weight.double().numpy() + (variant == "gemma_rmsnorm")
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * w
    np.testing.assert_allclose(got.double().numpy(), want, rtol={"F32": 1e-6, "F16": 1e-3, "BF16": 8e-3}[dtype], atol=1e-7)


def test_the_norm_agrees_with_the_models_own(job: Job) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = torch.randn(4, H, generator=torch.Generator().manual_seed(1))
    for cls, variant in ((LlamaRMSNorm, "rmsnorm"), (GemmaRMSNorm, "gemma_rmsnorm")):
        norm = cls(H, eps=1e-5)
        norm.weight.data = torch.rand(H, generator=torch.Generator().manual_seed(2))
        got = apply_final_norm(x, norm.weight.data, NormSpec(variant=variant, eps=1e-5))
        torch.testing.assert_close(got, norm(x).detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("captured", "asked", "tensor"),
    [("post", "post", "final_hidden_states"), ("both", "post", "final_hidden_states"), ("both", "pre", "final_hidden_states_prenorm")],
)
def test_a_final_state_that_was_captured_is_taken_as_it_is(tmp_path: Path, captured: str, asked: Any, tensor: str) -> None:
    job = Job(tmp_path, final=captured)
    assert torch.equal(JobDataset(tmp_path, final=asked)[0]["final_hidden_states"], job.tensors[0][tensor])


@pytest.mark.parametrize(("captured", "asked"), [("post", "pre"), ("none", "pre"), ("none", "post")])
def test_a_final_state_that_cannot_be_had_is_refused_at_once(tmp_path: Path, captured: str, asked: Any) -> None:
    Job(tmp_path, final=captured)
    with pytest.raises(RequestError, match=f"'{asked}' cannot be had") as e:
        JobDataset(tmp_path, final=asked)
    assert e.value.code is ErrorCode.INVALID_REQUEST
    assert "final_hidden_states" not in JobDataset(tmp_path, final=None)[0]


@pytest.mark.parametrize("boundaries", [(5,), (5, 1), (3, 5), (1, 3, 5), (5, 3, 1)])
def test_boundaries_are_taken_in_the_order_asked_for(job: Job, boundaries: tuple[int, ...]) -> None:
    got = JobDataset(job.path, boundaries=boundaries)[2]["aux_hidden_states"]
    planes = dict(zip((1, 3, 5), job.tensors[3]["aux_hidden_states"].split(H, dim=1), strict=True))
    assert torch.equal(got, torch.cat([planes[b] for b in boundaries], dim=1))


@pytest.mark.parametrize("boundaries", [(2,), (1, 6), ()])
def test_boundaries_that_were_not_captured_are_refused(job: Job, boundaries: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match=r"\[1, 3, 5\] were captured"):
        JobDataset(job.path, boundaries=boundaries)


def test_an_incomplete_job_says_what_is_missing(tmp_path: Path) -> None:
    Job(tmp_path, complete=False)
    ledger = next((tmp_path / "ledger").iterdir())
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[1:]) + lines[0][:9])  # row 4: a torn line
    with pytest.raises(StoreError, match="of 5 rows 3 done, 0 failed, 1 skipped; 1 open") as e:
        JobDataset(tmp_path)
    assert e.value.code is ErrorCode.INCOMPLETE
    partial = JobDataset(tmp_path, require_complete=False)
    assert [partial.row(i) for i in range(len(partial))] == [0, 2, 3]
    assert partial[1]["aux_hidden_states"].shape == (3, K * H)
    ledger.write_bytes(b"".join(lines))
    with pytest.raises(StoreError, match="the COMPLETE marker is not written"):
        JobDataset(tmp_path)


def test_a_retried_row_is_served_from_its_latest_generation(tmp_path: Path) -> None:
    job = Job(tmp_path, complete=False)
    (tmp_path / sample(2)).rename(tmp_path / sample(2, 1))
    writer = LedgerWriter(tmp_path, 0, "b")
    writer.append([RowRecord(row=2, state="done", generation=1, tokens=3, path=sample(2, 1))])
    writer.close()
    data = JobDataset(tmp_path, require_complete=False)
    assert [data.row(i) for i in range(len(data))] == [0, 2, 3, 4]
    assert torch.equal(data[1]["aux_hidden_states"], job.tensors[2]["aux_hidden_states"])


def test_a_file_that_is_gone_or_broken_is_named(job: Job) -> None:
    data = JobDataset(job.path)
    (job.path / sample(0)).unlink()
    (job.path / sample(2)).write_bytes(b"no header")
    for i, code in ((0, ErrorCode.FILE_MISSING), (1, ErrorCode.FILE_CORRUPT)):
        with pytest.raises(StatetapError, match=r"data_\d.safetensors") as e:
            data[i]
        assert e.value.code is code
    (job.path / NORM).unlink()
    with pytest.raises(StoreError, match="final norm"):
        JobDataset(job.path)[2]


def test_writing_into_an_item_does_not_change_the_file(job: Job) -> None:
    data = JobDataset(job.path, final="pre")
    data[0]["aux_hidden_states"].fill_(7)
    assert torch.equal(data[0]["aux_hidden_states"], job.tensors[0]["aux_hidden_states"])


def test_it_goes_into_the_workers_of_a_data_loader(job: Job) -> None:
    data = JobDataset(job.path)
    assert data[0]
    blob = pickle.dumps(data)
    assert len(blob) < 4000
    assert torch.equal(pickle.loads(blob)[0]["final_hidden_states"], data[0]["final_hidden_states"])
    loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    got = [item["aux_hidden_states"].clone() for item in loader]
    assert [len(x) for x in got] == [5, 3, 7, 1]


def test_what_is_no_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as e:
        JobDataset(tmp_path / "none")
    assert e.value.code is ErrorCode.NOT_FOUND
