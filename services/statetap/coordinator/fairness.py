"""Who goes first among jobs of one profile, and who has to make room. Pure.

A batch is 20 to 60 seconds of work, so fairness by giving batches out in turn is not enough: a small job that comes while all workers are
at a big one would wait for a batch of it to end. So the queue's order is set anew at each look, and a batch can be asked to yield: its
worker commits what is in flight and hands the rest back, which costs its next attempt a look at the ledger.

Invariant: priority decides alone where it differs. Among equals, each job has a worker where there are as many workers as jobs; else the
tokens prefilled lately decide.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SLICE_S = 5.0  # a batch that shares its worker with other jobs runs at least so long: yielding costs about a second


@dataclass(frozen=True, kw_only=True)
class Share:
    """How one job stands at this look. ``served``: tokens a second of late; ``left``: tokens still to prefill; ``waiting``: rq ids of its
    queued batches, in order."""

    job_id: str
    priority: int
    leased: int
    served: float
    left: int
    waiting: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Running:
    """A batch that a worker is at. ``seconds``: since it was first seen so."""

    job_id: str
    batch: int
    seconds: float


def order(shares: Sequence[Share], workers: int) -> list[str]:
    """The rq ids of all queued batches, the first to go first."""
    by_id = {s.job_id: s for s in shares}
    key = _by_leases if len(shares) <= workers else _by_tokens
    # One entry a job, for its next batch; only the key of the job that was chosen changes.
    heap = [(key(s, 0), s.job_id, 0) for s in shares if s.waiting]
    heapq.heapify(heap)
    found: list[str] = []
    while heap:
        _, job_id, n = heap[0]
        share = by_id[job_id]
        found.append(share.waiting[n])
        if n + 1 < len(share.waiting):
            heapq.heapreplace(heap, (key(share, n + 1), job_id, n + 1))
        else:
            heapq.heappop(heap)
    return found


def _by_leases(share: Share, given: int) -> tuple[float, ...]:
    # At a tie the smaller job: its batches are the shorter ones, so the worker that comes next is most likely its own.
    return -share.priority, share.leased + given, share.left


def _by_tokens(share: Share, given: int) -> tuple[float, ...]:
    return -share.priority, share.served, share.leased + given


def to_yield(shares: Iterable[Share], running: Iterable[Running], workers: int) -> list[Running]:
    """Batches that have to make room: at most one for each job that waits and has no worker."""
    by_id = {s.job_id: s for s in shares}
    at_work = [r for r in running if r.job_id in by_id]
    if len(at_work) < workers:  # somebody is free, or about to be
        return []
    leased = {s.job_id: s.leased for s in by_id.values()}
    equals = len(by_id) <= workers
    found: list[Running] = []
    for hungry in sorted((s for s in by_id.values() if s.waiting and not s.leased), key=lambda s: (-s.priority, s.served)):
        candidates = [r for r in at_work if r not in found and _gives_way(by_id[r.job_id], leased[r.job_id], r, hungry, equals)]
        if not candidates:
            continue
        # The job with the lowest priority, then the most workers, then the most tokens; of its batches the one that ran the longest.
        chosen = max(candidates, key=lambda r: (-by_id[r.job_id].priority, leased[r.job_id], by_id[r.job_id].served, r.seconds))
        leased[chosen.job_id] -= 1
        found.append(chosen)
    return found


def _gives_way(holder: Share, leased: int, batch: Running, hungry: Share, equals: bool) -> bool:
    if holder.priority != hungry.priority:
        return holder.priority < hungry.priority
    if equals:
        return leased > 1
    return batch.seconds >= SLICE_S and holder.served >= hungry.served
