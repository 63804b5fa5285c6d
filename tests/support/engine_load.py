"""Load on a real engine: many requests at once, and a comparison of each file with that of the same prompt sent once alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file

from statetap.contracts.capture import LEASE_FILE, new_rid
from statetap.contracts.tensors import INPUT_IDS
from statetap.engine.metrics import REPORT_EVERY_S
from tests.support.engine import Engine

TOLERANCE = 1e-4  # a batch of other shapes sums in another order
FAR = 0.1  # states of another prompt differ by more

Ids = tuple[int, ...]


@dataclass(kw_only=True)
class Sent:
    """One request, and what became of it. ``status`` 0: its connection was closed before a reply."""

    rid: str
    ids: Ids
    status: int = 0
    reply: dict[str, Any] = field(default_factory=dict)

    @property
    def capture(self) -> dict[str, Any]:
        return self.reply.get("meta_info", {}).get("capture", {})

    @property
    def ok(self) -> bool:
        return self.capture.get("status") == "ok"


class Load:
    """Requests of one lease to one engine."""

    def __init__(self, engine: Engine, session: aiohttp.ClientSession) -> None:
        self.engine, self.session, self.lease = engine, session, engine.lease()
        self._row = 0

    def rid(self) -> str:
        self._row += 1
        return new_rid(self.lease, self._row)

    async def post(self, rid: str, ids: Ids, new: int = 0) -> Sent:
        """Send one prompt and wait for its reply."""
        return await self._post(Sent(rid=rid, ids=ids), new)

    async def _post(self, sent: Sent, new: int) -> Sent:
        body = {
            "rid": sent.rid,
            "input_ids": list(sent.ids),
            "sampling_params": {"max_new_tokens": new, "temperature": 0, "ignore_eos": True},
        }
        async with self.session.post(f"{self.engine.url}/generate", json=body) as response:
            sent.status, sent.reply = response.status, await response.json()
        return sent

    async def capture(self, ids: Ids, new: int = 0) -> Sent:
        return await self.post(self.rid(), ids, new)

    async def plain(self, ids: Ids, new: int = 4) -> Sent:
        """A request of somebody else, who does not ask for capture."""
        self._row += 1
        return await self.post(f"other-{self.lease}-{self._row}", ids, new)

    async def leave(self, ids: Ids, after: float, new: int = 0) -> Sent:
        """Send a prompt and close the connection after so many seconds (``status`` stays 0 where that was in time)."""
        sent = Sent(rid=self.rid(), ids=ids)
        try:
            return await asyncio.wait_for(self._post(sent, new), after)
        except TimeoutError:
            return sent

    async def abort(self, rid: str = "", everything: bool = False) -> None:
        async with self.session.post(f"{self.engine.url}/abort_request", json={"rid": rid, "abort_all": everything}) as response:
            assert response.status == 200

    async def healthy(self) -> None:
        async with self.session.get(f"{self.engine.url}/health_generate") as response:
            assert response.status == 200

    async def metrics(self) -> dict[str, float]:
        """What the engine counts, as ``name`` or ``name{label}``."""
        async with self.session.get(f"{self.engine.url}/statetap/metrics") as response:
            assert response.status == 200
            text = await response.text()
        return {
            f"{s.name}{{{','.join(s.labels.values())}}}" if s.labels else s.name: s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
        }

    def path(self, sent: Sent) -> Path:
        return self.engine.tap / self.lease / f"{sent.rid}.safetensors"

    def files(self) -> set[str]:
        return {p.name for p in (self.engine.tap / self.lease).iterdir()} - {LEASE_FILE}

    async def settled(self, wanted: set[str], tries: int = 150) -> None:
        """Wait until exactly these files are left (SGLang looks for closed connections every 4 s)."""
        for _ in range(tries):
            if self.files() == wanted:
                return
            await asyncio.sleep(0.1)
        assert self.files() == wanted

    async def idle(self, tries: int = 40) -> dict[str, float]:
        """Wait until the engine holds nothing of ours: no open file, an empty ring, no reply that waits. What it counted."""
        before = await self.metrics()
        for _ in range(tries):
            await asyncio.sleep(REPORT_EVERY_S + 0.1)  # the scheduler's numbers are as old as that
            now = await self.metrics()
            held = [now[f"statetap_engine_{name}"] for name in ("open_files", "ring_used_bytes", "replies_waiting")]
            if not any(held) and now == before:
                return now
            before = now
        raise AssertionError(now)


@asynccontextmanager
async def load(engine: Engine) -> AsyncIterator[Load]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=200)) as session:
        yield Load(engine, session)


class References:
    """States of prompts that were each sent once, alone."""

    def __init__(self) -> None:
        self._planes: dict[Ids, dict[str, torch.Tensor]] = {}

    async def take(self, to: Load, prompts: list[Ids]) -> None:
        for ids in prompts:
            if ids not in self._planes:
                sent = await to.capture(ids)
                assert sent.ok, sent
                self._planes[ids] = load_file(to.path(sent))
                to.path(sent).unlink()

    def check(self, path: Path, ids: Ids, tolerance: float = TOLERANCE) -> float:
        """The largest relative error of a file's planes; raises unless the file is this prompt's, whole, and no other's."""
        have, wanted = load_file(path), self._planes[ids]
        assert have.keys() == wanted.keys() and have[INPUT_IDS].tolist() == list(ids), path
        errors = [relative(have[name], wanted[name]) for name in wanted if name != INPUT_IDS]
        assert max(errors) < tolerance, (path, errors)
        for other, planes in self._planes.items():
            if len(other) == len(ids) and other != ids and other[0] != ids[0]:  # of equal shape, and nothing in common
                assert all(relative(have[name], planes[name]) > FAR for name in planes if name != INPUT_IDS), (path, other)
        return max(errors)

    def check_all(self, of: Load, sent: list[Sent], tolerance: float = TOLERANCE) -> float:
        return max(self.check(of.path(s), s.ids, tolerance) for s in sent)


def relative(have: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((have - wanted).norm() / wanted.norm())


def prompts(seed: int, lengths: list[int]) -> list[Ids]:
    rnd = random.Random(seed)
    return [tuple(rnd.randrange(5, 1000) for _ in range(n)) for n in lengths]
