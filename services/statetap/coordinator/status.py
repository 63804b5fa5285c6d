"""The status of jobs: sums over batch totals, rates, ETA.

Invariant: done + failed + skipped + open = total, and never more than what a ledger's fsync stands behind. An ended job is told from
the store alone, without Redis. However many watch, a job's totals are read at most twice a second.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import anyio.to_thread
import redis.asyncio

from ..contracts import keys
from ..contracts.records import JobControl, JobSpec, JobState
from . import models
from .catalog import Catalog, ended
from .reconciler import Reconciler
from .totals import Rates, Sums, TotalsFold

CACHE_S = 0.5


@dataclass(kw_only=True)
class _Cached:
    fold: TotalsFold
    at: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(kw_only=True)
class _Outstanding:
    at: float = float("-inf")
    counts: dict[str, int] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class StatusReader:
    """Belongs to the event loop. Methods raise RedisError (for jobs that have not ended) and StoreError."""

    def __init__(self, catalog: Catalog, client: redis.asyncio.Redis, reconciler: Reconciler) -> None:
        self._catalog = catalog
        self._redis = client
        self._reconciler = reconciler
        self._jobs: dict[str, _Cached] = {}
        self._profiles: dict[str, _Outstanding] = {}

    async def status(self, spec: JobSpec, *, without_redis: bool = False) -> models.Job:
        """``without_redis``: tell the sums last seen, for an answer that must not depend on Redis."""
        # The control first: a job that ends after this look is told as it was, never half of each.
        control = await anyio.to_thread.run_sync(self._catalog.control, spec.job_id)
        if ended(control):
            self._jobs.pop(spec.job_id, None)
            return self._describe(spec, control, Sums.from_final(control.final), Rates(), 0)
        if without_redis:
            held = self._jobs.get(spec.job_id)
            return self._describe(spec, control, held.fold.sums if held else Sums(), Rates(), 0)
        sums = await self._sums(spec)
        outstanding = await self._outstanding(spec.capture_profile.profile_id)
        return self._describe(spec, control, sums, self._reconciler.rates(spec.job_id), outstanding.get(spec.job_id, 0))

    async def reserved_bytes(self) -> int:
        """Bytes that jobs which have not ended still need. Their committed bytes are those last seen, so it is never too low."""
        active = await anyio.to_thread.run_sync(self._active)
        return sum([max(spec.bytes - (await self._sums(spec)).bytes, 0) for spec in active])

    def _active(self) -> list[JobSpec]:
        return [s for s in self._catalog.jobs() if not ended(self._catalog.control(s.job_id))]

    async def _sums(self, spec: JobSpec) -> Sums:
        held = self._jobs.get(spec.job_id)
        if held is None:
            plan = await anyio.to_thread.run_sync(self._catalog.plan, spec.job_id)
            held = self._jobs.setdefault(spec.job_id, _Cached(fold=TotalsFold(plan)))
        async with held.lock:
            if time.monotonic() - held.at > CACHE_S:
                async with self._redis.pipeline(transaction=False) as pipe:
                    pipe.exists(keys.known(spec.job_id))
                    pipe.hgetall(keys.totals(spec.job_id))
                    known, raw = await pipe.execute()
                # Not known: Redis was wiped and the totals are being folded again. What was seen before still holds.
                if known:
                    held.fold.update(raw)
                held.at = time.monotonic()
        return held.fold.sums

    async def _outstanding(self, profile_id: str) -> dict[str, int]:
        """Job -> batches given out, of one profile."""
        held = self._profiles.setdefault(profile_id, _Outstanding())
        async with held.lock:
            if time.monotonic() - held.at > CACHE_S:
                counts: dict[str, int] = {}
                for name in map(str, await self._redis.hkeys(keys.outstanding(profile_id))):
                    job_id = name.rpartition(":")[0]
                    counts[job_id] = counts.get(job_id, 0) + 1
                held.counts, held.at = counts, time.monotonic()
        return held.counts

    def _describe(self, spec: JobSpec, control: JobControl, sums: Sums, rates: Rates, outstanding: int) -> models.Job:
        running = control.state == JobState.RUNNING
        return models.Job(
            job_id=spec.job_id,
            name=spec.name,
            dataset_id=spec.dataset_id,
            profile_id=spec.capture_profile.profile_id,
            priority=spec.priority,
            max_failed=spec.max_failed,
            state=JobState(control.state),
            reason=control.reason,
            message=control.message,
            control=control.control,  # type: ignore[arg-type]  # validated by the model
            rows=models.Rows(total=spec.rows, done=sums.done, failed=sums.failed, skipped=sums.skipped, open=spec.rows - sums.rows),
            tokens=models.Tokens(total=spec.tokens, done=sums.tokens),
            bytes=models.Bytes(expected=spec.bytes, committed=sums.bytes),
            errors=sums.errors,
            rates=models.Rates(**vars(rates)),
            eta_s=rates.eta_s(sums.tokens_left) if running else None,
            batches=models.Batches(total=spec.batches, finished=sums.finished, outstanding=outstanding),
            created_at=spec.created_at,
            started_at=control.started_at or None,
            ended_at=control.ended_at or None,
            path=str(self._catalog.job_path(spec.job_id)),
        )
