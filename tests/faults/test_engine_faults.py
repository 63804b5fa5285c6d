"""What the engine can do wrong: each fault has its own code, costs only its own row, and an engine that is away costs none."""

from __future__ import annotations

import json
import time
from collections import Counter

import pyarrow.parquet as pq
import pytest

from statetap.contracts import keys
from statetap.contracts.layout import MANIFEST
from tests.support.jobs import profile as make_profile
from tests.support.jobs import ready, token_rows
from tests.support.workers import Rig, eventually

LASTING = {
    "nan": "nonfinite_states",
    "zeros": "zero_states",
    "ids": "token_mismatch",
    "shape": "shape_mismatch",
    "missing": "capture_incomplete",
    "500": "engine_rejected",
    "503": "engine_timeout",
    "400": "engine_rejected",
    "toolong": "prompt_too_long",
    "nocapture": "protocol_mismatch",
    "protocol": "protocol_mismatch",
    "error-capture_backpressure": "capture_backpressure",
    "error-tap_full": "tap_full",
    "drop": "engine_unreachable",
    "hang": "engine_timeout",
    "drip": "engine_timeout",
    "cut": "engine_unreachable",
    "short": "shape_mismatch",
}
TRIED_ONCE = {"400", "toolong", "nocapture", "protocol"}  # another try cannot help


def test_each_lasting_fault_fails_its_own_row_with_its_own_code(rig: Rig) -> None:
    """Seen to fail with a client that tried every refusal again (rows that another try cannot help were sent three times)."""
    tokens = {31_000 + n: kind for n, kind in enumerate(LASTING)}
    rig.start_engine(*(f"{kind}@token={token}" for token, kind in tokens.items()))
    worker = rig.start_worker(STATETAP_REQUEST_TIMEOUT_S=1)
    rows = token_rows(60, 12, vocab=30_000)
    bad = {3 * n: token for n, token in enumerate(tokens)}
    for row, token in bad.items():
        rows[row][5] = token
    job = rig.make_job(rows)
    job.give()
    job.wait_done()
    failed = {row: record.code for row, record in job.ledger().items() if record.state == "failed"}
    assert failed == {row: LASTING[tokens[token]] for row, token in bad.items()}
    report = job.finish()
    assert (report.done, report.failed, report.state) == (60 - len(bad), len(bad), "completed_with_errors")
    stats = rig.stats()
    sent = {tokens[token]: stats["rows"][str(row)] for row, token in bad.items() if tokens[token] != "503"}
    assert sent == {kind: 1 if kind in TRIED_ONCE else 3 for kind in LASTING if kind != "503"}
    assert stats["aborts"] == 6  # of the one that hangs and of the one that drips
    assert "Traceback" not in worker.log


def test_a_passing_fault_costs_a_try_and_no_row(rig: Rig) -> None:
    """Seen to fail with a worker that gave a row up at its first error."""
    kinds = ["nan", "zeros", "ids", "shape", "missing", "500", "503", "drop", "error-tap_full", "hang", "drip", "cut", "short"]
    rig.start_engine(*(f"{kind}@token={31_000 + n}:2" for n, kind in enumerate(kinds)))
    rig.start_worker(STATETAP_REQUEST_TIMEOUT_S=1)
    rows = token_rows(30, 12, vocab=30_000)
    for n in range(len(kinds)):
        rows[n][0] = 31_000 + n
    job = rig.make_job(rows)
    job.give()
    job.wait_done()
    assert job.finish().done == 30


def test_an_engine_that_is_away_pauses_the_job_and_fails_no_row(rig: Rig) -> None:
    """Seen to fail with a worker that took no notice of an engine that is gone."""
    engine = rig.start_engine(delay_ms=20)
    port = rig.engine_port
    worker = rig.start_worker(STATETAP_WINDOW=4)
    job = rig.make_job(token_rows(300, 8))
    job.give()
    eventually("some rows are committed", lambda: job.committed() > 5)
    engine.kill()
    eventually("the batch is handed back", lambda: not job.outstanding())
    pause = job.pause()
    assert pause is not None and pause["reason"] == "engine_down" and "did not answer" in pause["message"]
    assert all(record.state == "done" for record in job.ledger().values())
    rig.start_engine(port=port)
    job.give()
    job.wait_done()
    assert job.finish().done == 300
    assert worker.popen.poll() is None


