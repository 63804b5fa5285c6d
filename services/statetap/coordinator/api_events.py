"""Server-sent events: jobs as they change. Each event is a whole snapshot, so a client needs only the last one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Header
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event

from . import models
from .auth import StillAdmitted
from .context import Ctx
from .problems import responses

router = APIRouter(tags=["jobs"])

RETRY_MS = 2000
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

LastEventId = Annotated[
    str | None,
    Header(alias="Last-Event-ID", max_length=64, description="The id of the last event that was received; browsers send it by themselves."),
]

_EXAMPLE = (
    'retry: 2000\n\nevent: job\ndata: {"job_id": "job-9d2c61f0a7b3e845", "state": "running", "version": 206158430208}\nid: 206158430208\n\n'
)
_EVENT = {  # OpenAPI 3.2's way to describe a stream; readers of 3.1 pass it over
    "type": "object",
    "properties": {
        "event": {"const": "job"},
        "id": {"type": "string"},
        "data": {"type": "string", "contentMediaType": "application/json", "contentSchema": {"$ref": "#/components/schemas/Job"}},
    },
}
_STREAM: dict[int | str, Any] = {
    200: {
        "description": "Events `job`; the data of each is a Job as JSON. A comment every 10 s without one. A revoked key or a session that ends cuts it.",
        "content": {"text/event-stream": {"schema": {"type": "string"}, "example": _EXAMPLE, "itemSchema": _EVENT}},
    }
}


@router.get(
    "/v1/jobs/{job_id}/events",
    summary="Watch a job",
    response_class=StreamingResponse,
    responses={**_STREAM, **responses(404, 422)},
)
async def watch_job(job_id: str, ctx: Ctx, still_admitted: StillAdmitted, last_event_id: LastEventId = None) -> StreamingResponse:
    """The present snapshot at once, unless `Last-Event-ID` says that it is known, then each that differs. The id is the job's `version`.
    The stream ends after the terminal snapshot, which is sent in any case: close the EventSource on it."""
    spec = await anyio.to_thread.run_sync(ctx.catalog.job, job_id)

    async def events() -> AsyncIterator[bytes]:
        yield format_sse_event(retry=RETRY_MS)
        async with aclosing(ctx.events.job(spec, _number(last_event_id))) as snapshots:
            async for job in snapshots:
                if not await still_admitted():
                    return
                yield _event(job, job.version) if job is not None else format_sse_event(comment="still here")

    return StreamingResponse(events(), media_type="text/event-stream", headers=HEADERS)


@router.get("/v1/events", summary="Watch all jobs", response_class=StreamingResponse, responses={**_STREAM, **responses(422)})
async def watch_jobs(ctx: Ctx, still_admitted: StillAdmitted, last_event_id: LastEventId = None) -> StreamingResponse:
    """At first each job that has not ended, then each that changed, its end included. After a cut, with `Last-Event-ID`, each that changed
    since. The ids are of this stream: they grow, and are not versions."""

    async def events() -> AsyncIterator[bytes]:
        yield format_sse_event(retry=RETRY_MS)
        async with aclosing(ctx.events.all(_number(last_event_id))) as changes:
            async for change in changes:
                if not await still_admitted():
                    return
                yield _event(change[1], change[0]) if change is not None else format_sse_event(comment="still here")

    return StreamingResponse(events(), media_type="text/event-stream", headers=HEADERS)


def _event(job: models.Job, number: int) -> bytes:
    return format_sse_event(event="job", id=str(number), data_str=job.model_dump_json())


def _number(text: str | None) -> int | None:
    """One that is not ours is as none."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 20 else None
