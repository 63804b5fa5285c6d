"""The service as a team uses it, with the real SGLang: the client and the command line against one running stack."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from statetap import Client
from statetap.store.reader import JobDataset
from statetap.store.stream import JobStream
from statetap.store.verify import verify_job
from tests.support.stack import Up, cli, tokenized

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@pytest.fixture
def client(up: Up):
    with Client(up.url) as made:
        yield made


def test_files_are_merged_and_shuffled_watched_reused_and_removed(up: Up, client: Client, tmp_path: Path) -> None:
    ids = tokenized(tmp_path / "a.jsonl", 150, 40, seed=31) + tokenized(tmp_path / "b.jsonl", 100, 40, seed=32)
    dataset = client.wait_for_dataset(client.upload(tmp_path / "a.jsonl", tmp_path / "b.jsonl", shuffle=7).dataset_id)
    assert (dataset.rows, dataset.accepted) == (250, 250)
    job = client.submit_job(dataset.dataset_id, rows=200, name="most of it")
    versions, states = [], []
    for snapshot in client.events(job.job_id):
        versions.append(snapshot.version)
        states.append(snapshot.state)
    assert states[-1] == "completed" and versions == sorted(set(versions))
    path = Path(client.job(job.job_id).path)
    items = JobDataset(path)
    got = [tuple(items[i]["input_ids"].tolist()) for i in range(len(items))]
    assert len(got) == 200 and set(got) <= set(map(tuple, ids)) and got != [tuple(r) for r in ids[:200]]

    whole = client.wait(client.submit_job(dataset.dataset_id).job_id, timeout_s=120)
    assert (whole.state, whole.rows.done, whole.rows.reused) == ("completed", 250, 200)
    again = JobDataset(whole.path)
    assert sorted(tuple(again[i]["input_ids"].tolist()) for i in range(250)) == sorted(map(tuple, ids))
    assert verify_job(Path(whole.path), up.store / "datasets" / dataset.dataset_id / "rows.arrow").ok
    refused = cli("rm", whole.job_id, "--yes", "--url", up.url)  # `again` holds it
    assert refused.returncode == 1 and "being read" in refused.stderr
    del again
    removed = cli("rm", whole.job_id, "--yes", "--url", up.url)
    assert removed.returncode == 0, removed.stderr
    assert not Path(whole.path).exists() and verify_job(path).ok


def test_a_bounded_store_is_read_while_it_is_written(up: Up, client: Client, tmp_path: Path) -> None:
    ids = tokenized(tmp_path / "rows.jsonl", 400, 40, seed=33)
    dataset = client.wait_for_dataset(client.upload(tmp_path / "rows.jsonl").dataset_id)
    need = client.estimate(dataset.dataset_id).bytes
    job = client.submit_job(dataset.dataset_id, retain="until_read", retain_bytes=need // 3)
    stream = JobStream(Path(job.path), ack=lambda rows: client.ack(job.job_id, rows), poll_s=0.1)
    assert sorted(item["input_ids"].tolist() for item in stream) == sorted(ids)
    end = client.wait(job.job_id, timeout_s=60)
    assert end.state == "completed" and end.bytes.freed == end.bytes.committed == need
    assert not list(Path(job.path).glob("rows_*/data_*"))


def test_a_part_of_the_boundaries_in_each_encoding(up: Up, client: Client, model: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    ids = tokenized(data, 80, 60, seed=35)
    (engine,) = client.engines()
    captured = engine.profile["boundaries"]
    keep = [captured[-1], captured[0]]
    measured = cli("estimate", data, "--encoding", "zstd", "--probe", "40", "--url", up.url, "--json")
    assert measured.returncode == 0, measured.stderr
    told = json.loads(measured.stdout)
    assert not told["exact"] and 0 < told["expected_bytes"] < told["bytes"]
    sets = {}
    for encoding in ("raw", "fp8", "zstd"):
        made = cli("submit", data, "--encoding", encoding, "--boundaries", ",".join(map(str, keep)), "--watch", "--url", up.url)
        assert made.returncode == 0, made.stderr
        job = next(client.jobs())
        assert (job.encoding, job.boundaries, job.rows.done, job.rows.reused) == (encoding, keep, 80, 0)
        assert verify_job(Path(job.path)).ok
        if encoding != "raw":
            compared = cli("parity", job.path, "--model", model, "--samples", "3")
            assert compared.returncode == 0, compared.stdout + compared.stderr
        sets[encoding] = JobDataset(job.path)
    for i in range(80):
        raw, fp8, zstd = (sets[e][i] for e in ("raw", "fp8", "zstd"))
        assert raw["input_ids"].tolist() == fp8["input_ids"].tolist() == zstd["input_ids"].tolist() == ids[i]
        for name in ("aux_hidden_states", "final_hidden_states"):
            assert (raw[name] - zstd[name]).norm() < 1e-5 * raw[name].norm()  # other prefills: the last bits may differ
            assert 0 < (raw[name] - fp8[name]).norm() < 0.05 * raw[name].norm()
    other = next(b for b in range(engine.profile["num_layers"]) if b not in captured)
    refused = cli("submit", data, "--boundaries", str(other), "--url", up.url)
    assert refused.returncode != 0 and "engine_mismatch" in refused.stderr and f"--boundaries {other}" in refused.stderr


@pytest.mark.parametrize("positions", ["loss_mask", "last:5"])
def test_the_states_of_some_positions_are_those_of_transformers(
    up: Up, client: Client, model: Path, tmp_path: Path, positions: str
) -> None:
    data = tmp_path / "rows.jsonl"
    masks = {}
    tokenized(data, 60, 60, seed=36)
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    for n, line in enumerate(lines):  # two turns of an assistant
        T = len(line["input_ids"])
        masks[n] = line["loss_mask"] = [int(T // 3 <= t < T // 2 or t > T - 5 - n % 3) for t in range(T)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = cli("submit", data, "--positions", positions, "--watch", "--url", up.url)
    assert made.returncode == 0, made.stderr
    job = next(client.jobs())
    assert (job.positions, job.state, job.rows.done) == (positions, "completed", 60) and job.bytes.committed == job.bytes.expected
    assert verify_job(Path(job.path), up.store / "datasets" / job.dataset_id / "rows.arrow").ok
    compared = cli("parity", job.path, "--model", model, "--samples", "4")
    assert compared.returncode == 0, compared.stdout + compared.stderr
    items = JobDataset(job.path)
    for n in range(60):
        mask = masks[n]
        T = len(mask)
        wanted = range(T - 5, T) if positions == "last:5" else [t for t in range(T) if mask[t] or (t and mask[t - 1])]
        assert items[n]["positions"].tolist() == list(wanted) and len(items[n]["final_hidden_states"]) == len(wanted)
    exported = cli("export", job.path, "--format", "specforge", "--out", tmp_path / "out")
    assert exported.returncode != 0 and "positions" in exported.stderr and not (tmp_path / "out").exists()


def test_every_verb_speaks_json_about_the_running_stack(up: Up, client: Client, tmp_path: Path) -> None:
    data = tmp_path / "c.jsonl"
    tokenized(data, 120, 40, seed=34)
    estimate = cli("estimate", data, "--probe", "60", "--url", up.url, "--json")
    assert estimate.returncode == 0, estimate.stderr
    told = json.loads(estimate.stdout)
    assert told["rows"] == 120 and told["bytes"] > 0 and told["tokens_per_s"] > 0
    assert not list(client.jobs(name="probe of"))  # the probe is gone
    submitted = cli("submit", data, "--url", up.url, "--json")
    job_id = json.loads(submitted.stdout)["job_id"]
    watched = cli("watch", job_id, "--url", up.url, "--json")
    assert watched.returncode == 0 and json.loads(watched.stdout.splitlines()[-1])["state"] == "completed"
    rows = cli("rows", job_id, "--state", "done", "--url", up.url, "--json")
    assert len(rows.stdout.splitlines()) == 120
    for verb in (["jobs"], ["datasets"], ["engines"], ["errors", job_id], ["gc"]):
        done = cli(*verb, "--url", up.url, "--json")
        assert done.returncode == 0, done.stderr
        for line in done.stdout.splitlines() if verb[0] != "gc" else [done.stdout]:
            json.loads(line)
    checks = cli("doctor", "--url", up.url, "--store", up.store, "--json")
    found = [json.loads(line) for line in checks.stdout.splitlines()]
    assert {c["level"] for c in found} <= {"ok", "warn"} and checks.returncode == 0, checks.stdout
    assert {"python", "engine-0"} <= {c["subject"] for c in found}


def test_the_metrics_count_what_the_stack_does(up: Up) -> None:
    text = httpx.get(f"{up.url}/metrics").text
    assert "statetap_redis_up 1.0" in text and 'statetap_jobs{state="completed"}' in text


def test_parity_by_the_head_asks_the_engine_that_runs(up: Up, client: Client, model: Path, tmp_path: Path) -> None:
    tokenized(tmp_path / "rows.jsonl", 20, 60, seed=34)
    dataset = client.wait_for_dataset(client.upload(tmp_path / "rows.jsonl").dataset_id)
    job = client.wait(client.submit_job(dataset.dataset_id).job_id, timeout_s=120)
    (engine,) = client.engines()
    found = cli("parity", job.path, "--model", model, "--lm-head", engine.url, "--samples", "5", "--json")
    assert found.returncode == 0, found.stdout + found.stderr
    told = json.loads(found.stdout)
    assert told["ok"] and told["agree"] == told["rows"] == 5 and told["error"] < 1e-4 < 0.1 < told["shifted"], told
    nobody = cli("parity", job.path, "--model", model, "--lm-head", "http://127.0.0.1:9")
    assert nobody.returncode == 1 and "engine_unreachable" in nobody.stderr
