"""The synchronous client. Each method is one line over calls.py and flows.py; AsyncClient has the same ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx

from . import calls, flows
from .connection import arguments, policy_of, settings
from .flows import Flow, Step
from .options import DatasetOptions, JobFilter, JobOptions
from .records import Acked, Collected, Dataset, Deleted, Engine, Estimate, Health, Job, Row, RowError, Service, Store

T = TypeVar("T")


class Client:
    """A coordinator's API.

    Args:
        url: Root of the API. Default: STATETAP_URL, else http://127.0.0.1:8700.
        api_key: Sent as a bearer token. Default: STATETAP_API_KEY; none where the coordinator asks for none.
        patience_s: Seconds for which what can be repeated is tried again after its first failure (a coordinator that restarts, a cut
            connection, 503). Submissions carry an Idempotency-Key and can be repeated.

    Every method raises ApiError (a StatetapError: code, message, next_step, status, …). Not for several threads at once.
    """

    def __init__(self, url: str | None = None, *, api_key: str | None = None, patience_s: float = 30.0) -> None:
        self._policy = policy_of(url, patience_s)
        self._http = httpx.Client(**settings(self._policy, api_key))

    @property
    def url(self) -> str:
        return self._policy.url

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # ---------------------------------------------------------------- datasets
    def upload(
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
        """Upload one file or several, which are merged in order; ``shuffle`` is a seed by which all rows are permuted.

        A file above ``resumable_above`` bytes, or one of several, goes in blocks and goes on by itself after a cut. ``progress`` is
        called with (bytes sent, bytes in all); ``started`` with the id of the first file's upload, which ``resume`` goes on with after this
        process was killed.
        """
        return self._one(
            flows.upload(
                [Path(p) for p in paths], self._policy, options, shuffle=shuffle, key=idempotency_key, progress=progress, started=started, resume=resume,
                resumable_above=resumable_above,
            )
        )  # fmt: skip

    def dataset_from_path(
        self, *paths: str | Path, shuffle: int | None = None, idempotency_key: str | None = None, **options: Unpack[DatasetOptions]
    ) -> Dataset:
        """Name files that the coordinator sees under the same paths, below its data folder."""
        sources = [{"path": str(p)} for p in paths]
        return self._one(flows.send(calls.create_dataset(sources, shuffle, idempotency_key, options), self._policy))

    def dataset(self, dataset_id: str) -> Dataset:
        return self._one(flows.send(calls.dataset(dataset_id), self._policy))

    def datasets(self, *, state: str | Sequence[str] | None = None, name: str | None = None) -> Iterator[Dataset]:
        """All datasets, newest first, page by page."""
        return self._iterate(flows.pages(lambda cursor: calls.datasets(cursor, state=state, name=name), self._policy))

    def wait_for_dataset(
        self, dataset_id: str, *, timeout_s: float | None = None, progress: Callable[[Dataset], None] | None = None
    ) -> Dataset:
        """Until ingestion ended; ``progress`` is called with each look. Raises ApiError ``dataset_failed``, WaitTimeoutError."""
        return self._one(flows.wait_for_dataset(dataset_id, self._policy, timeout_s=timeout_s, progress=progress))

    def delete_dataset(self, dataset_id: str, *, dry_run: bool = False, force: bool = False) -> Deleted:
        return self._one(flows.send(calls.delete_dataset(dataset_id, dry_run=dry_run, force=force), self._policy))

    def drop_upload(self, upload_id: str) -> None:
        """Give up a resumable upload."""
        self._one(flows.send(calls.drop_upload(upload_id), self._policy))

    # ---------------------------------------------------------------- jobs
    def submit_job(self, dataset_id: str, *, idempotency_key: str | None = None, **options: Unpack[JobOptions]) -> Job:
        """``idempotency_key``: the same key and the same request give the same job, however often they are sent. Default: one a call."""
        return self._one(flows.send(calls.submit_job(dataset_id, idempotency_key, **options), self._policy))

    def job(self, job_id: str) -> Job:
        return self._one(flows.send(calls.job(job_id), self._policy))

    def jobs(self, **filters: Unpack[JobFilter]) -> Iterator[Job]:
        """Jobs, newest first, page by page."""
        return self._iterate(flows.pages(lambda cursor: calls.jobs(cursor, **filters), self._policy))

    def pause(self, job_id: str) -> Job:
        """No new prefill within 2 s; what is in flight is committed."""
        return self._one(flows.send(calls.control(job_id, "pause"), self._policy))

    def resume(self, job_id: str) -> Job:
        return self._one(flows.send(calls.control(job_id, "resume"), self._policy))

    def cancel(self, job_id: str) -> Job:
        """Rows that are done stay on the store."""
        return self._one(flows.send(calls.control(job_id, "cancel"), self._policy))

    def retry(self, job_id: str, codes: Sequence[str] | None = None, *, rows: Sequence[tuple[int, int]] | None = None) -> Job:
        """Open failed rows again: all, or those with these codes. Raises ApiError ``conflict`` when there are none.

        ``rows``: half-open ranges to capture anew, done rows too; an empty list has manifest and COMPLETE written anew.
        """
        return self._one(flows.send(calls.retry(job_id, codes, rows), self._policy))

    def delete_job(self, job_id: str, *, dry_run: bool = False) -> Deleted:
        return self._one(flows.send(calls.delete_job(job_id, dry_run=dry_run), self._policy))

    def rows(self, job_id: str, *, state: str | None = None) -> Iterator[Row]:
        """Rows and their files in order; ``state``: done, failed, skipped or open."""
        return self._iterate(flows.pages(lambda cursor: calls.rows(job_id, cursor, state=state), self._policy))

    def errors(self, job_id: str, *, code: str | None = None) -> Iterator[RowError]:
        """Failed and skipped rows in order, with line and next step."""
        return self._iterate(flows.pages(lambda cursor: calls.errors(job_id, cursor, code=code), self._policy))

    def ack(self, job_id: str, ranges: Sequence[tuple[int, int]]) -> Acked:
        """Half-open ranges of rows that were read and can be freed (jobs with ``retain`` until_read only)."""
        return self._one(flows.send(calls.ack(job_id, ranges), self._policy))

    def events(self, job_id: str, *, heartbeats: bool = False) -> Iterator[Job]:
        """Snapshots of a job until it has ended, over cut connections and restarts of the coordinator.

        ``heartbeats``: the last snapshot again about every 10 s when nothing changed.
        """
        return self._iterate(flows.events(job_id, self._policy, heartbeats=heartbeats))

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """The job once it has ended, however it did. Raises WaitTimeoutError."""
        return self._one(flows.wait(job_id, self._policy, timeout_s=timeout_s))

    # ---------------------------------------------------------------- the service
    def estimate(
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
        """Bytes of a job against the store's space, exact but for zstd, and what would fit."""
        asked = {
            "profile_id": profile_id,
            "rows": rows,
            "max_length": max_length,
            "boundaries": boundaries,
            "encoding": encoding,
            "positions": positions,
        }
        return self._one(flows.send(calls.estimate(dataset_id, **asked), self._policy))

    def gc(self, *, dry_run: bool = True, older_than_s: float | None = None, states: Sequence[str] | None = None) -> Collected:
        """What can be deleted (``dry_run``), or delete it."""
        return self._one(flows.send(calls.gc(dry_run=dry_run, older_than_s=older_than_s, states=states), self._policy))

    def store(self) -> Store:
        """Free bytes of the store, and what of them is spoken for."""
        return self._one(flows.send(calls.store(), self._policy))

    def engines(self) -> list[Engine]:
        """Engines that are alive, and their capture profiles."""
        return self._one(flows.send(calls.engines(), self._policy))

    def health(self) -> Health:
        return self._one(flows.send(calls.health(), self._policy))

    def ready(self) -> Health:
        """Raises ApiError ``redis_unavailable`` or ``store_unavailable``."""
        return self._one(flows.send(calls.ready(), self._policy))

    def service(self) -> Service:
        """Version and links."""
        return self._one(flows.send(calls.service(), self._policy))

    # ---------------------------------------------------------------- steps
    def _one(self, flow: Flow[T]) -> T:
        result: T = next(self._iterate(flows.one(flow)))
        return result

    def _iterate(self, flow: Flow[None]) -> Iterator[Any]:
        performer = _Performer(self._http)
        try:
            step = next(flow)
            while True:
                if isinstance(step, flows.Emit):
                    yield step.item
                    step = next(flow)
                    continue
                try:
                    outcome = performer.do(step)
                except httpx.TransportError as e:
                    step = flow.throw(e)
                else:
                    step = flow.send(outcome)
        except StopIteration:
            return
        finally:
            performer.close()


class _Performer:
    """Does the steps of one flow; holds its open stream."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._stream: httpx.Response | None = None
        self._chunks: Iterator[bytes] = iter(())

    def do(self, step: Step) -> Any:
        match step:
            case flows.Send(call):
                return self._http.send(self._http.build_request(**arguments(call)))
            case flows.Open(call):
                self.close()
                self._stream = self._http.send(self._http.build_request(**arguments(call, stream=True)), stream=True)
                if not self._stream.is_success:
                    self._stream.read()
                self._chunks = self._stream.iter_bytes()
                return self._stream
            case flows.Chunk():
                return next(self._chunks, b"")
            case flows.Sleep(seconds):
                time.sleep(seconds)
            case flows.Read(path, offset, size):
                return read_block(path, offset, size)
        return None

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def read_block(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as f:
        f.seek(offset)
        return f.read(size)
