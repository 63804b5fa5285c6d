"""Every verb of the command line, against a real coordinator, redis and ingestion; a FakeWorker plays the workers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import redis

from statetap import __version__
from statetap.cli.main import main
from statetap.contracts.records import JobState
from tests.support.coordinator import ENGINE_START, PROFILE, Coordinator, FakeWorker, make_dataset, register_engine, until
from tests.support.redis import RedisServer
from tests.support.stack import STATETAP
from tests.support.terminal import Terminal

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


class Crew:
    """A worker in a thread. It works while ``go`` is set; ``fail`` are rows that it fails."""

    def __init__(self, server: RedisServer, store: Path) -> None:
        self.client = server.client()
        self.worker = FakeWorker(self.client, store)
        self.go = threading.Event()
        self.fail: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        while not self._stop.wait(0.02):
            if self.go.is_set() and (task := self.worker.take()) is not None:
                self.worker.do(task, fail=self.fail)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.worker.close()
        self.client.close()


class Stack:
    """What ``statetap up`` would run, less the engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = RedisServer(folder / "redis")
        self.server.start()
        (folder / "data").mkdir()
        self.coordinator = Coordinator(folder, self.server.url, DATA_DIR=str(folder / "data")).start()
        self.url = str(self.coordinator.http.base_url).rstrip("/")
        self.env = {**{k: v for k, v in os.environ.items() if not k.startswith("STATETAP_")}, "STATETAP_URL": self.url}
        self.crew = Crew(self.server, self.coordinator.store)
        register_engine(self.crew.client, ttl_s=3600)
        with open(folder / "ingest.log", "ab") as log:
            env = {**self.env, "STATETAP_REDIS_URL": self.server.url, "STATETAP_STORE": str(self.coordinator.store)}
            self.ingest = subprocess.Popen([sys.executable, "-m", "statetap.datasets"], env=env, stdout=log, stderr=log)

    def close(self) -> None:
        self.ingest.send_signal(signal.SIGTERM)
        self.ingest.wait(30)
        self.crew.close()
        self.coordinator.close()
        self.server.stop()

    def run(self, *args: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        """In this process, since a hundred starts of Python would take most of the time; nothing else is different."""
        out, err = io.StringIO(), io.StringIO()
        argv = ["statetap", *map(str, args)]
        with (
            mock.patch.object(sys, "argv", argv),
            mock.patch.dict(os.environ, self.env, clear=True),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            main()
        done = subprocess.CompletedProcess(argv, int(ended.value.code or 0), out.getvalue(), err.getvalue())
        assert done.returncode == code, f"{args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert not CONTROL.search(done.stdout), "a file gets no control characters"
        return done

    def json(self, *args: str | Path, code: int = 0) -> Any:
        """One document."""
        return json.loads(self.run(*args, "--json", code=code).stdout)

    def items(self, *args: str | Path, code: int = 0) -> list[dict[str, Any]]:
        """A line each."""
        return [json.loads(line) for line in self.run(*args, "--json", code=code).stdout.splitlines()]

    def error(self, *args: str | Path) -> dict[str, Any]:
        done = self.run(*args, "--json", code=1)
        assert done.stdout == ""
        error = json.loads(done.stderr)["error"]
        assert error["next_step"] and error["message"]
        return error

    def terminal(self, *args: str | Path) -> Terminal:
        return Terminal([*STATETAP, *map(str, args)], columns=80, env=self.env)

    def made(self, rows: int, *, bad: tuple[int, ...] = ()) -> str:
        """A ready dataset of a new id."""
        self.datasets = getattr(self, "datasets", 0) + 1
        return make_dataset(
            self.coordinator.store, [10 + (i * 7 + self.datasets) % 50 for i in range(rows)], f"ds-{self.datasets:016x}", bad=bad
        )

    def finished(self, rows: int = 50, *, fail: tuple[int, ...] = (), bad: tuple[int, ...] = (), code: int = 0, **options: Any) -> str:
        """A job that has ended."""
        self.crew.fail = set(fail)
        self.crew.go.set()
        job = self.coordinator.submit(self.made(rows, bad=bad), reuse=False, **options)["job_id"]
        self.coordinator.until_state(job, "completed", "completed_with_errors", seconds=30)
        self.crew.go.clear()
        self.crew.fail = set()
        return str(job)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("cli"))
    yield running
    running.close()


@pytest.fixture(autouse=True)
def idle(stack: Stack) -> None:
    """Each test begins with workers that wait."""
    stack.crew.go.clear()
    stack.crew.fail = set()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"id": f"r{i}", "input_ids": [(i * 31 + j) % 900 for j in range(10 + i % 40)]}) for i in range(40)]
    rows[4] = "{not json"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_submit_uploads_ingests_and_watches_to_the_end_with_its_exit_code(stack: Stack, data: Path) -> None:
    stack.crew.go.set()
    done = stack.run("submit", data, "--format", "tokenized", "--name", "first", "--watch", code=3)
    lines = done.stdout.splitlines()
    assert re.search(r"^\d\d:\d\d:\d\d job job-[0-9a-f]{16}: 40 rows, .* expected$", done.stdout, re.M)
    assert "completed_with_errors 100% 39/40 rows 1 skipped" in lines[-1] and "bad_row 1" in lines[-1]
    assert stack.run("submit", data, "--format", "tokenized", "--watch", "--max-failed", "1").returncode == 0
    (dataset,) = [d for d in stack.items("datasets") if d["name"] == "first"]
    job = stack.json("submit", dataset["dataset_id"], "--rows", "10", "--no-reuse", "--max-length", "30", "--priority", "2")
    assert job["rows"]["total"] == 10 and job["priority"] == 2 and job["state"] == "queued"
    watched = stack.items("watch", job["job_id"], "--max-failed", "9")
    assert watched[-1]["state"] == "completed_with_errors" and all(j["job_id"] == job["job_id"] for j in watched)
    named = stack.folder / "data" / "by-path.jsonl"
    named.write_bytes(data.read_bytes())
    same = [stack.json("submit", named, "--path", "--format", "tokenized", "--idempotency-key", "k1")["job_id"] for _ in range(2)]
    assert same[0] == same[1]


