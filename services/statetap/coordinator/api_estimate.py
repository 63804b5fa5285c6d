"""/v1/estimate, /v1/store"""

from __future__ import annotations

import anyio.to_thread
from fastapi import APIRouter

from ..contracts.layout import ROWS
from ..contracts.profile import CaptureProfile
from ..contracts.records import JobState
from ..contracts.sample_format import SampleFormat
from ..store.rows import RowsFile
from . import engines, space
from .context import Context, Ctx
from .problems import responses
from .sizing import Choice, Compressed, Room, Size, alternatives, compressed, measure, room
from .submit import ready_report

router = APIRouter(prefix="/v1")


@router.post("/estimate", tags=["jobs"], operation_id="estimate_job", summary="What a job would need", responses=responses(404, 409, 422))
async def estimate(body: space.EstimateRequest, ctx: Ctx) -> space.Estimate:
    """Nothing is made. Without a live engine of the profile, one that an earlier job had is taken."""
    await anyio.to_thread.run_sync(ready_report, ctx.catalog, body.dataset_id)
    known = await anyio.to_thread.run_sync(ctx.catalog.profile, body.profile_id) if body.profile_id else None
    tokenizer = ctx.catalog.dataset(body.dataset_id).tokenizer
    profile = engines.choose(await ctx.engines(), body.profile_id, known, tokenizer, wait=True, boundaries=body.boundaries)
    format = SampleFormat(profile, tuple(body.boundaries or ()), body.encoding.value, body.positions)
    reserved = await ctx.status.reserved_bytes()

    def look() -> tuple[Size, Room, int, list[space.Alternative], Compressed | None, float]:
        choice = Choice.of(profile, body.rows, body.max_length)
        rows = RowsFile(ctx.catalog.dataset_path(body.dataset_id) / ROWS)
        try:
            size = measure(rows, format, choice)
            seen = compressed(ctx.catalog, format)
            there = room(ctx.catalog, reserved, ctx.settings.min_free_bytes)
            # A bucket is not known to be full before it is.
            missing = 0 if ctx.settings.samples else max(size.bytes - there.available, 0)
            fit = alternatives(rows, format, choice, size, there.available, seen) if missing else []
        finally:
            rows.close()
        return size, there, missing, fit, seen, _speed(ctx, profile)

    size, there, missing, fit, seen, speed = await anyio.to_thread.run_sync(look)
    return space.Estimate(
        rows=size.rows,
        accepted=size.accepted,
        tokens=size.tokens,
        bytes=size.bytes,
        exact=format.exact,
        expected_bytes=round(size.bytes * seen.ratio) if seen and not format.exact else None,
        **vars(there),
        fits=not missing,
        missing=missing,
        alternatives=fit,
        tokens_per_s=speed or None,
        hours=size.tokens / speed / 3600 if speed else None,
    )


@router.get("/store", operation_id="get_store", tags=["service"], summary="Space on the store", responses=responses())
async def store(ctx: Ctx) -> space.Store:
    """What is free, and what of it is spoken for. Of a bucket nothing is known: jobs whose samples go there need next to nothing here."""
    reserved = await ctx.status.reserved_bytes()
    there = await anyio.to_thread.run_sync(room, ctx.catalog, reserved, ctx.settings.min_free_bytes)
    return space.Store(**vars(there), samples=ctx.settings.samples or None)


def _speed(ctx: Context, profile: CaptureProfile) -> float:
    """Tokens a second of all running jobs of a profile together."""
    running = (s for s in ctx.catalog.jobs() if ctx.catalog.control(s.job_id).state == JobState.RUNNING)
    return sum(ctx.reconciler.rates(s.job_id).tokens_per_s for s in running if s.capture_profile.profile_id == profile.profile_id)
