"""Watching jobs: one poller for all who watch, and for each of them the newest snapshot only.

Invariant: however many watch, jobs are looked at once a second in all, and a watcher that is slow costs nothing: it is never queued for,
it finds the newest snapshot when it is ready. Snapshots are whole, so nothing has to be replayed. With Redis away the last known state is
told; a watch ends with the job, with its deletion, and at once when the coordinator stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator

import anyio.to_thread

from ..contracts.errors import StatetapError
from ..contracts.records import JobSpec
from . import models
from .catalog import Catalog
from .status import StatusReader

log = logging.getLogger(__name__)

POLL_S = 1.0
QUIET_S = 10.0  # after so long without a change a watcher hears that the line stands
KEPT = 1000  # snapshots of ended jobs that watchers of all jobs may still have to hear of
SKEW_MS = 5000


class Events:
    """Belongs to the event loop."""

    def __init__(self, catalog: Catalog, status: StatusReader) -> None:
        self._catalog = catalog
        self._status = status
        self._watched: Counter[str] = Counter()  # job -> watchers of it alone
        self._all = 0  # watchers of all jobs
        self._complete = False  # whether a look has covered all jobs since somebody watches them
        self._snapshots: OrderedDict[str, tuple[int, models.Job]] = OrderedDict()  # by sequence number, the last changed last
        self._gone: set[str] = set()  # watched, and deleted
        self._sequence = 0
        self._changed = asyncio.Event()  # set, and replaced, at every change
        self._look_now = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def watchers(self) -> int:
        return self._watched.total() + self._all

    def stop(self) -> None:
        """End every watch at once."""
        self._stopping = True
        self._wake()
        if self._poller is not None:
            self._poller.cancel()

    async def job(self, spec: JobSpec, after: int | None) -> AsyncGenerator[models.Job | None]:
        """Snapshots of one job newer than version ``after``; None after QUIET_S without one. The terminal one is told whatever ``after``."""
        self._watched[spec.job_id] += 1
        held = self._snapshots.get(spec.job_id)
        if held is not None and (self._watched[spec.job_id] == 1 or held[1].state.terminal):
            del self._snapshots[spec.job_id]  # of a watch before this one: the job may have been resumed or retried since
        try:
            self._poll_on(at_once=spec.job_id not in self._snapshots)
            while not self._stopping and spec.job_id not in self._gone:
                changed = self._changed
                job = self._snapshots[spec.job_id][1] if spec.job_id in self._snapshots else None
                if job is not None and (job.state.terminal or after is None or job.version > after):
                    after = job.version
                    yield job
                    if job.state.terminal:
                        return
                elif not await _within(changed, QUIET_S):
                    yield None
        finally:
            self._watched[spec.job_id] -= 1
            if not self._watched[spec.job_id]:
                del self._watched[spec.job_id]

    async def all(self, after: int | None) -> AsyncGenerator[tuple[int, models.Job] | None]:
        """(sequence number, snapshot) of each job that changed. At first each job that has not ended; or, to go on after a cut, each that
        changed since sequence number ``after``, those that ended among them."""
        self._all += 1
        try:
            self._poll_on(at_once=not self._complete)
            while not self._complete and not self._stopping:
                if not await _within(self._changed, QUIET_S):
                    yield None
            if after is not None and after > time.time() * 1000 + SKEW_MS:
                after = None  # not one of ours
            for job in await self._ended_since(after) if after is not None else []:
                yield after or 0, job
            last, first = after or 0, after is None
            while not self._stopping:
                changed = self._changed
                news = [pair for pair in self._newer(last) if not (first and pair[1].state.terminal)]
                last, first = max(last, self._sequence), False
                for sequence, job in news:
                    held = self._snapshots.get(job.job_id)
                    if held is None or held[0] == sequence:  # else it changed while others were sent, and comes with the next
                        yield sequence, job
                if changed is self._changed and not await _within(changed, QUIET_S):
                    yield None
        finally:
            self._all -= 1
            self._complete = self._complete and self._all > 0

    def _newer(self, sequence: int) -> list[tuple[int, models.Job]]:
        found = []
        for pair in reversed(self._snapshots.values()):
            if pair[0] <= sequence:
                break
            found.append(pair)
        return found[::-1]

    async def _ended_since(self, sequence: int) -> list[models.Job]:
        """Jobs that ended after a sequence number was given out (they are milliseconds) and that no look has seen since."""

        def look() -> list[JobSpec]:
            since = (sequence - SKEW_MS) / 1000
            specs = [s for s in self._catalog.jobs() if s.job_id not in known and self._catalog.control(s.job_id).ended_at > since]
            return specs[:KEPT]

        known = set(self._snapshots)
        return await self._status.tell(await anyio.to_thread.run_sync(look))

    # the poller

    def _poll_on(self, *, at_once: bool) -> None:
        """Keep the poller running; it ends by itself when nobody watches."""
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll(), name="events")
        if at_once:
            self._look_now.set()

    async def _poll(self) -> None:
        while self.watchers and not self._stopping:
            started = time.monotonic()
            self._look_now.clear()
            try:
                await self._round()
            except StatetapError as e:
                log.warning("events: %s", e)
            except Exception:
                log.exception("events: a look failed")
            await _within(self._look_now, max(0.0, POLL_S - (time.monotonic() - started)))
        self._snapshots.clear()
        self._complete = False

    async def _round(self) -> None:
        everything = self._all > 0
        wanted = set(self._watched)
        if everything:
            # Those that were seen working and have ended since are told once more.
            wanted |= {i for i, (_, job) in self._snapshots.items() if not job.state.terminal}
            wanted |= {s.job_id for s in await anyio.to_thread.run_sync(self._status.working)}
        specs = await anyio.to_thread.run_sync(self._specs, wanted)
        jobs = await self._status.tell(specs)
        changed = everything and not self._complete
        for job in jobs:
            held = self._snapshots.get(job.job_id)
            if held is None or held[1].version != job.version:
                self._sequence = max(self._sequence + 1, round(time.time() * 1000))
                self._snapshots[job.job_id] = self._sequence, job
                self._snapshots.move_to_end(job.job_id)
                changed = True
        missing = wanted - {j.job_id for j in jobs}
        self._gone = await anyio.to_thread.run_sync(lambda: {i for i in missing if not self._catalog.job_path(i).exists()})
        for job_id in self._gone:
            self._snapshots.pop(job_id, None)
            changed = True
        self._drop_old()
        self._complete = everything and self._all > 0
        if changed:
            self._wake()

    def _specs(self, job_ids: set[str]) -> list[JobSpec]:
        found = []
        for job_id in job_ids:
            with contextlib.suppress(StatetapError):  # deleted; that is looked at afterwards
                found.append(self._catalog.job(job_id))
        return found

    def _drop_old(self) -> None:
        """Snapshots that nobody waits for: of ended jobs all but the last KEPT, and without watchers of all jobs what none watches."""
        old = [i for i, (_, job) in self._snapshots.items() if job.state.terminal and i not in self._watched]
        for job_id in old[: max(len(old) - KEPT, 0)] if self._all else old:
            del self._snapshots[job_id]
        if not self._all:
            for job_id in self._snapshots.keys() - self._watched.keys():
                del self._snapshots[job_id]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Whether it is set within this time."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
