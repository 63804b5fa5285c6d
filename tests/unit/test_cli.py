"""Pure parts of the CLI: exit codes, progress lines, units, option sets, flags, findings, messages."""

from __future__ import annotations

import inspect
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from statetap.cli.commands.checks import find_job_dir
from statetap.cli.commands.serving import run_command, up
from statetap.cli.doctor import disk, examine, host
from statetap.cli.estimating import Speed, measure
from statetap.cli.exits import Exit, exit_of
from statetap.cli.options import OptionSet, expanded
from statetap.cli.output import Out, printable
from statetap.cli.process import HOPELESS_AFTER, Service
from statetap.cli.redis_server import redis_argv
from statetap.cli.sending import dataset_of
from statetap.cli.stack import _devices
from statetap.cli.units import counts, duration, parse_duration, parse_size, size
from statetap.cli.watching import drawn, line, log_line, show
from statetap.client import ApiError, Bytes, Client, Job, Rates, Rows, Tokens
from statetap.contracts.errors import ErrorCode, StatetapError
from statetap.engine.flags import REFUSED, check_flags, server_argv


def job(state: str = "running", reason: str = "", *, tokens: int = 0, started_at: float = 0.0, ended_at: float = 0.0, **rows: int) -> Job:
    return Job(
        job_id="job-0123456789abcdef",
        dataset_id="ds-0123456789abcdef",
        state=state,
        reason=reason,
        rows=Rows(**{"total": 37312, **rows}),
        tokens=Tokens(total=87_800_000, done=tokens),
        bytes=Bytes(expected=5_030_000_000_000, committed=5_030_000_000_000),
        rates=Rates(rows_per_s=18.0, tokens_per_s=42785.3, bytes_per_s=1.0),
        eta_s=86399.0,
        started_at=started_at,
        ended_at=ended_at,
    )


@pytest.mark.parametrize(
    ("state", "rows", "max_failed", "code"),
    [
        ("completed", {}, 0, 0),
        ("completed_with_errors", {"failed": 1}, 0, 3),
        ("completed_with_errors", {"failed": 1, "skipped": 1}, 2, 0),
        ("completed_with_errors", {"failed": 2, "skipped": 1}, 2, 3),
        ("paused", {}, 9, 4),
        ("failed", {}, 9, 5),
        ("cancelled", {}, 9, 6),
    ],
)
def test_the_exit_code_says_how_a_job_ended(state: str, rows: dict[str, int], max_failed: int, code: int) -> None:
    assert exit_of(job(state, **rows), max_failed) == code


def test_exit_codes_are_distinct() -> None:
    assert len({int(e) for e in Exit}) == len(list(Exit))


def test_the_progress_line_fits_and_is_never_complete_before_the_job_is() -> None:
    assert len(line(job(done=37312))) <= 90
    assert "100%" not in line(job(done=37312)) and "99.9%" in line(job(done=37312))
    assert "100%" in line(job("completed", done=37312))
    shown = line(job("paused", "low_disk", done=10, failed=2, skipped=3))
    assert "paused (low_disk)" in shown and "2 failed" in shown and "3 skipped" in shown


