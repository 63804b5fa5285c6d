"""The whole stack through its command line and its API, with the real SGLang on the CPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from statetap.store.reader import JobDataset
from tests.support.stack import STATETAP, Up, cli, kill_tree, ledger_lines, start_up, tokenized, wait_for

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


def submit(up: Up, data: Path, **options: object) -> dict:
    with data.open("rb") as f:
        dataset = up.post("/v1/datasets", files={"file": (data.name, f)}, data={k: str(v) for k, v in options.items()})
    dataset = wait_for("ingestion", lambda: (d := up.get(f"/v1/datasets/{dataset['dataset_id']}"))["state"] != "ingesting" and d)
    assert dataset["state"] == "ready", dataset
    return up.post("/v1/jobs", json={"dataset_id": dataset["dataset_id"]})


def ended(up: Up, job: dict, timeout: float = 200) -> dict:
    states = ("completed", "completed_with_errors", "failed", "cancelled")
    return wait_for("the job's end", lambda: (j := up.job(job["job_id"]))["state"] in states and j, timeout, every=0.2)


def rows_done(up: Up, job: dict) -> int:
    """Files there, by the store: the API may be away."""
    return sum(1 for _ in Path(job["path"]).glob("rows_*/data_*"))


def test_run_extracts_conversations_says_what_was_wrong_and_a_second_run_redoes_nothing(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "chat.jsonl"
    good = [
        {
            "id": f"c{i}",
            "messages": [{"role": "user", "content": f"Question {i}?"}, {"role": "assistant", "content": f"Answer {i}."}] * (1 + i % 3),
        }
        for i in range(20)
    ]
    lines = [json.dumps(row) for row in good]
    lines[3] = "{not json"
    lines[7] = json.dumps({"id": "no-assistant", "messages": [{"role": "user", "content": "hello?"}]})
    data.write_text("\n".join(lines) + "\n")
    out = tmp_path / "store"
    done = cli("run", data, "--cpu", "--model", model, "--out", out)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "18 done + 0 failed + 2 skipped of 20 rows" in done.stdout
    assert "line 4" in done.stdout and "bad_row" in done.stdout and "no_supervised_token" in done.stdout
    job_dir = next((out / "jobs").iterdir())
    complete = json.loads((job_dir / "COMPLETE").read_text())
    (engine,) = complete["engines"]
    assert (complete["rows"], engine["rows"], engine["sglang_version"]) == (20, 18, version("sglang")) and engine["boot_id"]
    assert cli("verify", out).returncode == 0
    parity = cli("parity", out, "--model", model, "--samples", "6", "--json")
    assert parity.returncode == 0 and json.loads(parity.stdout)["worst"] < 1e-5, parity.stdout
    before = {p: p.stat().st_mtime_ns for p in job_dir.rglob("*") if p.is_file()}
    again = cli("run", data, "--cpu", "--model", model, "--out", out, "--max-failed", "2")
    assert again.returncode == 0 and "is there already" in again.stdout, again.stdout + again.stderr
    assert {p: p.stat().st_mtime_ns for p in job_dir.rglob("*") if p.is_file()} == before
    assert not [p for p in Path("/dev/shm").glob("statetap-*") if str(p) in done.stdout]
    # one flipped bit is found
    victim = job_dir / "rows_0-2000" / "data_0.safetensors"
    raw = bytearray(victim.read_bytes())
    raw[5000] ^= 1
    victim.write_bytes(raw)
    broken = cli("verify", out)
    assert broken.returncode == 7 and "row 0" in broken.stdout and "file_corrupt" in broken.stdout


def test_a_terminated_run_goes_on_where_it_ended(model: Path, tmp_path: Path) -> None:
    data, out, log = tmp_path / "rows.jsonl", tmp_path / "store", tmp_path / "log"
    tokenized(data, 1200, 150)
    with log.open("w") as f:
        process = subprocess.Popen([*STATETAP, "run", str(data), "--cpu", "--model", str(model), "--out", str(out)], stdout=f, stderr=f)
    wait_for("some rows", lambda: len(list(out.glob("jobs/*/rows_*/data_*"))) > 100, 120)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 143, log.read_text()
    committed = {p.name: p.stat().st_ino for p in out.glob("jobs/*/rows_*/data_*")}
    assert 100 < len(committed) < 1200
    done = cli("run", data, "--cpu", "--model", model, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    after = {p.name: p.stat().st_ino for p in out.glob("jobs/*/rows_*/data_*")}
    assert len(after) == 1200 and all(after[n] == inode for n, inode in committed.items())  # none was written again
    assert len(ledger_lines(next((out / "jobs").iterdir()))) == 1200  # and none prefilled again: a drain loses nothing


def test_killed_workers_lose_and_double_nothing_and_rows_run_again_within_15_s(up: Up, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    ids = tokenized(data, 2500, 150, seed=3)
    job = submit(up, data)
    wait_for("rows done", lambda: up.job(job["job_id"])["rows"]["done"] > 100)
    victims = [pid for name, pid in up.pids().items() if name.startswith("worker-")]
    assert len(victims) == 2
    for pid in victims:
        kill_tree(pid)
    killed_at, lines = time.monotonic(), len(ledger_lines(Path(job["path"])))  # nobody is left to write one
    wait_for("rows after the kill", lambda: len(ledger_lines(Path(job["path"]))) > lines, 30)
    assert time.monotonic() - killed_at < 15
    job = ended(up, job)
    assert job["state"] == "completed" and job["rows"]["done"] == 2500, job
    job_dir = Path(job["path"])
    files = sorted(job_dir.glob("rows_*/*"))
    assert len(files) == 2500 and not [f for f in files if f.name.startswith(".")]
    assert Counter(line["row"] for line in ledger_lines(job_dir) if line["state"] == "done") == Counter(range(2500))
    assert cli("verify", job_dir).returncode == 0
    dataset = JobDataset(job_dir, final="post")
    assert len(dataset) == 2500
    for i in (0, 999, 2499):
        assert dataset[i]["input_ids"].tolist() == ids[i]
        assert dataset[i]["aux_hidden_states"].shape == (len(ids[i]), 3 * 64)
        assert np.isfinite(dataset[i]["final_hidden_states"].numpy()).all()


def test_every_process_of_the_stack_may_be_killed_and_the_job_completes(up: Up, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    tokenized(data, 4000, 150, seed=5)
    job = submit(up, data)
    done = 0
    for name in ("redis", "coordinator", "ingest", "worker-0-0", "engine-0"):
        done = wait_for(f"rows before {name} is killed", lambda: (n := rows_done(up, job)) > done + 100 and n, 60)  # noqa: B023
        victim = up.pids()[name]
        kill_tree(victim)
        wait_for(f"{name} is started again", lambda: up.pids().get(name, victim) != victim, 30)  # noqa: B023
    state = ended(up, job)
    assert state["state"] == "completed" and state["rows"]["done"] == 4000, state
    job_dir = Path(state["path"])
    assert Counter(line["row"] for line in ledger_lines(job_dir) if line["state"] == "done") == Counter(range(4000))
    assert cli("verify", job_dir).returncode == 0
    log = up.log.read_text()
    assert all(f"{name} was killed (SIGKILL" in log for name in ("redis", "coordinator", "ingest", "worker-0-0", "engine-0"))


def test_cancel_pause_and_resume_by_the_command_line(up: Up, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    tokenized(data, 3000, 150, seed=4)
    job = submit(up, data)["job_id"]
    wait_for("rows done", lambda: up.job(job)["rows"]["done"] > 20)
    assert cli("pause", job, "--url", up.url).returncode == 0
    wait_for("paused", lambda: up.job(job)["state"] == "paused" and up.job(job)["batches"]["outstanding"] == 0, 30)
    paused = up.job(job)
    assert paused["reason"] == "user"
    time.sleep(1.5)  # nothing moves while it is paused
    assert up.job(job)["rows"] == paused["rows"]
    assert cli("resume", job, "--url", up.url).returncode == 0
    wait_for("going on", lambda: up.job(job)["rows"]["done"] > paused["rows"]["done"], 30)
    assert cli("cancel", job, "--url", up.url).returncode == 0
    state = wait_for("cancelled", lambda: (j := up.job(job))["state"] == "cancelled" and j, 30)
    assert 0 < state["rows"]["done"] < 3000 and state["rows"]["done"] + state["rows"]["open"] == 3000
    assert cli("watch", job, "--url", up.url).returncode == 6
    verified = cli("verify", state["path"])  # its files are right, and it is not whole: nobody shall take it for that
    assert verified.returncode == 7 and "problems: {'incomplete': 1}" in verified.stdout


def test_up_says_what_it_does_and_leaves_nothing(up: Up) -> None:  # last on it: it ends the stack
    tap = Path(json.loads((up.store / ".stack" / "tap.json").read_text())["tap"])
    assert tap.is_dir()
    second = subprocess.run([*STATETAP, "up", "--cpu", "--model", "m", "--store", str(up.store)], capture_output=True, text=True)
    assert second.returncode == 1 and "another stack runs on" in second.stderr
    assert not [p for e in tap.iterdir() for p in e.glob("*/*.safetensors")]  # all jobs have ended: no tap file is left
    pids = up.pids()
    assert len(pids) == 6
    assert up.stop() == 0, up.log.read_text()
    text = up.log.read_text()
    assert "ready after" in text and text.rstrip().endswith("stopped")
    assert not tap.exists()
    for pid in pids.values():
        assert not Path(f"/proc/{pid}").exists() or re.search(r"^State:\s+Z", Path(f"/proc/{pid}/status").read_text(), re.M)
    logs = {p.name for p in (up.store / ".stack" / "logs").iterdir()}
    assert logs == {"redis.log", "coordinator.log", "ingest.log", "engine-0.log", "worker-0-0.log", "worker-0-1.log"}


def test_an_engine_that_does_not_start_ends_run_with_its_reason(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    tokenized(data, 3, 10)
    refused = cli("run", data, "--cpu", "--model", model, "--out", tmp_path / "s", "--", "--pp-size", "2")
    assert refused.returncode == 1 and "flag_refused: --pp-size" in refused.stderr
    early = cli("run", data, "--cpu", "--model", model, "--out", tmp_path / "early", "--boundaries", "1,77")
    assert early.returncode == 1 and "outside [0, 6]" in early.stderr and not (tmp_path / "early").exists(), early.stderr
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    os.truncate(broken / "model.safetensors", 1000)
    done = cli("run", data, "--cpu", "--model", broken, "--out", tmp_path / "s")
    assert done.returncode == 1 and "engine_start_failed" in done.stderr and "log:" in done.stderr, done.stderr
    assert os.listdir(tmp_path / "s" / ".stack") and not list((tmp_path / "s").glob("jobs/*"))


def test_a_killed_supervisor_takes_all_with_it_and_the_next_one_cleans_up(model: Path, tmp_path: Path) -> None:
    first = start_up(tmp_path / "store", model, tmp_path / "log")
    pids, tap = first.pids(), Path(json.loads((first.store / ".stack" / "tap.json").read_text())["tap"])
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    wait_for("all processes end", lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids.values()), 60)
    assert tap.exists()  # nobody was left to remove it
    second = start_up(tmp_path / "store", model, tmp_path / "log2")
    assert not tap.exists()
    assert second.stop() == 0


def test_two_engines_share_a_job_and_a_taken_port_is_named(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    tokenized(data, 600, 150, seed=6)
    done = cli("run", data, "--cpu", "--model", model, "--out", tmp_path / "store", "--engines", "2", "--workers", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ready after") == 2
    held = [
        name
        for name in ("worker-0-0", "worker-1-0")
        if "event=batch_started" in (tmp_path / "store/.stack/logs" / f"{name}.log").read_text()
    ]
    assert held == ["worker-0-0", "worker-1-0"]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        taken = cli("up", "--cpu", "--model", model, "--store", tmp_path / "other", "--port", str(port))
    assert taken.returncode == 1 and f"port {port}" in taken.stderr, taken.stderr
