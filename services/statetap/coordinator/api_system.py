"""Engines, health and the root."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import anyio
import anyio.to_thread
import redis
from fastapi import APIRouter

from .. import __version__
from ..contracts.errors import ErrorCode, StatetapError, StoreError
from . import models
from .context import Ctx
from .problems import responses

router = APIRouter()

READY_TIMEOUT_S = 3.0


@router.get("/v1/engines", tags=["engines"], summary="Live engines and their capture profiles", responses=responses())
async def list_engines(ctx: Ctx) -> models.EngineList:
    return models.EngineList(items=[models.Engine(**e.to_dict()) for e in await ctx.engines()])


@router.get("/healthz", tags=["service"], summary="The process is alive", responses=responses())
async def healthz() -> models.Health:
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


@router.get("/", tags=["service"], summary="Links and version", responses=responses())
async def root() -> models.Root:
    links = {
        "datasets": "/v1/datasets",
        "jobs": "/v1/jobs",
        "engines": "/v1/engines",
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