def test_an_engine_that_comes_back_in_time_costs_nothing(rig: Rig) -> None:
    """Seen to fail with an outage that was not waited for."""
    engine = rig.start_engine(delay_ms=20)
    port = rig.engine_port
    worker = rig.start_worker(STATETAP_WINDOW=4, STATETAP_ENGINE_DOWN_AFTER_S=20)
    job = rig.make_job(token_rows(200, 8))
    job.give()
    eventually("some rows are committed", lambda: job.committed() > 5)
    engine.kill()
    eventually("the worker sees it", lambda: "event=engine_away" in worker.log)
    rig.start_engine(port=port)
    job.wait_done()
    assert job.pause() is None and job.finish().done == 200


def test_each_row_of_a_job_says_which_start_of_the_engine_captured_it(rig: Rig) -> None:
    """An engine of another SGLang comes back in the middle of a batch, beside a worker that stays.

    Seen to fail with the READY.json that the worker had read at its start, in the ledger and in what it registers.
    """
    engine = rig.start_engine(delay_ms=20, sglang="0.5.17")
    port = rig.engine_port
    worker = rig.start_worker(STATETAP_WINDOW=4, STATETAP_ENGINE_DOWN_AFTER_S=20)
    job = rig.make_job(token_rows(200, 8))
    job.give()
    eventually("some rows are committed", lambda: job.committed() > 20)
    engine.kill()
    eventually("the worker sees it", lambda: "event=engine_away" in worker.log)
    time.sleep(1)  # what it had answered is committed now
    before = {f"boot-{engine.pid}": ("0.5.17", len(job.ledger()))}
    again = rig.start_engine(port=port, sglang="0.5.23")
    job.wait_done()
    report = job.finish()
    told = {e["boot_id"]: (e["sglang_version"], e["rows"]) for e in report.engines}
    assert told == before | {f"boot-{again.pid}": ("0.5.23", 200 - sum(n for _, n in before.values()))}
    rows = Counter(pq.read_table(job.dir / MANIFEST, columns=["engine"])["engine"].to_pylist())
    assert rows == {boot: n for boot, (_, n) in told.items()}

    def registered() -> list[str]:
        records = [json.loads(rig.redis.get(k) or "{}") for k in rig.redis.scan_iter(keys.ENGINES_PATTERN)]
        return [r["profile"]["sglang_version"] for r in records if r]

    eventually("what is registered is what is there", lambda: registered() == ["0.5.23"])


def test_another_protocol_is_refused_at_the_start(rig: Rig) -> None:
    """Seen to fail with a READY.json whose protocol was not looked at."""
    data = json.loads(ready(rig.profile))
    data["profile"]["protocol"] = 99
    (rig.tap / "READY.json").write_text(json.dumps(data))
    worker = rig.start_worker()
    assert worker.popen.wait(20) == 1
    assert "protocol_mismatch" in worker.log and "Traceback" not in worker.log


def test_an_engine_that_starts_with_another_profile_makes_the_worker_start_again(rig: Rig) -> None:
    """Seen to fail with a worker that saw the change and stayed."""
    rig.start_engine()
    worker = rig.start_worker()
    eventually("the engine is registered", lambda: list(rig.redis.scan_iter(keys.ENGINES_PATTERN)))
    (rig.tap / "READY.json").write_bytes(ready(make_profile(hidden=128)))
    assert worker.popen.wait(30) == 75
    assert not list(rig.redis.scan_iter(keys.ENGINES_PATTERN))


@pytest.mark.parametrize("ready_file", [False, True])
def test_a_worker_without_work_or_engine_stops_at_once(rig: Rig, ready_file: bool) -> None:
    """Seen to fail with a stop that did not end the wait for an engine, and with a signal handler that left RQ in its wait for work."""
    if ready_file:
        rig.start_engine()
    worker = rig.start_worker()
    sign = "event=worker_started" if ready_file else "event=waiting_for_engine"
    eventually("it is up", lambda: sign in worker.log)
    if ready_file:
        eventually("it waits for work", lambda: rig.redis.info("clients")["blocked_clients"])
    assert worker.term(10) == 0 and "Traceback" not in worker.log
