"""Pure parts of the CLI: exit codes, the progress line, flags, finding a job, messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from statetap.cli.exits import Exit, exit_of
from statetap.cli.main import find_job_dir
from statetap.cli.process import HOPELESS_AFTER, Service
from statetap.cli.redis_server import redis_argv
from statetap.cli.stack import _devices
from statetap.cli.watching import duration, line, size
from statetap.contracts.errors import StatetapError
from statetap.engine.flags import REFUSED, check_flags, server_argv


def job(state: str = "running", reason: str = "", **rows: int) -> dict[str, Any]:
    counts = {"total": 37312, "done": 0, "failed": 0, "skipped": 0, "open": 0, **rows}
    return {
        "state": state,
        "reason": reason,
        "rows": counts,
        "bytes": {"expected": 1, "committed": 5_030_000_000_000},
        "rates": {"rows_per_s": 18.0, "tokens_per_s": 42785.3, "bytes_per_s": 1.0},
        "eta_s": 86399.0,
    }


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
    assert (size(999), size(5_030_000_000_000), duration(59.6), duration(None), duration(3661)) == (
        "999 B",
        "5.0 TB",
        "1:00",
        "unknown",
        "1:01:01",
    )


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


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["run", "nowhere.jsonl", "--model", "m", "--out", "o"], 1, "not_found"),
        (["jobs", "--url", "http://127.0.0.1:9"], 1, "no coordinator answers"),
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
