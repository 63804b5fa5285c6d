"""/v1/jobs/{id}/acks"""

from __future__ import annotations

import anyio.to_thread
from fastapi import APIRouter

from . import space
from .acking import acknowledge
from .context import Ctx
from .problems import responses

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.post(
    "/{job_id}/acks", operation_id="acknowledge_rows", summary="Acknowledge rows that were read", responses=responses(404, 409, 422, 507)
)
async def acknowledge_rows(job_id: str, body: space.AckRequest, ctx: Ctx) -> space.Acked:
    """For jobs with `retain: until_read`: the files of these rows are freed, and a job that is paused as `store_full` goes on."""
    spec = await anyio.to_thread.run_sync(ctx.catalog.job, job_id)
    rows, size = await anyio.to_thread.run_sync(acknowledge, ctx.catalog, spec, body.rows)
    ctx.reconciler.wake()
    return space.Acked(rows=rows, bytes_freed=size)
