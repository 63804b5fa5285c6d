"""/v1/jobs"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated

import anyio.to_thread
import redis
from fastapi import APIRouter, Query, Response

from ..contracts import keys
from ..contracts.errors import ErrorCode, RequestError
from ..contracts.layout import JOB
from ..contracts.records import Control, JobControl, JobSpec, JobState, PauseReason
from . import engines, models
from .auth import Asking
from .catalog import ended
from .context import Context, Ctx
from .errors_page import error_page
from .idempotency import REPLAYED, Claim, Key, claimed, fingerprint
from .keyfile import Scope
from .paging import page
from .problems import responses
from .rows_page import State as RowStateName
from .rows_page import cursor_row, row_page
from .submit import new_job_id, ready_report, submit

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.post("", status_code=202, summary="Submit a job", responses=responses(404, 409, 422, 507))
async def create_job(body: models.JobRequest, response: Response, ctx: Ctx, caller: Asking, idempotency_key: Key = None) -> models.Job:
    """The job is planned and on the store when this answers. A repeat under the same Idempotency-Key answers with that job as it is now."""
    if body.force:
        caller.require(Scope.ADMIN, "force")
    wanted = fingerprint(body.model_dump(mode="json", exclude_defaults=True))

    def made(job_id: str) -> bool:
        return (ctx.catalog.job_path(job_id) / JOB).exists()

    async with claimed(ctx.idempotency, idempotency_key, f"POST /v1/jobs {caller.name}", wanted, made) as claim:
        if claim.made:
            spec = await _job(ctx, claim.resource_id)
            response.headers[REPLAYED] = "true"
        else:
            spec = await _create(ctx, body, claim)
        await anyio.to_thread.run_sync(claim.finish, 202)
    response.headers["Location"] = f"/v1/jobs/{spec.job_id}"
    try:
        return await ctx.status.status(spec)
    except redis.RedisError:  # the job is there: that is what was asked
        return await ctx.status.status(spec, without_redis=True)


async def _create(ctx: Context, body: models.JobRequest, claim: Claim) -> JobSpec:
    report = await anyio.to_thread.run_sync(ready_report, ctx.catalog, body.dataset_id)
    tokenizer = ctx.catalog.dataset(body.dataset_id).tokenizer
    live = await ctx.engines()
    known = await anyio.to_thread.run_sync(ctx.catalog.profile, body.profile_id) if body.profile_id else None
    profile = engines.choose(live, body.profile_id, known, tokenizer, wait=body.wait_for_engine, boundaries=body.boundaries)

    def create() -> JobSpec:
        # A new id though an earlier request may have named one: of that job there can be a plan, for another profile.
        job_id = new_job_id()
        claim.name(job_id)
        return submit(ctx.catalog, body, report, profile, reserved, ctx.settings.min_free_bytes, job_id, ctx.settings.samples)

    async with ctx.submitting:
        # Before the thread, not from within it: threads that wait for others could use up all there are.
        reserved = 0 if body.force else await ctx.status.reserved_bytes()
        spec = await anyio.to_thread.run_sync(create)
    ctx.reconciler.wake()
    return spec


@router.get("", summary="List jobs, newest first", responses=responses(422))
async def list_jobs(
    ctx: Ctx,
    state: Annotated[list[JobState] | None, Query(description="Only jobs in one of these states; may be given several times.")] = None,
    reason: Annotated[str | None, Query(max_length=64, description="Only jobs that are paused or failed for this reason.")] = None,
    dataset_id: Annotated[str | None, Query(max_length=64, description="Only jobs of this dataset.")] = None,
    profile_id: Annotated[str | None, Query(max_length=64, description="Only jobs of this capture profile.")] = None,
    name: Annotated[str | None, Query(max_length=200, description="Only jobs whose name contains this, in capitals or not.")] = None,
    created_after: Annotated[float | None, Query(description="Only jobs made after this Unix time.")] = None,
    created_before: Annotated[float | None, Query(description="Only jobs made before this Unix time.")] = None,
    cursor: Annotated[str | None, Query(max_length=200, description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> models.JobList:
    """A cursor stays valid while jobs are made and deleted, and with other filters."""

    def wanted(spec: JobSpec) -> bool:
        if dataset_id not in (None, spec.dataset_id) or profile_id not in (None, spec.profile_id):
            return False
        if name is not None and name.casefold() not in spec.name.casefold():
            return False
        if not (created_after is None or spec.created_at > created_after) or not (
            created_before is None or spec.created_at < created_before
        ):
            return False
        if state is None and reason is None:
            return True
        try:
            control = ctx.catalog.control(spec.job_id)
        except RequestError:  # it was deleted a moment ago
            return False
        return (state is None or control.state in state) and reason in (None, control.reason)

    specs, last = await anyio.to_thread.run_sync(lambda: page(ctx.catalog.jobs(), lambda s: s.job_id, wanted, cursor, limit))
    try:
        items = await ctx.status.statuses(specs)
    except RequestError:  # as above
        items = await ctx.status.tell(specs)
    return models.JobList(items=items, next_cursor=last)


@router.get("/{job_id}", summary="How a job stands", responses=responses(404, 422))
async def get_job(job_id: str, ctx: Ctx) -> models.Job:
    """Counts are of what is durable; an ended job is told from the store alone. `/v1/jobs/{job_id}/events` tells each change."""
    return await ctx.status.status(await _job(ctx, job_id))


@router.get("/{job_id}/errors", summary="Failed and skipped rows, in order", responses=responses(404, 422))
async def list_errors(
    job_id: str,
    ctx: Ctx,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    code: Annotated[str | None, Query(max_length=64, description="Only rows with this error code.")] = None,
) -> models.RowErrorList:
    """With where each row stands in the source, and what to do about it."""
    spec = await _job(ctx, job_id)
    after = cursor_row(cursor, spec)
    return await anyio.to_thread.run_sync(lambda: error_page(ctx.catalog, spec, after=after, limit=limit, code=code))


@router.get("/{job_id}/rows", summary="Rows and what became of them, in order", responses=responses(404, 422))
async def list_rows(
    job_id: str,
    ctx: Ctx,
    state: Annotated[RowStateName | None, Query(description="Only rows in this state.")] = None,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> models.RowList:
    """From the ledger, so it is what is durable; a page that is not full is not the last unless `next_cursor` is null."""
    spec = await _job(ctx, job_id)
    after = cursor_row(cursor, spec)
    return await anyio.to_thread.run_sync(lambda: row_page(ctx.catalog, spec, after=after, limit=limit, state=state))


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
                    pipe.delete(keys.pause(job_id), keys.streak(job_id))
                await pipe.execute()
        except redis.RedisError as e:
            log.warning("%s: %s is on the store; Redis is away (%s)", job_id, control.control, type(e).__name__)
            return await ctx.status.status(spec, without_redis=True)
        ctx.reconciler.wake()
    return await ctx.status.status(spec)


async def _job(ctx: Context, job_id: str) -> JobSpec:
    return await anyio.to_thread.run_sync(ctx.catalog.job, job_id)
