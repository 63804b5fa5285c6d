"""What the API's operations share, made once at start."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

import redis.asyncio
from fastapi import Depends, Request

from ..contracts import keys
from ..contracts.records import EngineInfo
from . import engines
from .catalog import Catalog
from .events import Events
from .idempotency import Idempotency
from .reconciler import Reconciler
from .resumable import Resumable
from .settings import CoordinatorSettings
from .status import StatusReader


@dataclass(frozen=True, kw_only=True)
class Context:
    settings: CoordinatorSettings
    catalog: Catalog
    redis: redis.asyncio.Redis
    reconciler: Reconciler
    status: StatusReader
    idempotency: Idempotency
    uploads: Resumable
    events: Events
    submitting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from the look at the store's room to the job that takes it, so that two submissions do not count on the same bytes."""

    async def engines(self) -> list[EngineInfo]:
        """Live engines, merged. Raises RedisError."""
        names = [name async for name in self.redis.scan_iter(match=keys.ENGINES_PATTERN, count=1000)]
        values = await self.redis.mget(names) if names else []
        return engines.parse(None if v is None else str(v) for v in values)


def _context(request: Request) -> Context:
    return request.app.state.context


Ctx = Annotated[Context, Depends(_context)]
