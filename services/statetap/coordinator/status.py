"""The status of jobs: sums over batch totals, rates, ETA.

Invariant: done + failed + skipped + open = total, and never more than what a ledger's fsync stands behind. An ended job is told from
the store alone, without Redis. However many watch, a job's totals are read at most twice a second. A snapshot's version grows whenever the
snapshot changed, and never goes back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field

import anyio.to_thread
import redis
import redis.asyncio

from ..contracts import keys
from ..contracts.errors import StatetapError
from ..contracts.records import JobControl, JobSpec, JobState, Retain
from ..contracts.sample_format import Encoding
from . import models
from .bounds import bound_of, verdict
from .catalog import Catalog, ended
from .reconciler import Reconciler
from .totals import Rates, Sums, TotalsFold

log = logging.getLogger(__name__)

CACHE_S = 0.5
CHUNK = 100  # jobs read in one round trip
IDLE_S = 3.0  # where more are asked for at once


REVISION_BITS = 36  # of a version: what is below counts milliseconds since the revision was written, for two years


@dataclass(kw_only=True)
class _Cached:
    fold: TotalsFold
    bound: str = ""
    at: float = float("-inf")  # monotonic


@dataclass(kw_only=True)
class _Outstanding:
    counts: dict[str, int] = field(default_factory=dict)  # job -> batches given out
    at: float = float("-inf")


@dataclass(kw_only=True)
class _Seen:
    """All that a snapshot is made of, but for the job's spec."""

    control: JobControl
    sums: Sums
    rates: Rates = field(default_factory=Rates)
    outstanding: int = 0
    bound: str = ""
    freed: int = 0