def test_several_files_are_merged_and_shuffled(stack: Stack, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "more.jsonl"
    other.write_text("".join(json.dumps({"input_ids": [5] * n}) + "\n" for n in range(1, 11)))
    job = stack.json("submit", data, other, "--format", "tokenized", "--shuffle", "7", "--name", "merged")
    assert job["rows"]["total"] == 50
    other_seed = stack.json("submit", data, other, "--format", "tokenized", "--shuffle", "8")
    assert other_seed["dataset_id"] != job["dataset_id"]
    shown = stack.run("datasets", job["dataset_id"]).stdout
    assert "rows.jsonl" in shown and "more.jsonl" in shown and "shuffled by seed 7" in shown
    stack.crew.go.set()
    watched = stack.items("watch", job["job_id"], code=3)
    assert watched[-1]["rows"] | {"reused": 0} == {"total": 50, "done": 49, "failed": 0, "skipped": 1, "open": 0, "reused": 0}
    (error,) = stack.run("errors", job["job_id"]).stdout.splitlines()
    assert "rows.jsonl:5 skipped bad_row" in error  # the place in the user's own file, wherever the row went
    stack.crew.go.clear()


def test_retained_jobs_and_what_is_refused_name_the_next_step(stack: Stack, data: Path) -> None:
    dataset = stack.made(20)
    job = stack.json("submit", dataset, "--retain", "until_read", "--retain-bytes", "2TB")
    stack.run("cancel", job["job_id"])
    assert stack.error("submit", dataset, "--profile", "f" * 16)["start_command"].startswith("statetap up")
    assert stack.error("submit", "nowhere.jsonl")["code"] == "not_found"
    assert stack.error("submit", "ds-ffffffffffffffff")["status"] == 404
    assert stack.error("submit", data, "--path")["code"] == "path_not_allowed"
    assert "retain_bytes" in stack.error("submit", dataset, "--retain", "until_read")["message"]
    assert stack.error("watch", "job-none")["code"] == "not_found"
    said = stack.run("submit", dataset, "--profile", "f" * 16, code=1).stderr
    assert said.startswith("error: engine_mismatch: ") and "\n  next: " in said


def test_a_persons_pause_ends_a_watch_with_4_and_a_cancelled_job_with_6(stack: Stack) -> None:
    job = stack.json("submit", stack.made(40))["job_id"]
    watch = subprocess.Popen([*STATETAP, "watch", job], env=stack.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert watch.stdout is not None
    assert "queued" in watch.stdout.readline()  # flushed, although it is a pipe
    assert stack.json("pause", job)["state"] == "paused"
    out, err = watch.communicate(timeout=30)
    assert watch.returncode == 4 and "paused (user)" in out and not err
    assert " queued " in stack.run("resume", job).stdout
    assert stack.json("cancel", job)["control"] == "cancel"
    assert stack.items("watch", job, code=6)[-1]["state"] == "cancelled"
    assert stack.error("resume", job)["code"] == "conflict"


def test_jobs_are_listed_by_filters_and_shown_one_by_one(stack: Stack) -> None:
    job = stack.finished(name="needle", fail=(3,))
    assert [j["job_id"] for j in stack.items("jobs", "--name", "needle")] == [job]
    assert job in {j["job_id"] for j in stack.items("jobs", "--state", "completed_with_errors", "--state", "failed")}
    assert job not in {j["job_id"] for j in stack.items("jobs", "--state", "completed")}
    assert not stack.items("jobs", "--dataset", "ds-none")
    shown = stack.run("jobs", job).stdout
    assert "needle" in shown and "nonfinite_states 1" in shown and str(stack.coordinator.store) in shown
    told = stack.json("jobs", job)
    assert told["rows"]["failed"] == 1 and told["engines"] == [ENGINE_START.to_dict() | {"rows": told["rows"]["done"]}]
    assert f"captured by stub-engine (SGLang 0.5.23, Statetap 1, start boot-1): {told['rows']['done']} rows" in shown
    assert job in stack.run("jobs").stdout


def test_datasets_and_engines_are_listed(stack: Stack) -> None:
    dataset = stack.made(30, bad=(4,))
    assert f"{dataset} ready 30 rows" in stack.run("datasets").stdout
    assert dataset in {d["dataset_id"] for d in stack.items("datasets", "--state", "ready")}
    assert "1 rejected" in stack.run("datasets", dataset).stdout
    assert stack.json("datasets", dataset)["accepted"] == 29
    (engine,) = stack.items("engines")
    assert engine["profile_id"] == PROFILE.profile_id
    assert "e1 healthy" in stack.run("engines").stdout and "boundaries 1,2,3" in stack.run("engines").stdout


def test_errors_rows_and_retry(stack: Stack) -> None:
    job = stack.finished(30, fail=(2, 20), bad=(5,))
    lines = stack.run("errors", job).stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["2", "5", "20"] and "line 6 skipped bad_row: no messages" in lines[1]
    assert [e["row"] for e in stack.items("errors", job, "--code", "bad_row")] == [5]
    assert [e["row"] for e in stack.items("errors", job, "--code", "bad_row", "--code", "nonfinite_states")] == [2, 5, 20]
    assert [r["row"] for r in stack.items("rows", job, "--state", "failed")] == [2, 20]
    assert len(stack.items("rows", job)) == 30
    assert "row 0 done rows_0-2000/data_0.safetensors" in stack.run("rows", job, "--state", "done").stdout
    assert stack.error("retry", job, "--code", "engine_timeout")["code"] == "conflict"
    again = stack.json("retry", job, "--code", "nonfinite_states")
    assert again["rows"]["open"] == 2 and not JobState(again["state"]).terminal
    stack.run("cancel", job)
    assert "cancelled" in stack.run("watch", job, code=6).stdout


def test_rm_says_what_it_frees_and_asks_on_a_terminal(stack: Stack) -> None:
    job = stack.finished()
    dataset = stack.json("jobs", job)["dataset_id"]
    assert stack.error("rm", dataset)["code"] == "conflict"
    (would,) = stack.items("rm", job, "--dry-run")
    assert would["dry_run"] and not would["deleted"] and would["bytes"] > 0
    refused = stack.terminal("rm", job)
    refused.read_until("?")
    refused.type("n\n")
    assert refused.wait() == 0 and stack.json("jobs", job)["state"] == "completed"
    agreed = stack.terminal("rm", job)
    agreed.read_until("?")
    agreed.type("y\n")
    assert agreed.wait() == 0 and "freed" in agreed.output
    assert stack.error("jobs", job)["code"] == "not_found"
    freed = stack.run("rm", dataset).stdout  # no terminal: it does not ask
    assert re.match(rf"{dataset}: \d+ files, .* freed", freed)
    assert stack.run("rm", "nothing", code=1).stderr.startswith("error: invalid_request: 'nothing' is neither a job")


def test_gc_only_says_what_it_would_do_unless_told_to(stack: Stack) -> None:
    job = stack.finished()
    assert not [i for i in stack.json("gc", "--state", "completed")["items"] if i["name"] == job]  # it ended just now
    told = stack.json("gc", "--state", "completed", "--older-than", "0s")
    assert told["dry_run"] and job in {i["name"] for i in told["items"]}
    assert "do it with --apply" in stack.run("gc").stdout and stack.json("jobs", job)["job_id"] == job
    assert stack.json("gc", "--state", "completed", "--older-than", "0", "--apply")["bytes"] >= told["bytes"]
    assert stack.error("jobs", job)["code"] == "not_found"


def test_an_estimate_says_bytes_and_a_probe_measures_hours_and_leaves_nothing(stack: Stack, data: Path) -> None:
    dataset = stack.made(60)
    told = stack.json("estimate", dataset)
    assert told["fits"] and told["accepted"] == 60 and told["probed"] is False
    text = stack.run("estimate", dataset, "--rows", "10").stdout
    assert "10 of 10 rows" in text and "it fits" in text and "time: " in text
    before = {j["job_id"] for j in stack.items("jobs")}
    stack.crew.go.set()
    probed = stack.run("estimate", dataset, "--probe", "20", "--json")
    told = json.loads(probed.stdout)
    assert told["probed"] and told["tokens_per_s"] > 0 and told["hours"] == pytest.approx(told["tokens"] / told["tokens_per_s"] / 3600)
    assert "the first 20 rows" in probed.stderr
    assert {j["job_id"] for j in stack.items("jobs")} == before
    assert stack.json("estimate", data, "--format", "tokenized")["accepted"] == 39


def test_the_doctor_finds_a_whole_stack_in_order(stack: Stack) -> None:
    found = stack.items("doctor", "--store", stack.coordinator.store, "--redis-url", stack.server.url, "--cpu")
    wrong = [f for f in found if f["level"] == "FAIL"]
    assert not wrong
    told = {(f["subject"], f["text"].split(",")[0].split(":")[0]) for f in found if f["level"] == "ok"}
    assert {
        ("redis", "append-only file is on"),
        ("redis", "maxmemory-policy noeviction"),
        ("clock", "agrees with the coordinator's"),
        ("coordinator", "ready"),
    } <= told
    assert ("e1", "healthy") in told and ("e1", "hand-shake") in told
    assert not list(stack.coordinator.store.glob(".doctor-*"))
    text = stack.run("doctor", "--url", "http://127.0.0.1:9", "--cpu", code=1).stdout
    assert re.search(r"^FAIL coordinator: no coordinator answers .* -> Start one with `statetap up`", text, re.M)


def test_a_doctor_names_a_redis_that_would_lose_the_queue(stack: Stack) -> None:
    stack.crew.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        found = stack.items("doctor", "--redis-url", stack.server.url, "--cpu", code=1)
    finally:
        stack.crew.client.config_set("maxmemory-policy", "noeviction")
    (failed,) = [f for f in found if f["level"] == "FAIL"]
    assert failed["subject"] == "redis" and "noeviction" in failed["todo"]


def test_verify_and_version(stack: Stack) -> None:
    job = stack.finished(3)
    broken = stack.json("verify", stack.coordinator.store / "jobs" / job, code=7)  # the fake worker writes zeros
    assert broken["files"] == 3 and broken["counts"]
    assert stack.json("version") == {"version": __version__} and stack.run("version").stdout.strip() == __version__


@pytest.mark.parametrize("moving", [True, False])
def test_nothing_is_wider_than_a_terminal_of_80_columns(stack: Stack, moving: bool) -> None:
    if moving:
        job = stack.json("submit", stack.made(3000, bad=(7,)), "--no-reuse", "--name", "a name that is rather long " * 5)["job_id"]
        watching = stack.terminal("watch", job, "--max-failed", "1")
        watching.read_until("queued")
        stack.crew.go.set()
        assert watching.wait() == 0
        shown = [watching]
        assert "━" in watching.output and "completed_with_errors 100% 2999/3000 rows" in " ".join(watching.lines())
    else:
        job = stack.finished(20, fail=(1, 2), name="a name that is rather long " * 5)
        commands = (
            ["jobs"],
            ["jobs", job],
            ["errors", job],
            ["datasets"],
            ["engines"],
            ["rows", job],
            ["doctor", "--cpu"],
            ["submit", "nowhere.jsonl"],
        )
        shown = [stack.terminal(*c) for c in commands]
        for terminal in shown:
            terminal.wait()
    for terminal in shown:
        # A path is one word and stays whole, so that it can be copied.
        wide = [line for line in terminal.lines() if len(line) > 80 and " " in line.strip()]
        assert not wide, wide


def complete(stack: Stack, line: str) -> set[str]:
    """What a bash that has the completion installed asks, and gets."""
    words = line.split(" ")
    env = {**stack.env, "_STATETAP_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(STATETAP, env=env, capture_output=True, text=True, timeout=60)
    assert not done.stderr, done.stderr
    return set(done.stdout.split())


def test_the_shell_completes_verbs_states_codes_and_jobs(stack: Stack) -> None:
    job = stack.finished(3)
    assert {"watch", "jobs", "rm", "gc", "doctor", "keys"} <= complete(stack, "statetap ")
    assert complete(stack, "statetap jobs --state comp") == {"completed", "completed_with_errors"}
    assert complete(stack, "statetap errors x --code engine_") >= {"engine_timeout", "engine_mismatch"}
    assert complete(stack, "statetap submit x --format to") == {"tokenized"}
    # Nothing is offered when the coordinator does not answer within half a second, as on a machine that has other things to do.
    until(lambda: job in complete(stack, "statetap watch "), "the job is offered", 60)
    until(lambda: complete(stack, f"statetap rm {job[:-1]}") == {job}, "the job is completed", 60)
    assert complete(stack, "statetap watch --url http://127.0.0.1:9 ") == set()
    listening = RedisServer(stack.folder / "unused")  # a port at which nobody speaks HTTP
    with_socket = f"statetap watch --url http://127.0.0.1:{listening.port} "
    assert complete(stack, with_socket) == set()


def test_a_coordinator_that_hangs_does_not_hang_the_shell(stack: Stack) -> None:
    stack.coordinator.signal(signal.SIGSTOP)
    try:
        assert complete(stack, "statetap watch ") == set()
    finally:
        stack.coordinator.signal(signal.SIGCONT)


def test_keys_are_sent_and_a_missing_one_is_named(tmp_path: Path, redis_server: RedisServer, redis_client: redis.Redis) -> None:
    file = tmp_path / "keys"
    add = subprocess.run(
        [*STATETAP, "keys", "add", "me", "--scope", "write", "--file", str(file), "--json"], capture_output=True, text=True, check=True
    )
    key = json.loads(add.stdout)["key"]
    coordinator = Coordinator(tmp_path, redis_server.url, KEYS_FILE=str(file)).start()
    try:
        env = {**os.environ, "STATETAP_URL": str(coordinator.http.base_url)}
        env.pop("STATETAP_API_KEY", None)
        without = subprocess.run([*STATETAP, "jobs", "--json"], env=env, capture_output=True, text=True)
        error = json.loads(without.stderr)["error"]
        assert (
            without.returncode == 1
            and (error["code"], error["status"]) == ("unauthorized", 401)
            and "STATETAP_API_KEY" in error["next_step"]
        )
        allowed = subprocess.run([*STATETAP, "jobs", "--json"], env={**env, "STATETAP_API_KEY": key}, capture_output=True, text=True)
        assert allowed.returncode == 0 and key not in allowed.stdout + allowed.stderr
        refused = subprocess.run([*STATETAP, "gc", "--json"], env={**env, "STATETAP_API_KEY": key}, capture_output=True, text=True)
        assert json.loads(refused.stderr)["error"]["code"] == "forbidden"
        until(lambda: coordinator.log.exists(), "a log")
        assert key not in coordinator.log.read_text()
    finally:
        coordinator.close()