def rendered(of: Job, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False, color_system=None).print(drawn(of))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("total", [0, 95, 37_312, 4_000_000])
@pytest.mark.parametrize(
    "where", [("running", ""), ("queued", ""), ("paused", "circuit_open"), ("failed", "store_io"), ("completed_with_errors", "")]
)
def test_a_drawn_job_fits_the_terminal_and_shows_the_same_truth(width: int, total: int, where: tuple[str, str]) -> None:
    done, failed = total * 2 // 3, total // 10
    whole = Job.from_dict(
        job(*where, total=total, done=done, failed=failed, skipped=1, reused=total // 2).to_dict()
        | {"errors": {"nonfinite_states": failed, "capture_incomplete": 123456, "bad_row": 7}, "bound": "prefill", "message": "why it does not move " * 8}
    )  # fmt: skip
    lines = rendered(whole, width).splitlines()
    assert max(map(len, lines)) <= width
    assert where[0] in lines[0] and f"{done + failed + 1:,}/{total:,}" in lines[0], lines
    assert ("42,785 tok/s" in lines[0] and "23:59:59 left" in lines[0]) == (where[0] in ("running", "queued"))
    assert ("bound by prefill" in lines[1]) == (where[0] in ("running", "queued"))
    assert ("100%" in lines[0]) == (where[0] == "completed_with_errors")


def test_a_job_in_its_last_moments_does_not_look_whole() -> None:
    assert "99.9%" in rendered(job(done=37312), 80)
    assert "capture_incomplete 3, bad_row 1" in log_line(
        Job.from_dict(job().to_dict() | {"errors": {"bad_row": 1, "capture_incomplete": 3}})
    )


def test_watching_ends_where_it_shall_and_a_log_tells_changes_of_state(capsys: pytest.CaptureFixture[str]) -> None:
    seen = [job("queued"), job(done=1), job(done=2), job("paused", "user"), job("completed")]
    last = show(iter(seen), Out(), until=lambda j: j.state == "paused")
    assert last is seen[3] and show(iter(()), Out()) is None
    told = capsys.readouterr().out.splitlines()
    assert [t.split()[2] for t in told] == ["queued", "running", "paused"]  # the third brought nothing new, so soon
    show(iter([seen[0], seen[0], seen[4]]), Out(as_json=True))
    out = capsys.readouterr()
    assert [json.loads(t)["state"] for t in out.out.splitlines()] == ["queued", "completed"] and not out.err


def test_units_are_read_as_they_are_written() -> None:
    assert (size(999), size(5_030_000_000_000), duration(59.6), duration(None), duration(3661)) == (
        "999 B",
        "5.0 TB",
        "1:00",
        "unknown",
        "1:01:01",
    )
    assert [parse_size(t) for t in ("4096", "2TB", "1.5 GiB", "10kb", "1b")] == [4096, 2 * 10**12, 3 << 29, 10_000, 1]
    assert [parse_duration(t) for t in ("90", "45s", "1.5m", "12h", "7d", "2W")] == [90, 45, 90, 43_200, 604_800, 1_209_600]
    for wrong in ("", "x", "2XB", "-1GB", "1 2"):
        with pytest.raises(ValueError, match="is not a size such as"):
            parse_size(wrong)
        with pytest.raises(ValueError, match="is not a duration such as"):
            parse_duration(wrong)
    assert counts({"bad_row": 2, "a": 1, "b": 1, "tap_full": 1234}) == "tap_full 1,234, bad_row 2, a 1, b 1"


def test_control_characters_of_users_data_do_not_reach_the_terminal() -> None:
    assert printable("row 1\x1b[31m\r\x00\tü ✓\n") == "row 1\\x1b[31m\\r\\x00\\tü ✓\n"


# ------------------------------------------------------------------ option sets
@dataclass(frozen=True, kw_only=True)
class Pair(OptionSet):
    left: Annotated[int, typer.Option("--left")]
    right: Annotated[str, typer.Option("--right")] = "r"


def test_an_option_set_becomes_its_options_and_comes_back_as_one_record() -> None:
    app, seen = typer.Typer(), []

    @app.command()
    @expanded
    def command(name: str, pair: Pair, flag: Annotated[bool, typer.Option("--flag")] = False) -> None:
        """What it does."""
        seen.append((name, pair, flag))

    run = CliRunner()
    assert run.invoke(app, ["n", "--left", "3", "--flag"]).exit_code == 0
    assert run.invoke(app, ["n", "--left", "3", "--right", "x"]).exit_code == 0
    assert seen == [("n", Pair(left=3), True), ("n", Pair(left=3, right="x"), False)]
    missing = run.invoke(app, ["n"])
    assert missing.exit_code == 2 and "--left" in missing.output
    assert "What it does." in run.invoke(app, ["--help"]).output


def test_up_and_run_take_the_same_options_for_the_stack() -> None:
    shared = {"model", "tap", "engines", "workers", "tp", "cpu", "boundaries", "final", "trust_remote_code", "window", "sglang"}
    assert shared <= inspect.signature(up).parameters.keys() & inspect.signature(run_command).parameters.keys()


# ------------------------------------------------------------------ the probe's speed
def test_the_probe_measures_steady_work_and_not_the_start() -> None:
    now = [0.0]
    speed = Speed(clock=lambda: now[0])
    for t, tokens in ((0, 0), (20, 0), (21, 100), (22, 100), (25, 4_100), (26, 5_100), (40, 5_100)):
        now[0] = t
        speed.see(job(tokens=tokens))
    assert speed.tokens_per_s(job("completed", tokens=5_100)) == 1000  # 5,000 tokens from 21 to 26: neither loading nor the ending counts


def test_a_probe_that_is_too_short_falls_back_on_the_jobs_own_times() -> None:
    end = job("completed", tokens=500, started_at=10.0, ended_at=12.0)
    assert measure([job("queued"), end]) == (end, 250, False)
    assert measure([job("queued"), job("paused", "no_engine")])[1] is None
    assert measure([]) == (None, None, False)


def test_an_upload_that_was_given_up_names_the_command_that_goes_on(tmp_path: Path) -> None:
    class GivenUp(Client):
        def upload(self, *paths: Any, **options: Any) -> Any:
            error = ApiError(ErrorCode.COORDINATOR_UNREACHABLE, "gone")
            error.detail["upload_id"] = "up-1"
            raise error

    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    with GivenUp("http://127.0.0.1:9") as client, pytest.raises(ApiError) as e:
        dataset_of(client, [str(path)], Out(), {})
    assert "--resume-upload up-1" in e.value.next_step


# ------------------------------------------------------------------ doctor
def test_the_doctor_goes_on_where_parts_are_missing_and_says_what_to_do(tmp_path: Path) -> None:
    asked = {"url": "http://127.0.0.1:9", "tap": tmp_path / "none", "redis_url": "redis://:hunter2@127.0.0.1:9/0"}
    found = list(examine(**asked, store=tmp_path, cpu=True))
    by = {f.subject: f for f in reversed(found)}
    assert by["coordinator"].level == "FAIL" and "statetap up" in by["coordinator"].todo
    assert by["redis"].level == "FAIL" and by["tap"].level == "FAIL" and by["gpu"].level == "ok"
    assert [f.level for f in found if f.subject == "store promises"] == ["ok"] * 4
    assert all(bool(f.todo) == (f.level != "ok") for f in found)
    assert "hunter2" not in repr(found) and not list(tmp_path.iterdir())
    assert next(f for f in examine(**asked | {"url": None}, store=tmp_path / "none", cpu=True) if f.subject == "store").level == "FAIL"


def test_a_tap_on_a_disk_is_refused_and_shared_memory_is_a_tmpfs(tmp_path: Path) -> None:
    assert disk.file_system(Path("/dev/shm")) == "tmpfs" and disk.file_system(Path("/proc")) == "proc"
    (first,) = disk.tap_findings(tmp_path)
    assert (first.level == "FAIL") == (disk.file_system(tmp_path) not in disk.MEMORY)
    # Where no engine can run, and nobody named a tap: a container of the control plane.
    (missing,) = disk.tap_findings(tmp_path / "none", needed=False)
    assert missing.level == "warn" and missing.todo


def test_gpus_are_told_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def says(text: str, code: int = 0) -> list[tuple[str, str, str]]:
        smi.write_text(f"#!/bin/sh\ncat <<'E'\n{text}\nE\nexit {code}\n")
        smi.chmod(0o755)
        return [(f.level, f.subject, f.text) for f in host.gpus(cpu=False)]

    assert says("0, NVIDIA H200, 143771, 4, 570.1\n1, NVIDIA H200, 143771, 143000, 570.1") == [
        ("ok", "gpu 0", "NVIDIA H200, 4 of 143771 MiB used, driver 570.1"),
        ("warn", "gpu 1", "NVIDIA H200, 143000 of 143771 MiB used, driver 570.1"),
    ]
    assert says("Failed to initialize NVML: Driver/library version mismatch", 9)[0][0] == "warn"


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_a_flag_that_breaks_capture_is_refused_by_name(flag: str) -> None:
    for form in ([flag, "2"], [f"{flag}=2"], [flag.replace("-", "_").replace("__", "--", 1), "2"]):
        with pytest.raises(StatetapError, match=flag) as e:
            check_flags(["--chunked-prefill-size", "64", *form])
        assert e.value.code == "flag_refused"


def test_other_flags_go_to_sglang_as_they_are_and_cpu_defaults_can_be_overridden() -> None:
    argv = server_argv(
        model="m", host="h", port=1, tp=2, trust_remote_code=True, cpu=True, extra=["--max-total-tokens=99", "--mem-fraction-static", "0.8"]
    )
    assert argv[-3:] == ["--max-total-tokens=99", "--mem-fraction-static", "0.8"]
    assert "--disable-radix-cache" in argv and "--trust-remote-code" in argv and argv.count("--max-total-tokens") == 0


def test_a_store_with_one_job_names_it(tmp_path: Path) -> None:
    with pytest.raises(StatetapError, match="no job"):
        find_job_dir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
        (tmp_path / "jobs" / name / "job.json").write_text("{}")
        if name == "a":
            assert find_job_dir(tmp_path) == tmp_path / "jobs" / "a" == find_job_dir(tmp_path / "jobs" / "a")
    with pytest.raises(StatetapError, match="2 jobs"):
        find_job_dir(tmp_path)


def test_gpus_are_shared_out_or_the_lack_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert _devices(4) == ["4", "5", "6", "7"]
    with pytest.raises(StatetapError, match="8 GPUs are needed"):
        _devices(8)


def test_redis_listens_on_no_port_and_keeps_an_append_only_file(tmp_path: Path) -> None:
    argv = redis_argv("redis-server", socket=tmp_path / "s", data=tmp_path)
    options = dict(zip(argv[1::2], argv[2::2], strict=True))
    assert options["--port"] == "0" and options["--appendonly"] == "yes" and options["--maxmemory-policy"] == "noeviction"


def test_a_process_that_ends_at_once_again_and_again_is_called_hopeless(tmp_path: Path) -> None:
    service = Service(name="x", argv=[sys.executable, "-c", "raise SystemExit(9)"], log=tmp_path / "log")
    said: list[str] = []
    service.start()
    for _ in range(HOPELESS_AFTER):
        assert not service.hopeless
        assert service.process is not None
        service.process.wait()
        service.supervise(said.append)
        service._next_start = 0.001  # its pause is over
        service.supervise(said.append)
    assert service.hopeless and "ended with 9" in said[0]
    service.wait(5)


def test_a_process_that_others_kill_again_and_again_is_started_again_each_time(tmp_path: Path) -> None:
    """A storm of kills, or the kernel short of memory, must not end a stack that has work for days."""
    service = Service(name="x", argv=[sys.executable, "-c", "import time; time.sleep(60)"], log=tmp_path / "log")
    said: list[str] = []
    service.start()
    for _ in range(HOPELESS_AFTER + 2):
        assert service.process is not None
        service.process.kill()
        service.process.wait()
        service.supervise(said.append)
        service._next_start = 0.001  # its pause is over
        service.supervise(said.append)
        assert service.running and not service.hopeless
    assert all("was killed (SIGKILL" in line and "in 1 s" in line for line in said)
    service.terminate()
    service.wait(5)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["run", "nowhere.jsonl", "--model", "m", "--out", "o"], 1, "not_found"),
        (["jobs", "--url", "http://127.0.0.1:9"], 1, "no coordinator answers"),
        (["rm", "x"], 1, "neither a job"),
        (["gc", "--older-than", "1y"], 2, "'1y' is not a duration"),
        (["jobs", "--state", "done"], 2, "--state"),
        (["watc"], 2, "watch"),
        (["verify", "."], 1, "no job"),
        (["run"], 2, "Missing"),
    ],
)
def test_an_error_names_its_code_and_the_next_step(args: list[str], code: int, words: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "statetap.cli", *args], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert code == 2 or "next:" in done.stderr


def test_errors_of_a_json_command_are_json_on_stderr(tmp_path: Path) -> None:
    def fails(*args: str) -> tuple[int, dict[str, Any]]:
        done = subprocess.run([sys.executable, "-m", "statetap.cli", *args], cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout == ""
        return done.returncode, json.loads(done.stderr)["error"]

    code, error = fails("jobs", "--url", "http://127.0.0.1:9", "--json")
    assert code == 1 and error["code"] == "coordinator_unreachable" and error["next_step"] and error["retryable"] is True
    code, error = fails("jobs", "--stat", "x", "--json")
    assert code == 2 and error["code"] == "usage" and "--state" in error["message"]
    code, error = fails("verify", ".", "--json")
    assert code == 1 and error["code"] == "not_found"