class StatusReader:
    """Belongs to the event loop. Methods raise RedisError (for jobs that have not ended) and StoreError."""

    def __init__(self, catalog: Catalog, client: redis.asyncio.Redis, reconciler: Reconciler) -> None:
        self._catalog = catalog
        self._redis = client
        self._reconciler = reconciler
        self._lock = asyncio.Lock()
        self._jobs: dict[str, _Cached] = {}
        self._profiles: dict[str, _Outstanding] = {}
        self._told: dict[str, tuple[_Seen, models.Job]] = {}  # the last snapshot of jobs that have not ended

    async def status(self, spec: JobSpec, *, without_redis: bool = False) -> models.Job:
        """How one job stands. ``without_redis``: tell the sums last seen, for an answer that must not depend on Redis.

        Raises RequestError ``not_found`` for a job that was deleted.
        """
        return (await self.statuses([spec], without_redis=without_redis))[0]

    async def statuses(self, specs: list[JobSpec], *, without_redis: bool = False) -> list[models.Job]:
        """As :meth:`status` of many, with one look at the store and one round trip to Redis."""
        at = time.time()
        # The controls first: a job that ends after this look is told as it was, never half of each.
        controls = await anyio.to_thread.run_sync(lambda: [self._look(s) for s in specs])
        working = [s for s, c in zip(specs, controls, strict=True) if not ended(c)]
        held = self._jobs if without_redis else await self._refresh(working)
        return [self._tell(s, c, at, held.get(s.job_id), without_redis) for s, c in zip(specs, controls, strict=True)]

    async def tell(self, specs: list[JobSpec], *, without_redis: bool = False) -> list[models.Job]:
        """As :meth:`statuses`, for those who must go on: with Redis away the sums last seen, and without jobs that cannot be told."""
        try:
            return await self.statuses(specs, without_redis=without_redis)
        except redis.RedisError:
            return await self.tell(specs, without_redis=True)
        except StatetapError as e:
            if len(specs) == 1:
                log.warning("%s: %s", specs[0].job_id, e)
                return []
        return [job for spec in specs for job in await self.tell([spec], without_redis=without_redis)]

    async def reserved_bytes(self) -> int:
        """Bytes that jobs which have not ended still need. Their committed bytes are those last seen, so it is never too low."""
        working = await anyio.to_thread.run_sync(self.working)
        held = await self._refresh(working)
        return sum(_still_needed(spec, held[spec.job_id].fold.sums) for spec in working)

    def working(self) -> list[JobSpec]:
        """Jobs that have not ended, newest first. Blocks."""
        return [s for s in self._catalog.jobs() if not ended(self._catalog.control(s.job_id))]

    async def _refresh(self, specs: list[JobSpec]) -> dict[str, _Cached]:
        """The totals of these jobs, and what is out of their profiles, read unless that was done within CACHE_S."""
        # Held here too: a job that ends meanwhile is dropped from the cache.
        held = {s.job_id: self._jobs[s.job_id] for s in specs if s.job_id in self._jobs}
        if new := [s.job_id for s in specs if s.job_id not in held]:
            plans = await anyio.to_thread.run_sync(lambda: [self._catalog.plan(i) for i in new])
            for job_id, plan in zip(new, plans, strict=True):
                held[job_id] = self._jobs.setdefault(job_id, _Cached(fold=TotalsFold(plan)))
        for at in range(0, len(specs), CHUNK):  # between two of them others get their turn
            await self._read(specs[at : at + CHUNK], held, idle_s=IDLE_S if len(specs) > CHUNK else CACHE_S)
        return held

    async def _read(self, specs: list[JobSpec], held: dict[str, _Cached], idle_s: float) -> None:
        """``idle_s``: the age up to which totals of jobs are good of which nothing was out at the last look."""
        async with self._lock:  # who waits here finds it done
            now = time.monotonic()
            profiles = [p for p in sorted({s.profile_id for s in specs}) if p not in self._profiles or now - self._profiles[p].at > CACHE_S]
            jobs = [s.job_id for s in specs if now - held[s.job_id].at > (CACHE_S if self._out(s) else idle_s)]
            if not jobs and not profiles:
                return
            async with self._redis.pipeline(transaction=False) as pipe:
                for profile_id in profiles:
                    pipe.hkeys(keys.outstanding(profile_id))
                for job_id in jobs:
                    pipe.exists(keys.known(job_id))
                    pipe.hgetall(keys.totals(job_id))
                    pipe.hvals(keys.bound(job_id))
                replies = iter(await pipe.execute())
            now = time.monotonic()
            for profile_id in profiles:
                counts = Counter(str(name).rpartition(":")[0] for name in next(replies))
                self._profiles[profile_id] = _Outstanding(counts=counts, at=now)
            for job_id in jobs:
                known, raw, waits = next(replies), next(replies), next(replies)
                held[job_id].bound = bound_of(waits, time.time())
                # Not known: Redis was wiped and the totals are being folded again. What was seen before still holds.
                if known:
                    held[job_id].fold.update(raw)
                held[job_id].at = now

    def _out(self, spec: JobSpec) -> int:
        """Batches given out, as of the last look."""
        held = self._profiles.get(spec.profile_id)
        return held.counts.get(spec.job_id, 0) if held else 0

    def _tell(self, spec: JobSpec, control: JobControl, at: float, held: _Cached | None, without_redis: bool) -> models.Job:
        job_id = spec.job_id
        if ended(control):
            self._jobs.pop(job_id, None)
            seen = _Seen(control=control, sums=Sums.from_final(control.final))
        else:
            sums = held.fold.sums if held else Sums()
            if not sums.rows and control.final:  # rows of an ended job were opened again, and its ledger is being folded
                sums = Sums.from_final(control.final)
            seen = _Seen(control=control, sums=sums)
            if not without_redis:
                seen.rates = self._reconciler.rates(job_id)
                seen.outstanding = self._out(spec)
                seen.bound = held.bound if held else ""
        seen.freed = self._catalog.freed_bytes(job_id)
        told = self._told.get(job_id)
        if told is not None and told[0] == seen:  # most of many jobs stand still: to describe one costs more than to compare it
            return told[1]
        job = self._describe(spec, seen)
        job.version = self._version(seen.control, at, told[1].version if told else 0)
        if ended(control):
            self._told.pop(job_id, None)
        else:
            self._told[job_id] = seen, job
        return job

    def _version(self, control: JobControl, at: float, last: int) -> int:
        """Of a snapshot that differs from the last one: above is control.json's revision, below the milliseconds since that was written.

        So it grows with every change, and across restarts and coordinators too, with nothing more to keep: a job that ended has the
        same version wherever it is told.
        """
        since = 0 if ended(control) else max(round((at - control.updated_at) * 1000), 1)
        return max((control.revision << REVISION_BITS) + since, last + 1)

    def _look(self, spec: JobSpec) -> JobControl:
        """Blocks."""
        if spec.retain == Retain.UNTIL_READ:
            self._catalog.acks(spec.job_id)
        return self._catalog.control(spec.job_id)

    def _describe(self, spec: JobSpec, seen: _Seen) -> models.Job:
        control, sums = seen.control, seen.sums
        running = control.state == JobState.RUNNING
        return models.Job(
            job_id=spec.job_id,
            name=spec.name,
            dataset_id=spec.dataset_id,
            profile_id=spec.profile_id,
            boundaries=list(spec.sample_format.kept.boundaries),
            encoding=Encoding(spec.encoding),
            positions=spec.positions,
            priority=spec.priority,
            max_failed=spec.max_failed,
            state=JobState(control.state),
            reason=control.reason,
            message=control.message,
            control=control.control,  # type: ignore[arg-type]  # validated by the model
            rows=models.Rows(
                total=spec.rows, done=sums.done, reused=sums.reused, failed=sums.failed, skipped=sums.skipped, open=spec.rows - sums.rows
            ),
            tokens=models.Tokens(total=spec.tokens, done=sums.tokens),
            bytes=models.Bytes(expected=spec.bytes, committed=sums.bytes, freed=seen.freed),
            errors=sums.errors,
            rates=models.Rates(**vars(seen.rates)),
            eta_s=seen.rates.eta_s(sums.tokens_left) if running else None,
            bound=verdict(control.state, control.reason, seen.bound),  # type: ignore[arg-type]  # validated by the model
            batches=models.Batches(total=spec.batches, finished=sums.finished, outstanding=seen.outstanding),
            created_at=spec.created_at,
            started_at=control.started_at or None,
            ended_at=control.ended_at or None,
            path=str(self._catalog.job_path(spec.job_id)),
            samples=spec.samples or None,
            engines=[models.CapturedBy(**e) for e in control.final.get("engines", ())],
            version=0,
        )


def _still_needed(spec: JobSpec, sums: Sums) -> int:
    """Bytes that a job will still take of the store, at most."""
    if spec.samples:
        return 0  # but for its records
    if spec.retain == Retain.UNTIL_READ:
        return max(min(spec.bytes, spec.retain_bytes) - sums.bytes, 0)
    if spec.sample_format.exact:
        return max(spec.bytes - sums.bytes, 0)
    # What is done took less than its bound: only what is open counts.
    return spec.sample_format.most(max(spec.tokens - sums.tokens, 0), max(spec.rows - sums.rows, 0))
