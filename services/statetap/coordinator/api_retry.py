"""/v1/jobs/{id}/retry"""

from __future__ import annotations

import logging
from typing import Annotated

import anyio.to_thread
import redis
from fastapi import APIRouter
from pydantic import Field

from ..contracts import keys
from . import models
from .catalog import ended
from .context import Ctx
from .problems import responses
from .retrying import retry_rows

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


class RetryRequest(models.Strict):
    codes: list[Annotated[str, Field(max_length=64)]] | None = Field(
        default=None,
        max_length=64,
        description="Only rows with one of these error codes; null: all rows that failed. Skipped rows are opened only where their code is named.",
        examples=[["engine_timeout", "zero_states"]],
    )
    rows: list[tuple[int, int]] | None = Field(
        default=None,
        max_length=10_000,
        description="In place of codes: half-open ranges of rows to capture anew, done ones too (`statetap verify --repair` names those whose files are damaged). "
        "An empty list: no row, but manifest and COMPLETE are written anew.",
        examples=[[[17, 18]]],
    )


@router.post(
    "/{job_id}/retry",
    operation_id="retry_job",
    status_code=202,
    summary="Open failed rows again",
    responses=responses(404, 409, 422),
)
async def retry_job(job_id: str, ctx: Ctx, body: RetryRequest | None = None) -> models.Job:
    """An ended job goes back to work, one paused as `circuit_open` is resumed; rows that are done are not touched, but those that `rows`
    names. A row that is captured anew has a file of a higher generation; a damaged one goes when its batch is opened."""
    spec = await anyio.to_thread.run_sync(ctx.catalog.job, job_id)
    codes = list(dict.fromkeys(body.codes or [])) if body else []
    reopened = await anyio.to_thread.run_sync(retry_rows, ctx.catalog, spec, codes, body.rows if body else None)
    log.info("%s: %d rows are open again%s", job_id, reopened.rows, f" ({', '.join(codes)})" if codes else "")
    if not ended(reopened.control):
        try:
            async with ctx.redis.pipeline(transaction=True) as pipe:
                # Not known any more: the totals are folded again from the ledger, without the rows that are open now.
                pipe.delete(keys.known(job_id), keys.totals(job_id), keys.pause(job_id), keys.streak(job_id))
                pipe.set(keys.control(job_id), reopened.control.control)
                await pipe.execute()
        except redis.RedisError as e:
            # Totals of before say "finished"; the end of the job finds the rows open and runs their batches again.
            log.warning("%s: Redis is away (%s); the retry is on the store", job_id, type(e).__name__)
            return await ctx.status.status(spec, without_redis=True)
        ctx.reconciler.wake()
    return await ctx.status.status(spec)
