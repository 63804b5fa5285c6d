"""The queue of a profile with several jobs, brought into the order of fairness.py at each look; long batches asked to make room, for a
job that has no worker and for a batch whose worker was lost: it stands first in the queue, but all may be at batches of a minute."""

from __future__ import annotations

import logging
import time
from collections import defaultdict

from ..contracts import keys
from .fairness import Running, Share, order, to_yield
from .feed import Feed
from .view import JobView

log = logging.getLogger(__name__)

LOST_WAITS_S = 0.5  # of a lost batch, given out again: a worker that is free has it by then; less than a look, so that one is enough


def arrange(feed: Feed, profile_id: str, group: list[JobView], workers: int, now: float) -> None:
    """``group``: the jobs of a profile that are fed now. Costs nothing while there is only one and nothing is lost. Raises RedisError."""
    for view in group:
        at_work = {(b, view.entries[b].attempt) for b in view.leased if b in view.entries}
        view.leased_since = {key: view.leased_since.get(key, now) for key in at_work}
    _room_for_lost(feed, group)
    if len(group) < 2 or not workers:
        return
    queued = feed.queued(keys.queue(profile_id))
    mine = {e.rq_id: v.spec.job_id for v in group for e in v.entries.values() if not e.started}
    waiting: dict[str, list[str]] = defaultdict(list)
    for rq_id in queued:
        if (job_id := mine.get(rq_id)) is not None:
            waiting[job_id].append(rq_id)
    shares = [
        Share(
            job_id=v.spec.job_id,
            priority=v.spec.priority,
            leased=len(v.leased_since),
            served=v.window.rates().tokens_per_s,
            left=v.sums.tokens_left,
            waiting=tuple(waiting[v.spec.job_id]),
        )
        for v in group
    ]
    wanted = order(shares, workers)
    wanted += [i for i in queued if i not in mine]  # of jobs that are not fed now: they are handed back at once
    if wanted != queued:
        feed.reorder(keys.queue(profile_id), queued, wanted)
    by_id = {v.spec.job_id: v for v in group}
    running = [
        Running(job_id=v.spec.job_id, batch=batch, seconds=now - since)
        for v in group
        for (batch, attempt), since in v.leased_since.items()
        if (batch, attempt) not in v.yielded
    ]
    for r in to_yield(shares, running, workers):
        view = by_id[r.job_id]
        attempt = view.entries[r.batch].attempt
        feed.give_way(r.job_id, r.batch, attempt)
        view.yielded.add((r.batch, attempt))
        log.info("%s: batch %d makes room for another job", r.job_id, r.batch)


def _room_for_lost(feed: Feed, group: list[JobView]) -> None:
    """Have one batch make room for each lost one that no worker takes; the youngest, of a job that does not go before."""
    for view in group:
        view.room_made &= {(e.batch, e.attempt) for e in view.entries.values()}
        for entry in view.entries.values():
            lost = entry.batch, entry.attempt
            if not entry.lost or entry.started or lost in view.room_made or time.time() - entry.enqueued_at < LOST_WAITS_S:
                continue
            running = [
                (v.spec.priority, -since, v, key)
                for v in group
                for key, since in v.leased_since.items()
                if key not in v.yielded and v.spec.priority <= view.spec.priority
            ]
            if not running:
                continue
            *_, other, (batch, attempt) = min(running, key=lambda r: r[:2])
            feed.give_way(other.spec.job_id, batch, attempt)
            other.yielded.add((batch, attempt))
            view.room_made.add(lost)
            log.info("%s: batch %d makes room for batch %d of %s, which was lost", other.spec.job_id, batch, entry.batch, view.spec.job_id)
