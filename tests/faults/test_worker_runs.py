"""A worker without faults, and rows that are never sent: each row ends in one state, and the files are right."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import load_file

from statetap.contracts import keys
from statetap.store.verify import verify_job
from tests.support.jobs import StateMaker, sample_payload, token_rows
from tests.support.workers import Rig, eventually


def test_two_workers_do_a_job_and_every_file_is_what_the_engine_captured(rig: Rig) -> None:
    """Seen to fail with a window of one (the engine never had several prompts)."""
    rig.start_engine(delay_ms=20)
    workers = [rig.start_worker(f"worker-{n}") for n in range(2)]
    job = rig.make_job([row[: 1 + n % 40] for n, row in enumerate(token_rows(300, 40))], batch_tokens=1_000)
    assert len(job.batches) > 4
    job.give()
    job.wait_done()
    report = job.finish()
    assert (report.done, report.failed, report.skipped, report.state) == (300, 0, 0, "completed")
    assert verify_job(job.dir, job.rows_path).ok
    stats = rig.stats()
    assert stats["requests"] == 300 and stats["most_inflight"] > 8
    maker = StateMaker(rig.profile)
    for row in (0, 7, 299):
        path = job.dir / f"rows_0-2000/data_{row}.safetensors"
        tensors = load_file(job.dir / "norm.safetensors")
        assert tensors["weight"].shape == (64,)
        ids = np.frombuffer(path.read_bytes()[-5 * (1 + row % 40) : -(1 + row % 40)], np.int32)
        assert sample_payload(path.read_bytes(), rig.profile, len(ids)) == b"".join(maker.states(ids))
    engines = [json.loads(rig.redis.get(k)) for k in rig.redis.scan_iter(keys.ENGINES_PATTERN)]
    assert {e["healthy"] for e in engines} == {True} and len(engines) == 2
    assert [w.term() for w in workers] == [0, 0]
    assert not list(rig.redis.scan_iter(keys.ENGINES_PATTERN))


def test_a_finished_batch_given_again_prefills_nothing(rig: Rig) -> None:
    """Seen to fail with a resume that saw neither ledger nor files."""
    rig.start_engine()
    rig.start_worker()
    job = rig.make_job(token_rows(50, 10))
    job.give()
    job.wait_done()
    rig.redis.flushall()  # the totals come back from the ledger
    job.give()
    job.wait_done()
    assert rig.stats()["requests"] == 50
    assert job.finish().done == 50


def test_rows_that_cannot_be_sent_are_skipped_with_their_reason(rig: Rig) -> None:
    """Seen to fail with a worker that sent every row."""
    rig.start_engine()
    rig.env["STATETAP_TAP_BYTES"] = str(2 * 1_000_000)  # a share of 1 MB: 1,900 tokens of 512 bytes
    rig.start_worker()
    good = token_rows(1, 10)[0]
    rows = [good, [], [1] * 5000, [5, 32_000], [5, -1], [1] * 3000, good, [3]]
    job = rig.make_job(rows, errors={6: "no_supervised_token"})
    job.give()
    job.wait_done()
    report = job.finish()
    assert (report.done, report.skipped) == (2, 6)
    codes = {row: record.code for row, record in job.ledger().items() if record.code}
    assert codes == {
        1: "empty_prompt",
        2: "prompt_too_long",
        3: "bad_token_id",
        4: "bad_token_id",
        5: "row_exceeds_tap",
        6: "no_supervised_token",
    }
    assert job.ledger()[3].message == "position 1 is token 32000; the model has 32000"
    assert rig.stats()["requests"] == 2


def test_a_small_tap_only_makes_rows_wait(rig: Rig) -> None:
    """Seen to fail with an admission that did not count the tap's bytes."""
    rig.start_engine(delay_ms=5)
    rig.env["STATETAP_TAP_BYTES"] = str(2 * 64_000)  # room for two rows of 50 tokens
    rig.start_worker()
    job = rig.make_job(token_rows(60, 50))
    job.give()
    job.wait_done()
    assert job.finish().done == 60
    stats = rig.stats()
    assert stats["requests"] == 60 and stats["most_inflight"] <= 2


def test_pause_stops_sending_and_hands_the_batch_back(rig: Rig) -> None:
    """Seen to fail with a horse that did not read the job's control key."""
    rig.start_engine(delay_ms=50)
    worker = rig.start_worker(STATETAP_WINDOW=2)
    job = rig.make_job(token_rows(150, 5))
    job.give()
    eventually("some rows are committed", lambda: job.committed() > 10)
    rig.redis.set(keys.control(job.id), "pause")
    eventually("the batch is handed back", lambda: not job.outstanding(), 5)
    done = job.committed()
    assert 10 < done < 150 and job.lease() is None
    assert rig.stats()["requests"] == done  # what was sent was committed
    rig.redis.set(keys.control(job.id), "run")
    job.give()
    job.wait_done()
    assert rig.stats()["requests"] == 150
    assert "reason=pause" in worker.log
    assert job.finish().done == 150
