"""Is the engine away, or was it only this request? Asked by every row whose request got no answer; one probe answers them all.

Invariant: no row is charged for an engine that is away.
"""

from __future__ import annotations

import asyncio
import enum
import logging

from .engine import EngineClient

log = logging.getLogger(__name__)

PROBE_EVERY_S = 0.5


class Verdict(enum.Enum):
    UP = "up"  # it answered at once: the fault is the request's
    BACK = "back"  # it was away and answers again
    GONE = "gone"  # it did not answer for engine_down_after_s


class Outage:
    def __init__(self, engine: EngineClient, down_after_s: float) -> None:
        self._engine = engine
        self._down_after_s = down_after_s
        self._probe: asyncio.Task[Verdict] | None = None

    async def verdict(self) -> Verdict:
        """Probes the engine's health until it answers or counts as gone."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._run())
        return await asyncio.shield(self._probe)

    async def _run(self) -> Verdict:
        loop = asyncio.get_running_loop()
        started = loop.time()
        if await self._engine.healthy():
            return Verdict.UP
        log.warning("event=engine_away")
        while loop.time() - started < self._down_after_s:
            await asyncio.sleep(PROBE_EVERY_S)
            if await self._engine.healthy():
                log.info("event=engine_back after_s=%.1f", loop.time() - started)
                return Verdict.BACK
        return Verdict.GONE

    async def close(self) -> None:
        if self._probe is not None and not self._probe.done():
            self._probe.cancel()
            await asyncio.wait([self._probe])
