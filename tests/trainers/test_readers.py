"""Every format is read by its project's own reader, and every tensor that it gives is the job's own: bit-equal, or the derived post within an ulp.

`make trainers` makes the environments and sets TRAINERS to their folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from statetap.store.export.base import Final, FormatName
from statetap.store.export.registry import FORMATS
from statetap.store.export.run import export_job
from tests.support.finished import FinishedJob, marker, within_an_ulp
from tests.trainers.venvs import python_of

TRAINERS = os.environ.get("TRAINERS", "")
READERS = Path(__file__).parent / "readers"

pytestmark = [pytest.mark.skipif(not TRAINERS, reason="needs the trainers' packages: make trainers"), pytest.mark.timeout(300)]

KINDS = {
    "derived": {"final": "pre", "dtype": "BF16"},  # post is derived where a format wants it
    "both": {"final": "both", "dtype": "F32"},  # both are taken as they are
    "half": {"final": "both", "dtype": "F16"},
}


@dataclass(frozen=True)
class Read:
    """What a reader gave of an export: ``said`` and tensors by place; ``rows``: source rows in its order of files."""

    job: FinishedJob
    out: Path
    tensors: dict[str, torch.Tensor]
    said: dict[str, Any]

    def get(self, place: str) -> torch.Tensor:
        return self.tensors[place]

    @property
    def rows(self) -> list[int]:
        """By the export's own list of files."""
        lines = map(json.loads, (self.out / "EXPORT.jsonl").read_text().splitlines()[1:])
        by_path = {str(self.out / line["path"]): line["row"] for line in lines}
        return [by_path[path] for path in self.said["files"]]


class Bench:
    """Jobs, exported and read as asked for; one process of a reader reads all its exports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs = {kind: FinishedJob(folder / kind, **of) for kind, of in KINDS.items()}

    def read(self, reader: str, *wanted: tuple[str, FormatName, dict[str, Any]], venv: str | None = None) -> list[Read]:
        """``wanted``: (kind of job, format, options of the export)."""
        python = Path(sys.executable) if venv is None else python_of(Path(TRAINERS).resolve(), venv)
        arguments: list[str] = []
        found = []
        for n, (kind, name, options) in enumerate(wanted):
            out = self.folder / f"{reader}-{n}"
            report = export_job(self.jobs[kind].path, out, FORMATS[name], **options)
            assert report.ok and marker(out)["counts"]["rows"] == 4
            found.append((self.jobs[kind], out, out.with_suffix(".dump")))
            arguments += [str(out / FORMATS[name].data), str(out.with_suffix(".dump"))]
        # Readers are others' code: their settings and homes are not this user's.
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "2",
        }
        done = subprocess.run([python, READERS / f"{reader}_reader.py", *arguments], env=env, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-4000:]
        reads = []
        for job, out, dump in found:
            with safe_open(dump, framework="pt") as f:
                tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
                reads.append(Read(job, out, tensors, json.loads(f.metadata()["said"])))
        return reads


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(tmp_path_factory.mktemp("trainers"))


def is_the_final(job: FinishedJob, row: int, got: torch.Tensor, final: Final) -> bool:
    """Bit-equal to the job's own state; post derived from pre: within an ulp of the norm by the book."""
    own = job.tensors(row)
    name = "final_hidden_states_prenorm" if final == "pre" else "final_hidden_states"
    if name in own:
        return torch.equal(got, own[name])
    return got.dtype == own["aux_hidden_states"].dtype and within_an_ulp(got, job.post(row))


def supervised(job: FinishedJob) -> list[list[int]]:
    counts: Counter[int] = Counter()
    for row in job.rows:
        own = job.tensors(row)
        counts.update(own["input_ids"][own["loss_mask"] == 1].tolist())
    return [list(item) for item in sorted(counts.items())]


def without_last(mask: torch.Tensor) -> torch.Tensor:
    mask = mask.clone()
    mask[-1] = 0
    return mask


def test_specforge(bench: Bench) -> None:
    options = {"draft_vocab": 10}
    reads = bench.read(
        "specforge",
        ("derived", "specforge", options),
        ("both", "specforge", options),
        ("derived", "specforge", {**options, "compressed": True}),
        ("half", "specforge", options),
        venv="specforge",
    )
    for read in reads:
        assert sorted(read.rows) == read.job.rows
        for i, row in enumerate(read.rows):
            own = read.job.tensors(row)
            for place in (f"loader/{i}", f"dataset/{i}"):
                assert torch.equal(read.get(f"{place}/input_ids")[0], own["input_ids"].long())
                assert torch.equal(read.get(f"{place}/loss_mask")[0], without_last(own["loss_mask"].long()))
                assert torch.equal(read.get(f"{place}/hidden_state")[0], own["aux_hidden_states"])
                assert is_the_final(read.job, row, read.get(f"{place}/target")[0], "post")
            assert torch.equal(read.get(f"raw/{i}/loss_mask"), own["loss_mask"].long())  # only the reader takes the last away
            assert read.get(f"raw/{i}/input_ids").ndim == 1 and read.get(f"raw/{i}/aux_hidden_state").ndim == 3
        assert read.said["counts"] == supervised(read.job)
        assert all(torch.equal(read.get(f"ours/{k}"), read.get(f"theirs/{k}")) for k in ("d2t", "t2d"))
        assert marker(read.out)["layers"]["text"] == "SpecForge ids 1, 15, 28 = boundaries 2, 16, 29"


