"""The asynchronous client, for asyncio: the methods of :class:`~statetap.client.sync.Client`, to be awaited or iterated with ``async for``.

Files are read in threads, so that nothing blocks the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx

from . import calls, flows
from .connection import arguments, async_pieces, policy_of, settings
from .flows import Flow, Step
from .options import DatasetOptions, JobFilter, JobOptions
from .records import Acked, Collected, Dataset, Deleted, Engine, Estimate, Health, Job, Row, RowError, Service, Store
from .sync import read_block

T = TypeVar("T")


class AsyncClient:
    """As :class:`~statetap.client.sync.Client`, which documents arguments and methods. Several tasks may use one."""

    def __init__(self, url: str | None = None, *, api_key: str | None = None, patience_s: float = 30.0) -> None:
        self._policy = policy_of(url, patience_s)
        self._http = httpx.AsyncClient(**settings(self._policy, api_key))

    @property
    def url(self) -> str:
        return self._policy.url

    def __repr__(self) -> str:
        return f"AsyncClient({self.url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # ---------------------------------------------------------------- datasets
    async def upload(
        self,
        *paths: str | Path,
        shuffle: int | None = None,
        idempotency_key: str | None = None,
        progress: Callable[[int, int], None] | None = None,
        started: Callable[[str], None] | None = None,
        resume: str | None = None,
        resumable_above: int = flows.RESUMABLE_ABOVE,
        **options: Unpack[DatasetOptions],
    ) -> Dataset:
        return await self._one(
            flows.upload(
                [Path(p) for p in paths], self._policy, options, shuffle=shuffle, key=idempotency_key, progress=progress, started=started, resume=resume,
                resumable_above=resumable_above,
            )
        )  # fmt: skip

    async def dataset_from_path(
        self, *paths: str | Path, shuffle: int | None = None, idempotency_key: str | None = None, **options: Unpack[DatasetOptions]
    ) -> Dataset:
        sources = [{"path": str(p)} for p in paths]
        return await self._one(flows.send(calls.create_dataset(sources, shuffle, idempotency_key, options), self._policy))

    async def dataset(self, dataset_id: str) -> Dataset:
        return await self._one(flows.send(calls.dataset(dataset_id), self._policy))

    def datasets(self, *, state: str | Sequence[str] | None = None, name: str | None = None) -> AsyncIterator[Dataset]:
        return self._iterate(flows.pages(lambda cursor: calls.datasets(cursor, state=state, name=name), self._policy))

    async def wait_for_dataset(
        self, dataset_id: str, *, timeout_s: float | None = None, progress: Callable[[Dataset], None] | None = None
    ) -> Dataset:
        return await self._one(flows.wait_for_dataset(dataset_id, self._policy, timeout_s=timeout_s, progress=progress))

    async def delete_dataset(self, dataset_id: str, *, dry_run: bool = False, force: bool = False) -> Deleted:
        return await self._one(flows.send(calls.delete_dataset(dataset_id, dry_run=dry_run, force=force), self._policy))

    async def drop_upload(self, upload_id: str) -> None:
        await self._one(flows.send(calls.drop_upload(upload_id), self._policy))

    # ---------------------------------------------------------------- jobs
    async def submit_job(self, dataset_id: str, *, idempotency_key: str | None = None, **options: Unpack[JobOptions]) -> Job:
        return await self._one(flows.send(calls.submit_job(dataset_id, idempotency_key, **options), self._policy))

    async def job(self, job_id: str) -> Job:
        return await self._one(flows.send(calls.job(job_id), self._policy))

    def jobs(self, **filters: Unpack[JobFilter]) -> AsyncIterator[Job]:
        return self._iterate(flows.pages(lambda cursor: calls.jobs(cursor, **filters), self._policy))

    async def pause(self, job_id: str) -> Job:
        return await self._one(flows.send(calls.control(job_id, "pause"), self._policy))

    async def resume(self, job_id: str) -> Job:
        return await self._one(flows.send(calls.control(job_id, "resume"), self._policy))

    async def cancel(self, job_id: str) -> Job:
        return await self._one(flows.send(calls.control(job_id, "cancel"), self._policy))

    async def retry(self, job_id: str, codes: Sequence[str] | None = None, *, rows: Sequence[tuple[int, int]] | None = None) -> Job:
        return await self._one(flows.send(calls.retry(job_id, codes, rows), self._policy))

    async def delete_job(self, job_id: str, *, dry_run: bool = False) -> Deleted:
        return await self._one(flows.send(calls.delete_job(job_id, dry_run=dry_run), self._policy))

    def rows(self, job_id: str, *, state: str | None = None) -> AsyncIterator[Row]:
        return self._iterate(flows.pages(lambda cursor: calls.rows(job_id, cursor, state=state), self._policy))

    def errors(self, job_id: str, *, code: str | None = None) -> AsyncIterator[RowError]:
        return self._iterate(flows.pages(lambda cursor: calls.errors(job_id, cursor, code=code), self._policy))

    async def ack(self, job_id: str, ranges: Sequence[tuple[int, int]]) -> Acked:
        return await self._one(flows.send(calls.ack(job_id, ranges), self._policy))

    def events(self, job_id: str, *, heartbeats: bool = False) -> AsyncIterator[Job]:
        return self._iterate(flows.events(job_id, self._policy, heartbeats=heartbeats))

    async def wait(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        return await self._one(flows.wait(job_id, self._policy, timeout_s=timeout_s))

    # ---------------------------------------------------------------- the service
    async def estimate(
        self,
        dataset_id: str,
        *,
        profile_id: str | None = None,
        rows: int | None = None,
        max_length: int | None = None,
        boundaries: Sequence[int] | None = None,
        encoding: str | None = None,
        positions: str | None = None,
    ) -> Estimate:
        asked = {
            "profile_id": profile_id,
            "rows": rows,
            "max_length": max_length,
            "boundaries": boundaries,
            "encoding": encoding,
            "positions": positions,
        }
        return await self._one(flows.send(calls.estimate(dataset_id, **asked), self._policy))

    async def gc(self, *, dry_run: bool = True, older_than_s: float | None = None, states: Sequence[str] | None = None) -> Collected:
        return await self._one(flows.send(calls.gc(dry_run=dry_run, older_than_s=older_than_s, states=states), self._policy))

    async def store(self) -> Store:
        return await self._one(flows.send(calls.store(), self._policy))

    async def engines(self) -> list[Engine]:
        return await self._one(flows.send(calls.engines(), self._policy))

    async def health(self) -> Health:
        return await self._one(flows.send(calls.health(), self._policy))

    async def ready(self) -> Health:
        return await self._one(flows.send(calls.ready(), self._policy))

    async def service(self) -> Service:
        return await self._one(flows.send(calls.service(), self._policy))

    # ---------------------------------------------------------------- steps
    async def _one(self, flow: Flow[T]) -> T:
        async with aclosing(self._iterate(flows.one(flow))) as items:
            result: T = await anext(items)
            return result

    async def _iterate(self, flow: Flow[None]) -> AsyncGenerator[Any, None]:
        performer = _Performer(self._http)
        try:
            step = next(flow)
            while True:
                if isinstance(step, flows.Emit):
                    yield step.item
                    step = next(flow)
                    continue
                try:
                    outcome = await performer.do(step)
                except httpx.TransportError as e:
                    step = flow.throw(e)
                else:
                    step = flow.send(outcome)
        except StopIteration:
            return
        finally:
            await performer.close()


class _Performer:
    """Does the steps of one flow; holds its open stream."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._stream: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None

    async def do(self, step: Step) -> Any:
        match step:
            case flows.Send(call):
                return await self._http.send(self._http.build_request(**arguments(call, async_pieces)))
            case flows.Open(call):
                await self.close()
                self._stream = await self._http.send(self._http.build_request(**arguments(call, async_pieces, stream=True)), stream=True)
                if not self._stream.is_success:
                    await self._stream.aread()
                self._chunks = self._stream.aiter_bytes()
                return self._stream
            case flows.Chunk():
                return await anext(self._chunks, b"") if self._chunks is not None else b""
            case flows.Sleep(seconds):
                await asyncio.sleep(seconds)
            case flows.Read(path, offset, size):
                return await asyncio.to_thread(read_block, path, offset, size)
        return None

    async def close(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()
            self._stream = None
