"""/v1/jobs"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated

import anyio.from_thread
import anyio.to_thread
import redis
from fastapi import APIRouter, Query, Response

from ..contracts import keys
from ..contracts.errors import ErrorCode, RequestError
from ..contracts.records import Control, JobControl, JobSpec, JobState, PauseReason
from . import engines, models
from .catalog import ended
from .context import Context, Ctx
from .errors_page import error_page
from .problems import responses
from .submit import ready_report, submit

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.post("", status_code=202, summary="Submit a job", responses=responses(404, 409, 422, 507))
async def create_job(body: models.JobRequest, response: Response, ctx: Ctx) -> models.Job:
    """The job is planned and on the store when this answers."""
    report = await anyio.to_thread.run_sync(ready_report, ctx.catalog, body.dataset_id)
    tokenizer = ctx.catalog.dataset(body.dataset_id).tokenizer
    live = await ctx.engines()
    known = await anyio.to_thread.run_sync(ctx.catalog.profile, body.profile_id) if body.profile_id else None
    profile = engines.choose(live, body.profile_id, known, tokenizer, wait=body.wait_for_engine)

    def reserved() -> int:
        return anyio.from_thread.run(ctx.status.reserved_bytes)

    spec = await anyio.to_thread.run_sync(submit, ctx.catalog, body, report, profile, reserved, ctx.settings.min_free_bytes)
    ctx.reconciler.wake()
    response.headers["Location"] = f"/v1/jobs/{spec.job_id}"
    return await ctx.status.status(spec)


@router.get("", summary="List jobs, newest first", responses=responses(422))
async def list_jobs(
    ctx: Ctx,
    state: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> models.JobList:
    def page() -> tuple[list[JobSpec], str | None]:
        specs = list(ctx.catalog.jobs())
        start = next((i + 1 for i, s in enumerate(specs) if s.job_id == cursor), None) if cursor is not None else 0
        if start is None:
            raise RequestError(ErrorCode.INVALID_REQUEST, "cursor: names no job", field="cursor")
        found: list[JobSpec] = []
        for spec in specs[start:]:
            if state is None or ctx.catalog.control(spec.job_id).state == state:
                if len(found) == limit:
                    return found, found[-1].job_id
                found.append(spec)
        return found, None

    specs, last = await anyio.to_thread.run_sync(page)
    return models.JobList(items=[await ctx.status.status(s) for s in specs], next_cursor=last)


@router.get("/{job_id}", summary="How a job stands", responses=responses(404, 422))
async def get_job(job_id: str, ctx: Ctx) -> models.Job:
    return await ctx.status.status(await _job(ctx, job_id))


@router.get("/{job_id}/errors", summary="Failed and skipped rows, in order", responses=responses(404, 422))
async def list_errors(
    job_id: str,
    ctx: Ctx,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    code: Annotated[str | None, Query(max_length=64, description="Only rows with this error code.")] = None,
) -> models.RowErrorList:
    spec = await _job(ctx, job_id)
    # The opaque cursor is the last row looked at.
    if cursor is not None and not (cursor.isascii() and cursor.isdigit() and int(cursor[:19]) < spec.rows and len(cursor) < 20):
        raise RequestError(ErrorCode.INVALID_REQUEST, "cursor: not one of this job", field="cursor")
    after = -1 if cursor is None else int(cursor)
    return await anyio.to_thread.run_sync(lambda: error_page(ctx.catalog, spec, after=after, limit=limit, code=code))


@router.post("/{job_id}/cancel", status_code=202, summary="Cancel a job", responses=responses(404, 409, 422))
async def cancel_job(job_id: str, ctx: Ctx) -> models.Job:
    """No new prefill within 2 s; what is in flight is committed. Rows that are done stay on the store."""

    def change(control: JobControl) -> JobControl:
        if control.state == JobState.CANCELLED:
            return control
        return _wish(control, Control.CANCEL)

    return await _change(ctx, job_id, change)


@router.post("/{job_id}/pause", status_code=202, summary="Pause a job", responses=responses(404, 409, 422))
async def pause_job(job_id: str, ctx: Ctx) -> models.Job:
    """No new prefill within 2 s; what is in flight is committed."""
    return await _change(ctx, job_id, lambda control: _wish(control, Control.PAUSE))


@router.post("/{job_id}/resume", status_code=202, summary="Resume a job", responses=responses(404, 409, 422))
async def resume_job(job_id: str, ctx: Ctx) -> models.Job:
    """Ends a person's pause; a pause of another reason is tried anew at once."""
    return await _change(ctx, job_id, lambda control: _wish(control, Control.RUN))


def _wish(control: JobControl, wish: Control) -> JobControl:
    """control.json with what a person wants. Raises RequestError ``conflict`` for a job that ended or is being cancelled."""
    if ended(control):
        raise RequestError(ErrorCode.CONFLICT, f"the job is {control.state}")
    if control.control == Control.CANCEL and wish is not Control.CANCEL:
        raise RequestError(ErrorCode.CONFLICT, "the job is being cancelled")
    new: dict[str, str] = {"control": wish.value}
    if wish is Control.PAUSE:
        new |= {"state": JobState.PAUSED.value, "reason": PauseReason.USER.value, "message": "paused on request; resume it to go on"}
    elif wish is Control.CANCEL:
        new |= {"message": "being cancelled: what is in flight is finished"}
    elif control.state == JobState.PAUSED:
        # The reconciler, woken, finds the reason anew if there still is one.
        new |= {"state": (JobState.RUNNING if control.started_at else JobState.QUEUED).value, "reason": "", "message": ""}
    return JobControl.from_dict(control.to_dict() | new)


async def _change(ctx: Context, job_id: str, change: Callable[[JobControl], JobControl]) -> models.Job:
    """control.json first, which is durable; then Redis, where its absence is made up for by the reconciler."""
    spec = await _job(ctx, job_id)
    control = await anyio.to_thread.run_sync(ctx.catalog.change_control, job_id, change)
    if not ended(control):
        try:
            async with ctx.redis.pipeline(transaction=True) as pipe:
                pipe.set(keys.control(job_id), control.control)
                if control.control == Control.RUN:
                    pipe.delete(keys.pause(job_id))
                await pipe.execute()
        except redis.RedisError as e:
            log.warning("%s: %s is on the store; Redis is away (%s)", job_id, control.control, type(e).__name__)
            return await ctx.status.status(spec, without_redis=True)
        ctx.reconciler.wake()
    return await ctx.status.status(spec)


async def _job(ctx: Context, job_id: str) -> JobSpec:
    return await anyio.to_thread.run_sync(ctx.catalog.job, job_id)
