"""What users see of speed, by the stub engine at a known one. The bounds leave room for a busy machine; `make bench` has the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.service_bench import eta_error, pause_s, same_length, small_job_ratio
from tests.support.coordinator import until
from tests.support.redis import RedisServer
from tests.support.service import Service


def test_a_small_job_beside_a_big_one_takes_about_twice_its_time_alone(tmp_path: Path) -> None:
    """Seen to fail without batches that make room."""
    ratio, note = small_job_ratio(tmp_path, 8_000, 6_000)
    assert ratio < 3.2, note  # one worker of two is 2; without fairness it is the big job's batch, 8 and more


def test_the_eta_holds_from_the_first_twentieth_on(tmp_path: Path) -> None:
    """Seen to fail with twice the time."""
    error, note = eta_error(tmp_path, 1_000, 10_000)
    assert error < 0.3, note


def test_no_prefill_is_sent_two_seconds_after_a_pause(tmp_path: Path) -> None:
    """Seen to fail with a control key that is read every six seconds."""
    seconds, note = pause_s(tmp_path, 2)
    assert seconds < 3, note  # the promise is two, on a machine that is not overloaded


@pytest.mark.parametrize(
    ("bound", "engine", "env"),
    [
        ("prefill", {"tokens_per_s": 3_000}, {}),
        ("d2h", {"held_ms": 400}, {}),
        ("tap", {"tokens_per_s": 30_000}, {"STATETAP_TAP_BYTES": 4 * 60_000, "STATETAP_WINDOW": 64}),
    ],
)
def test_the_verdict_names_what_bounds_a_job(tmp_path: Path, redis_server: RedisServer, bound: str, engine: dict, env: dict) -> None:
    """Seen to fail with what the last workers told, shown while the engine is away."""
    with Service(tmp_path, redis_server.url) as service:
        service.start(**engine, **env)
        job = service.api.submit(service.dataset(same_length(4_000, 100)))["job_id"]
        told = until(lambda: service.api.job(job)["bound"], "a verdict", 30)
        until(lambda: service.api.job(job)["bound"] == bound, f"it is {bound} (first: {told})", 15)
        service.rig.processes[0].kill()
        down = service.api.until_state(job, "paused", seconds=40)
        assert down["bound"] == "no_engine" and down["reason"] in ("engine_down", "no_engine")
