"""Estimates: exact bytes, and alternatives that fit to the byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statetap.contracts.errors import StoreError
from statetap.contracts.tensors import sample_bytes
from statetap.coordinator.sizing import Choice, Room, alternatives, measure, preflight
from tests.support.jobs import profile

PROFILE = profile(hidden=8, max_length=200)


class Lengths:
    """A rows file as far as sizes go."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = np.array(counts, np.int64)
        self.rows = len(counts)

    def lengths(self):
        for at in range(0, self.rows, 64):
            yield self._counts[at : at + 64]


def brute(counts: list[int], longest: int) -> tuple[int, int, int]:
    fit = [n for n in counts if 0 < n <= longest]
    return len(fit), sum(fit), sum(sample_bytes(PROFILE, n) for n in fit)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 250), min_size=1, max_size=200), st.integers(0, 4_000_000), st.integers(0, 200))
def test_alternatives_fit_and_nothing_larger_would(counts: list[int], available: int, rows: int) -> None:
    choice = Choice.of(PROFILE, rows or None, None)
    taken = counts[: rows or None]
    size = measure(Lengths(counts), PROFILE, choice)
    assert (size.accepted, size.tokens, size.bytes) == brute(taken, 200) and size.rows == len(taken)
    if size.bytes <= available:
        return
    found = {a.field: a for a in alternatives(Lengths(counts), PROFILE, choice, available)}
    if (a := found.get("rows")) is not None:
        assert (a.rows, a.tokens, a.bytes) == brute(taken[: a.value], 200) and a.bytes <= available
        assert brute(taken[: a.value + 1], 200)[2] > available
    else:
        assert next(sample_bytes(PROFILE, n) for n in taken if 0 < n <= 200) > available
    if (a := found.get("max_length")) is not None:
        assert (a.rows, a.tokens, a.bytes) == brute(taken, a.value) and a.bytes <= available
        assert brute(taken, a.value + 1)[2] > available
    else:
        assert brute(taken, min(n for n in taken if n))[2] > available


def test_a_refusal_names_what_is_missing_and_what_would_fit(tmp_path: Path) -> None:
    counts = [100, 20, 30]
    need = brute(counts, 200)[2]
    room = Room(free=need + 100, reserved=150, kept_free=50)
    with pytest.raises(StoreError) as e:
        preflight(Lengths(counts), PROFILE, Choice.of(PROFILE, None, None), need, room)
    numbers = e.value.detail["numbers"]
    assert numbers["missing"] == 100 and numbers["fits_rows"] == 2 and numbers["fits_max_length"] == 99
    assert f"rows=2: {numbers['fits_rows_bytes']:,} bytes" in e.value.message
    preflight(Lengths(counts), PROFILE, Choice.of(PROFILE, None, None), need, Room(free=need, reserved=0, kept_free=0))
    with pytest.raises(StoreError, match="Not even its first row"):
        preflight(Lengths(counts), PROFILE, Choice.of(PROFILE, None, None), need, Room(free=10, reserved=0, kept_free=0))
