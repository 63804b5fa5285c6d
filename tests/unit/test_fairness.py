"""The order of the queue and who makes room, as pure functions."""

from __future__ import annotations

from statetap.coordinator.fairness import SLICE_S, Running, Share, order, to_yield


def share(job_id: str, *, priority: int = 0, leased: int = 0, served: float = 0.0, left: int = 0, waiting: int = 0) -> Share:
    return Share(
        job_id=job_id, priority=priority, leased=leased, served=served, left=left, waiting=tuple(f"{job_id}-{i}" for i in range(waiting))
    )


def running(job_id: str, batch: int, seconds: float = 60.0) -> Running:
    return Running(job_id=job_id, batch=batch, seconds=seconds)


def test_the_job_without_a_worker_goes_first_and_then_they_take_turns() -> None:
    big, small = share("big", leased=2, served=900, waiting=2), share("small", waiting=2)
    assert order([big, small], workers=2) == ["small-0", "small-1", "big-0", "big-1"]
    even = [share("a", leased=1, left=1000, waiting=2), share("b", leased=1, left=5, waiting=2)]
    assert order(even, workers=2) == ["b-0", "a-0", "b-1", "a-1"]


def test_priority_decides_alone() -> None:
    shares = [share("low", waiting=2), share("high", priority=1, leased=3, served=1e9, waiting=2)]
    assert order(shares, workers=4) == ["high-0", "high-1", "low-0", "low-1"]


def test_with_more_jobs_than_workers_the_tokens_served_decide() -> None:
    shares = [share("a", served=50, waiting=1), share("b", leased=1, served=20, waiting=1), share("c", served=10, waiting=1)]
    assert order(shares, workers=1) == ["c-0", "b-0", "a-0"]


def test_one_batch_of_the_job_with_two_workers_makes_room() -> None:
    big, small = share("big", leased=2), share("small", waiting=1)
    at_work = [running("big", 1, 3.0), running("big", 2, 30.0)]
    assert to_yield([big, small], at_work, workers=2) == [at_work[1]]
    assert to_yield([big, small], at_work[:1], workers=2) == []  # one has been asked, or a worker is free
    assert to_yield([share("big", leased=1), share("small", leased=1, waiting=1)], at_work, workers=2) == []


def test_with_one_worker_batches_make_room_after_a_slice() -> None:
    big, small = share("big", leased=1, served=100), share("small", served=1, waiting=1)
    assert to_yield([big, small], [running("big", 1, SLICE_S / 2)], workers=1) == []
    assert to_yield([big, small], [running("big", 1, SLICE_S)], workers=1) == [running("big", 1, SLICE_S)]
    late = share("late", served=500, waiting=1)  # has had more than its share
    assert to_yield([big, late], [running("big", 1)], workers=1) == []


def test_a_higher_priority_takes_a_worker_at_once_and_a_lower_one_never() -> None:
    low, high = share("low", leased=1), share("high", priority=3, waiting=1)
    assert to_yield([low, high], [running("low", 1, 0.1)], workers=1) == [running("low", 1, 0.1)]
    assert to_yield([share("high", priority=3, leased=1), share("low", waiting=1)], [running("high", 1)], workers=1) == []
