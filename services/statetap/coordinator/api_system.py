"""Engines, health and the root."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import redis
from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from .. import __version__
from ..contracts.errors import ErrorCode, StatetapError, StoreError
from . import docs_page, models, page_files
from .context import Ctx
from .problems import responses

router = APIRouter()

READY_TIMEOUT_S = 3.0
_PAGE: dict[int | str, Any] = {200: {"content": {"text/html": {"schema": {"type": "string"}, "example": "<!doctype html>…"}}}}
_METRICS_EXAMPLE = "# HELP statetap_redis_up 1 when Redis answers.\n# TYPE statetap_redis_up gauge\nstatetap_redis_up 1.0\n"


@router.get("/v1/engines", tags=["engines"], summary="Live engines and their capture profiles", responses=responses())
async def list_engines(ctx: Ctx) -> models.EngineList:
    """What workers have registered in the last seconds, merged by engine. A job needs one of its capture profile."""
    return models.EngineList(items=[models.Engine(**e.to_dict()) for e in await ctx.engines()])


@router.get("/healthz", tags=["service"], summary="The process is alive", responses=responses())
async def healthz() -> models.Health:
    """For a liveness probe: it looks at nothing else."""
    return models.Health(status="ok")


@router.get("/readyz", tags=["service"], summary="Redis answers and the store can be written", responses=responses())
async def readyz(ctx: Ctx) -> models.Health:
    """Engines are no part of it: jobs can be accepted without one."""
    try:
        with anyio.fail_after(READY_TIMEOUT_S):
            await ctx.redis.ping()
    except (redis.RedisError, TimeoutError) as e:
        raise StatetapError(ErrorCode.REDIS_UNAVAILABLE, f"Redis does not answer ({type(e).__name__})") from e
    try:
        with anyio.fail_after(READY_TIMEOUT_S):
            await anyio.to_thread.run_sync(_write, ctx.settings.store, abandon_on_cancel=True)
    except (OSError, TimeoutError) as e:
        raise StoreError(ErrorCode.STORE_UNAVAILABLE, f"the store {ctx.settings.store} cannot be written: {e or 'no answer'}") from e
    return models.Health(status="ok")


@router.get(
    "/metrics",
    tags=["service"],
    summary="Metrics as Prometheus text",
    response_class=PlainTextResponse,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}, "example": _METRICS_EXAMPLE}}}, **responses()},
)
async def metrics(request: Request, ctx: Ctx) -> Response:
    """Works while Redis is away: `statetap_redis_up` is 0 then."""
    text = await request.app.state.metrics.scrape(ctx)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    return HTMLResponse(docs_page.page(request.app.openapi()))


@router.get("/", tags=["service"], summary="Links and version, or the page", response_model=models.Root, responses={**_PAGE, **responses()})
async def root(request: Request, response: Response) -> models.Root | Response:
    """Where to go from here. A browser gets the page. Needs no key: it says nothing of what is on the store."""
    if page_files.wanted(request):
        return page_files.index(request)
    response.headers["Vary"] = "Accept"
    links = {
        "datasets": "/v1/datasets",
        "jobs": "/v1/jobs",
        "uploads": "/v1/uploads",
        "engines": "/v1/engines",
        "store": "/v1/store",
        "events": "/v1/events",
        "metrics": "/metrics",
        "health": "/healthz",
        "ready": "/readyz",
        "openapi": "/openapi.json",
        "docs": "/docs",
    }
    return models.Root(service="statetap", version=__version__, links=links)


def _write(store: Path) -> None:
    path = store / f".ready-{secrets.token_hex(8)}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, b"1")
    finally:
        os.close(fd)
        os.unlink(path)
