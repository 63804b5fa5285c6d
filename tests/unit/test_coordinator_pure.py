"""The coordinator's pure parts: sums, rates, states, engines."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statetap.contracts.errors import RequestError
from statetap.contracts.records import Batch, BatchTotals, EngineInfo
from statetap.coordinator import engines
from statetap.coordinator.states import Seen, judge
from statetap.coordinator.totals import PlanIndex, RateWindow, Sums, TotalsFold
from tests.support.coordinator import PROFILE

PLAN = [
    Batch(batch=0, start=0, stop=10, tokens=100),
    Batch(batch=1, start=10, stop=15, tokens=50),
    Batch(batch=2, start=15, stop=20, tokens=7),
]


def raw(**fields: int | dict[str, int]) -> str:
    return json.dumps(BatchTotals(**fields).to_dict())


def test_sums_add_up_over_batches_and_know_what_is_left() -> None:
    fold = TotalsFold(PlanIndex(PLAN))
    assert fold.sums == Sums(tokens_left=157)
    fold.update(
        {
            "0": raw(batch=0, done=4, failed=1, tokens=40, bytes=400, errors={"a": 1}),
            "1": raw(batch=1, done=3, skipped=2, tokens=30, bytes=3),
        }
    )
    assert (fold.sums.done, fold.sums.failed, fold.sums.skipped, fold.sums.rows) == (7, 1, 2, 10)
    assert (fold.sums.tokens, fold.sums.bytes, fold.sums.finished, fold.sums.errors) == (70, 403, 1, {"a": 1})
    assert fold.sums.tokens_left == 60 + 0 + 7, "a finished batch leaves nothing, whatever its rows became"
    assert fold.next_batch(set()) == 0
    assert fold.next_batch({0}) == 2
    assert fold.next_batch({0, 2}) is None


@pytest.mark.parametrize("wrong", ["", "[]", "null", "{}", '{"batch": 1}', '{"batch": 0, "done": 11}', '{"batch": 0, "done": "x"}'])
def test_totals_that_cannot_be_are_not_counted(wrong: str) -> None:
    fold = TotalsFold(PlanIndex(PLAN))
    fold.update({"0": wrong, "9": raw(batch=9, done=1), "x": raw(batch=0, done=1)})
    assert fold.sums.rows == 0


def test_a_field_that_goes_or_shrinks_is_taken_back() -> None:
    fold = TotalsFold(PlanIndex(PLAN))
    fold.update({"0": raw(batch=0, done=10, tokens=100), "1": raw(batch=1, done=5, tokens=50)})
    fold.update({"0": raw(batch=0, done=2, tokens=20)})
    assert (fold.sums.done, fold.sums.finished, fold.sums.tokens_left) == (2, 0, 137)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12)), min_size=3, max_size=3))
def test_open_is_never_negative(counts: list[tuple[int, int, int]]) -> None:
    fold = TotalsFold(PlanIndex(PLAN))
    fold.update({str(b): raw(batch=b, done=d, failed=f, skipped=s) for b, (d, f, s) in enumerate(counts)})
    assert 0 <= fold.sums.rows <= 20
    assert 0 <= fold.sums.tokens_left <= 157


def test_a_row_is_found_in_its_batch() -> None:
    plan = PlanIndex(PLAN)
    assert [plan.batch_of(r) for r in (0, 9, 10, 14, 15, 19, 20)] == [0, 0, 1, 1, 2, 2, 3]


def test_rates_slide_and_forget_and_never_count_a_jump() -> None:
    window = RateWindow(30)
    window.add(0, Sums(done=1000, tokens=10_000, bytes=5))  # there before: no speed
    assert window.rates().tokens_per_s == 0
    for second in range(1, 11):
        window.add(second, Sums(done=1000 + second, tokens=10_000 + 100 * second, bytes=5))
    assert window.rates().tokens_per_s == pytest.approx(100)
    assert window.rates().eta_s(1000) == pytest.approx(10)
    for second in range(11, 60):
        window.add(second, Sums(done=1010, tokens=11_000, bytes=5))
    assert window.rates().tokens_per_s == 0
    assert window.rates().eta_s(1000) is None
    assert len(window._samples) < 35
    window.reset()
    window.add(60, Sums(done=5000, tokens=90_000))
    assert window.rates().rows_per_s == 0


SEEN = Seen(control="run", started=False, engines=1, healthy=1, free_bytes=10, min_free_bytes=5)


@pytest.mark.parametrize(
    ("change", "state", "reason"),
    [
        ({}, "queued", ""),
        ({"started": True}, "running", ""),
        ({"control": "pause", "engines": 0}, "paused", "user"),
        ({"trouble": ("store_io", "x")}, "paused", "store_io"),
        ({"trouble": ("store_full", "x")}, "paused", "low_disk"),
        ({"free_bytes": 4, "engines": 0}, "paused", "low_disk"),
        ({"engines": 0, "healthy": 0}, "paused", "no_engine"),
        ({"healthy": 0}, "paused", "engine_down"),
        ({"worker_pause": ("engine_down", "x")}, "paused", "engine_down"),
        ({"circuit": "x"}, "paused", "circuit_open"),
    ],
)
def test_a_job_that_does_not_move_says_why(change: dict, state: str, reason: str) -> None:
    verdict = judge(replace(SEEN, **change))
    assert (verdict.state, verdict.reason) == (state, reason)
    assert bool(verdict.message) == (state == "paused")
    assert verdict.feeds == (state != "paused")
    assert verdict.control == ("pause" if reason in ("user", "low_disk") else "run")


def info(**fields: object) -> str:
    base = {"engine_id": "e", "url": "u", "profile_id": PROFILE.profile_id, "profile": PROFILE.to_dict(), "worker_ids": ["a"]}
    return json.dumps(EngineInfo.from_dict(base | fields).to_dict())


def test_records_of_one_engine_are_merged_and_broken_ones_hide_nothing() -> None:
    found = engines.parse(
        [info(healthy=False, registered_at=5.0), "}", None, "[]", info(worker_ids=["b"], registered_at=3.0), info(engine_id="f")]
    )
    assert [(e.engine_id, e.worker_ids, e.workers, e.healthy) for e in found] == [("e", ["a", "b"], 2, True), ("f", ["a"], 1, True)]
    assert found[0].registered_at == 3.0
    assert engines.workers_of(found, PROFILE.profile_id) == 3
    assert engines.workers_of(found, "other") == 0
    assert engines.only_model(found) == "tiny"


def test_a_live_engine_whose_profile_is_not_whole_is_refused_with_the_reason() -> None:
    broken = engines.parse([info(profile={"model": "x"})])
    with pytest.raises(RequestError, match="not whole"):
        engines.choose(broken, None, None, "", wait=False)
