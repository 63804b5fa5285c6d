"""The ring between GPU and tap: regions never overlap, nothing blocks, all is given back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from statetap.engine.ring import ALIGN, Region, Ring


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3), st.booleans()), max_size=200), st.randoms(use_true_random=False))
def test_regions_never_overlap_and_all_space_comes_back(steps: list[tuple[int, int, bool]], rnd: object) -> None:
    ring = Ring(100 * ALIGN)
    held: list[tuple[Region, int]] = []
    for blocks, holders, release in steps:
        region = ring.take(blocks * ALIGN - 1, holders)
        if region is not None:
            assert region.start >= 0 and region.start + region.size <= 100 * ALIGN
            for other, _ in held:
                assert region.start + region.size <= other.start or other.start + other.size <= region.start
            held.append((region, holders))
        if release and held:  # in any order
            region, count = held.pop(rnd.randrange(len(held)))  # type: ignore[attr-defined]
            for _ in range(count):
                region.done()
    for region, count in held:
        for _ in range(count):
            region.done()
    assert ring.used == 0
    assert ring.take(100 * ALIGN, 1) is not None


def test_a_full_ring_says_so_and_a_region_goes_when_its_last_holder_does() -> None:
    ring = Ring(10 * ALIGN)
    first = ring.take(6 * ALIGN, 2)
    assert first is not None
    assert ring.take(5 * ALIGN, 1) is None
    assert ring.take(11 * ALIGN, 1) is None
    first.done()
    assert ring.take(5 * ALIGN, 1) is None
    first.done()
    assert ring.take(5 * ALIGN, 1) is not None
