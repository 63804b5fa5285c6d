"""Estimates: exact bytes, and alternatives that fit to the byte."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from statetap.contracts.errors import StoreError
from statetap.contracts.sample_format import SampleFormat
from statetap.coordinator.sizing import Choice, Compressed, Room, alternatives, measure, preflight
from tests.support.jobs import profile

PROFILE = profile(hidden=8, max_length=200)
RAW, FP8 = SampleFormat(PROFILE), SampleFormat(PROFILE, encoding="fp8")
ZSTD = SampleFormat(PROFILE, encoding="zstd")


def kept_of(n: int, format: SampleFormat) -> int:
    """Positions kept of a row of n tokens; of the loss mask as many as it may be, and different for rows of one length is not needed here."""
    return n if not format.thinned else min(n, format.where.last) if format.where.last else (n * 7 % 11) % n + 1 if n else 0


class Lengths:
    """A rows file as far as sizes go."""

    def __init__(self, counts: list[int], format: SampleFormat = RAW) -> None:
        self._counts = np.array(counts, np.int64)
        self._kept = np.array([kept_of(n, format) for n in counts], np.int64)
        self.rows = len(counts)

    def counts(self, positions):
        for at in range(0, self.rows, 64):
            yield self._counts[at : at + 64], self._kept[at : at + 64]


def brute(counts: list[int], longest: int, format: SampleFormat = RAW) -> tuple[int, int, int]:
    fit = [n for n in counts if 0 < n <= longest]
    return len(fit), sum(fit), sum(format.bytes(n, kept_of(n, format)) for n in fit)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 250), min_size=1, max_size=200),
    st.integers(0, 4_000_000),
    st.integers(0, 200),
    st.sampled_from(["all", "loss_mask", "last:1", "last:90"]),
)
def test_alternatives_fit_and_nothing_larger_would(counts: list[int], available: int, rows: int, positions: str) -> None:
    format = SampleFormat(PROFILE, positions=positions)
    choice = Choice.of(PROFILE, rows or None, None)
    taken = counts[: rows or None]
    size = measure(Lengths(counts, format), format, choice)
    assert (size.accepted, size.tokens, size.bytes) == brute(taken, 200, format) and size.rows == len(taken)
    assert size.bytes <= format.most(size.tokens, size.accepted)
    if size.bytes <= available:
        return
    found = {a.field: a for a in alternatives(Lengths(counts, format), format, choice, size, available)}
    if (a := found.get("rows")) is not None:
        assert (a.rows, a.tokens, a.bytes) == brute(taken[: a.value], 200, format) and a.bytes <= available
        assert brute(taken[: a.value + 1], 200, format)[2] > available
    else:
        assert next(brute([n], 200, format)[2] for n in taken if 0 < n <= 200) > available
    if (a := found.get("max_length")) is not None:
        assert (a.rows, a.tokens, a.bytes) == brute(taken, a.value, format) and a.bytes <= available
        assert brute(taken, a.value + 1, format)[2] > available
    else:
        assert brute(taken, min(n for n in taken if n), format)[2] > available


def refused(counts: list[int], format: SampleFormat, room: Room, seen: Compressed | None = None) -> StoreError | None:
    rows, choice = Lengths(counts, format), Choice.of(PROFILE, None, None)
    size = measure(rows, format, choice)
    try:
        preflight(rows, format, choice, size, size.bytes, room, seen)
    except StoreError as e:
        return e
    return None


def test_a_refusal_names_what_is_missing_and_what_would_fit() -> None:
    counts = [100, 20, 30]
    need = brute(counts, 200)[2]
    e = refused(counts, RAW, Room(free=need + 100, reserved=150, kept_free=50))
    assert e is not None
    numbers = e.detail["numbers"]
    assert numbers["missing"] == 100 and numbers["fits_rows"] == 2 and numbers["fits_max_length"] == 99
    assert f"rows=2: {numbers['fits_rows_bytes']:,} bytes" in e.message
    assert refused(counts, RAW, Room(free=need, reserved=0, kept_free=0)) is None
    assert "Not even its first row" in refused(counts, RAW, Room(free=10, reserved=0, kept_free=0)).message  # type: ignore[union-attr]


def test_a_refusal_lists_other_encodings_with_their_bytes() -> None:
    counts = [100, 20, 30]
    half, most = brute(counts, 200, FP8)[2], brute(counts, 200, ZSTD)[2]
    room = Room(free=half, reserved=0, kept_free=0)
    e = refused(counts, RAW, room)
    assert e is not None and f"encoding=fp8: {half:,} bytes" in e.message and f"encoding=zstd: at most {most:,} bytes" in e.message
    numbers = e.detail["numbers"]
    assert numbers["fits_fp8_bytes"] == half and numbers["most_zstd_bytes"] == most and "expected_zstd_bytes" not in numbers
    # What an earlier job took is told where it would fit, and nothing is where it would not.
    expected = round(most * half / most * 0.9)
    e = refused(counts, RAW, room, Compressed(job_id="job-1", ratio=expected / most))
    assert e is not None and f"about {expected:,}" in e.message and "job-1" in e.message
    e = refused(counts, RAW, room, Compressed(job_id="job-1", ratio=0.99))
    assert e is not None and "zstd" not in e.message
    # Neither is offered to a job that has it already.
    e = refused(counts, FP8, Room(free=half - 1, reserved=0, kept_free=0))
    assert e is not None and "encoding=" not in e.message and "rows=2" in e.message
    e = refused(counts, FP8, Room(free=5, reserved=0, kept_free=0))
    assert e is not None and "encoding=" not in e.message
    e = refused(counts, ZSTD, Room(free=most - 1, reserved=0, kept_free=0))
    assert (
        e is not None
        and "at most" in e.message
        and "rows=2: at most " in e.message
        and "encoding=fp8" in e.message
        and "encoding=zstd" not in e.message
    )