def test_speculators_and_vllm(bench: Bench) -> None:
    reads = bench.read(
        "speculators",
        *((kind, "speculators", {}) for kind in KINDS),
        *((kind, "vllm", {}) for kind in KINDS),
        venv="speculators",
    )
    for read in reads[:3]:
        job = read.job
        assert read.said["indices"] == [0, 1, 2, 3] and read.said["corrupt"] == 0
        assert read.said["lengths"] == [len(job.tensors(row)["input_ids"]) for row in job.rows]
        for i, row in enumerate(job.rows):
            own, place = job.tensors(row), f"dataset/{i}"
            assert torch.equal(read.get(f"{place}/input_ids"), own["input_ids"].long())
            assert torch.equal(read.get(f"{place}/loss_mask"), own["loss_mask"].long())
            assert torch.equal(read.get(f"{place}/hidden_states"), own["aux_hidden_states"])
            assert is_the_final(job, row, read.get(f"{place}/verifier_last_hidden_states"), "pre")
        ids = torch.cat([job.tensors(row)["input_ids"][1:] for row in job.rows]).long()  # shifted by the trainer, not by us
        assert torch.equal(read.get("batch/input_ids")[0, : len(ids)], ids) and read.said["batch/error_records"] == 0
        aux = torch.cat([job.tensors(row)["aux_hidden_states"][:-1] for row in job.rows])
        assert torch.equal(read.get("batch/hidden_states")[0, : len(ids)], aux)
        assert read.said["counts"] == supervised(job)
        assert read.get("theirs/t2d").sum() == 10
    for read in reads[3:]:
        assert sorted(read.rows) == read.job.rows
        for i, row in enumerate(read.rows):
            own, states = read.job.tensors(row), read.get(f"transfer/{i}/hidden_states")
            assert torch.equal(read.get(f"transfer/{i}/token_ids"), own["input_ids"].long())
            assert torch.equal(states[:, :-1].flatten(1), own["aux_hidden_states"])
            assert is_the_final(read.job, row, states[:, -1], "pre")


def test_modelopt(bench: Bench) -> None:
    finals: list[Final] = ["post", "pre", "post", "post"]
    kinds = ["derived", "derived", "both", "half"]
    reads = bench.read("modelopt", *((k, "modelopt", {"final": f}) for k, f in zip(kinds, finals, strict=True)), venv="modelopt")
    for read, final in zip(reads, finals, strict=True):
        assert sorted(read.rows) == read.job.rows
        for i, row in enumerate(read.rows):
            own, place = read.job.tensors(row), f"dataset/{i}"
            assert torch.equal(read.get(f"{place}/input_ids"), own["input_ids"].long())
            assert torch.equal(read.get(f"{place}/loss_mask"), own["loss_mask"].long())
            assert torch.equal(read.get(f"{place}/labels")[:-1], own["input_ids"].long()[1:])
            assert torch.equal(read.get(f"{place}/aux_hidden_states"), own["aux_hidden_states"])
            assert is_the_final(read.job, row, read.get(f"{place}/base_model_hidden_states"), final)
            assert read.said[f"{place}/base_hidden_prenorm"] is (final == "pre")
        assert read.get("batch/aux_hidden_states").shape == (4, 6, 24)
        assert read.said["batch/base_hidden_prenorm"] is (final == "pre")


def test_angelslim(bench: Bench) -> None:
    for read in bench.read("angelslim", *((kind, "angelslim", {"draft_vocab": 10}) for kind in KINDS), venv="angelslim"):
        assert sorted(read.rows) == read.job.rows
        for i, row in enumerate(read.rows):
            own, place = read.job.tensors(row), f"dataset/{i}"
            assert torch.equal(read.get(f"{place}/input_ids")[0], own["input_ids"].long())
            assert torch.equal(read.get(f"{place}/loss_mask")[0], own["loss_mask"].long())
            assert torch.equal(read.get(f"{place}/hidden_states")[0], own["aux_hidden_states"])
            assert is_the_final(read.job, row, read.get(f"{place}/target_hiddens")[0], "post")
        assert read.get("batch/hidden_states").shape == (4, 7, 24) and read.get("batch/target_hiddens").shape == (4, 7, 8)
        for k in ("d2t", "t2d"):
            assert (
                torch.equal(read.get(f"ours/{k}"), read.get(f"theirs/{k}")) and read.get(f"ours/{k}").dtype == read.get(f"theirs/{k}").dtype
            )


def test_eagle1(bench: Bench) -> None:
    for read in bench.read("eagle1", *((kind, "eagle1", {}) for kind in KINDS)):
        assert sorted(read.rows) == read.job.rows
        for i, row in enumerate(read.rows):
            own, place = read.job.tensors(row), f"dataset/{i}"
            assert torch.equal(read.get(f"{place}/input_ids")[0, :-1], own["input_ids"].long()[1:])  # shifted by the trainer
            assert read.said[f"{place}/loss_mask"] == without_last(own["loss_mask"]).tolist()
            assert is_the_final(read.job, row, read.get(f"{place}/hidden_state_big")[0], "post")
            assert read.get(f"{place}/target").shape == (1, len(own["input_ids"]), 8)
