"""Who goes first among jobs of one profile, and who has to make room. Pure.

A batch is 20 to 60 seconds of work, so fairness by giving batches out in turn is not enough: a small job that comes while all workers are
at a big one would wait for a batch of it to end. So the queue's order is set anew at each look, and a batch can be asked to yield: its
worker commits what is in flight and hands the rest back, which costs its next attempt a look at the ledger.

Invariant: priority decides alone where it differs. Among equals, each job has a worker where there are as many workers as jobs; else the
tokens prefilled lately decide.
"""

from __future__ import annotations

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
    by_leases = len(shares) <= workers
    left = {s.job_id: list(s.waiting) for s in shares}
    given = {s.job_id: s.leased for s in shares}
    found: list[str] = []
    while candidates := [s for s in shares if left[s.job_id]]:
        first = min(candidates, key=lambda s: (-s.priority, *(_by_leases(s, given) if by_leases else _by_tokens(s, given)), s.job_id))
        found.append(left[first.job_id].pop(0))
        given[first.job_id] += 1
    return found


def _by_leases(share: Share, given: dict[str, int]) -> tuple[float, ...]:
    # At a tie the smaller job: its batches are the shorter ones, so the worker that comes next is most likely its own.
    return given[share.job_id], share.left


def _by_tokens(share: Share, given: dict[str, int]) -> tuple[float, ...]:
    return share.served, given[share.job_id]


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
