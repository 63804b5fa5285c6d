"""Samples in a bucket, from the command line to a DataLoader, with the real SGLang on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from statetap.store.reader import JobDataset
from tests.support.s3 import S3, s3
from tests.support.stack import cli, tokenized

__all__ = ["s3"]

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


def test_run_verify_parity_export_and_train_from_a_bucket(model: Path, tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATETAP_SAMPLES", s3.url)
    data, store = tmp_path / "rows.jsonl", tmp_path / "store"
    ids = tokenized(data, 40, 60)
    done = cli("run", data, "--cpu", "--model", model, "--out", store)
    assert done.returncode == 0, done.stdout + done.stderr
    (job,) = (store / "jobs").glob("job-*")
    assert not list(job.glob("rows_*")) and len(s3.keys(f"train/{job.name}/")) == 40
    verified = cli("verify", job)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    parity = json.loads(cli("parity", job, "--model", model, "--samples", "40", "--json").stdout)
    assert parity["ok"] and parity["rows"] == 40
    dataset = JobDataset(job)
    assert dataset[3]["input_ids"].tolist() == ids[3]
    # This process has a client by now; the DataLoader's are forks of it.
    loaded = list(DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    assert [item["input_ids"].tolist() for item in loaded] == ids
    assert all(torch.isfinite(item["aux_hidden_states"].float()).all() for item in loaded)
    exported = cli("export", job, "--format", "speculators", "--out", tmp_path / "out")
    assert exported.returncode == 0, exported.stdout + exported.stderr
    assert len(list((tmp_path / "out").rglob("hs_*.safetensors"))) == 40
