"""What takes more than one request: retries, pages, resumable uploads, event streams, waiting.

A flow is a generator of steps; a client (sync or async) does each step and sends its outcome back in, so the logic is written once and
tested without a network. Invariant: a flow never sleeps, reads or sends by itself.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx

from ..contracts.errors import ErrorCode, RequestError
from . import calls
from .calls import Call, Page
from .errors import ApiError, WaitTimeoutError, problem_of, unreachable
from .options import DatasetOptions
from .records import Answer, Dataset, Job, Upload
from .sse import Decoder

T = TypeVar("T")
A = TypeVar("A", bound=Answer)

BLOCK = 8 << 20  # bytes of one PATCH; what a client holds of a file at a time
RESUMABLE_ABOVE = 64 << 20  # a smaller file goes as one form
FIRST_DELAY_S, LAST_DELAY_S = 0.1, 5.0
POLL_S = 1.0
DATASET_POLL_S = 0.3
STREAM_READ_S = 30.0  # the coordinator sends a heartbeat every 10 s
NEAR_DEADLINE_S = 15.0
RETRIED = (409, 503)
NO_SUCH_ENDPOINT = (404, 405, 406, 501)


# ------------------------------------------------------------------ steps
@dataclass(frozen=True)
class Send:
    """-> httpx.Response, read to its end. httpx.TransportError is thrown into the flow."""

    call: Call[Any]


@dataclass(frozen=True)
class Open:
    """-> httpx.Response whose body is read by Chunk when it is a success, and read to its end when not."""

    call: Call[Any]


@dataclass(frozen=True)
class Chunk:
    """-> the next bytes of the stream that was opened last, b"" at its end."""


@dataclass(frozen=True)
class Sleep:
    seconds: float


@dataclass(frozen=True)
class Read:
    """-> at most ``size`` bytes of the file from ``offset`` on."""

    path: Path
    offset: int
    size: int


@dataclass(frozen=True)
class Emit(Generic[T]):
    """An item for the caller."""

    item: T


Step = Send | Open | Chunk | Sleep | Read | Emit[Any]
Flow = Generator[Step, Any, T]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """``patience_s``: how long a request is tried again after its first failure."""

    url: str
    patience_s: float = 30.0
    clock: Callable[[], float] = field(default=time.monotonic)

    def delays(self) -> Generator[float, None, None]:
        delay = FIRST_DELAY_S
        while True:
            # Spread, so that watchers of a coordinator that restarts do not come back in step.
            yield delay * random.uniform(0.75, 1.25)
            delay = min(LAST_DELAY_S, delay * 2)


# ------------------------------------------------------------------ one request
def send(call: Call[T], policy: Policy) -> Flow[T]:
    """The parsed answer. Raises ApiError; UnreachableError when nobody answers for ``patience_s``."""
    deadline: float | None = None
    for delay in policy.delays():
        error: ApiError
        try:
            response: httpx.Response = yield Send(call)
        except httpx.TransportError as e:
            error = unreachable(policy.url, e)
            never_sent = isinstance(e, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
            again = call.repeatable or never_sent
        else:
            if response.is_success:
                return parsed(call, response)
            error = problem_of(response)
            again = call.repeatable and error.retryable and error.status in RETRIED
            delay = max(delay, _retry_after(response))
        now = policy.clock()
        deadline = now + policy.patience_s if deadline is None else deadline
        if not again or now + delay > deadline:
            raise error
        yield Sleep(delay)
    raise AssertionError


def parsed(call: Call[T], response: httpx.Response) -> T:
    """Raises ApiError ``internal`` when the answer is not the API's."""
    try:
        return call.parse(response.json() if response.content else None)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        message = f"{call.method} {call.path}: the answer is not one of Statetap's API ({type(e).__name__}: {e})"
        raise ApiError(ErrorCode.INTERNAL, message, status=response.status_code) from e


def _retry_after(response: httpx.Response) -> float:
    text = response.headers.get("Retry-After", "")
    return min(float(text), LAST_DELAY_S) if text.isascii() and text.isdigit() else 0.0


def one(flow: Flow[T]) -> Flow[None]:
    """A flow's result, as the one item that it emits."""
    yield Emit((yield from flow))


def pages(call: Callable[[str | None], Call[Page[A]]], policy: Policy) -> Flow[None]:
    """Emits the items of all pages, one page in memory."""
    cursor = None
    while True:
        page = yield from send(call(cursor), policy)
        for item in page.items:
            yield Emit(item)
        cursor = page.next_cursor
        if not cursor:
            return


# ------------------------------------------------------------------ datasets
def wait_for_dataset(
    dataset_id: str, policy: Policy, *, timeout_s: float | None = None, progress: Callable[[Dataset], None] | None = None
) -> Flow[Dataset]:
    """The dataset once it is ready. Raises ApiError ``dataset_failed``, WaitTimeoutError."""
    deadline = None if timeout_s is None else policy.clock() + timeout_s
    while True:
        dataset = yield from send(calls.dataset(dataset_id), policy)
        if progress is not None:
            progress(dataset)
        if dataset.state == "ready":
            return dataset
        if dataset.state == "failed":
            why = (dataset.error or {}).get("message", "no row could be used")
            counts = f" {dataset.errors}" if dataset.errors else ""
            raise ApiError(ErrorCode.DATASET_FAILED, f"{dataset.name or dataset_id}: {why}{counts}", status=409)
        if deadline is not None and policy.clock() > deadline:
            raise WaitTimeoutError(ErrorCode.DATASET_NOT_READY, f"{dataset_id} is still {dataset.state} after {timeout_s:.0f} s")
        yield Sleep(DATASET_POLL_S)


@dataclass(kw_only=True)
class Progress:
    """Bytes sent of all files together, told to a callback ``(sent, total)``."""

    total: int
    tell: Callable[[int, int], None] | None = None
    before: int = 0  # of files that are through

    def at(self, offset: int) -> None:
        if self.tell is not None:
            self.tell(self.before + offset, self.total)


def upload(
    paths: Sequence[Path],
    policy: Policy,
    options: DatasetOptions,
    *,
    shuffle: int | None = None,
    key: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    started: Callable[[str], None] | None = None,
    resume: str | None = None,
    resumable_above: int = RESUMABLE_ABOVE,
) -> Flow[Dataset]:
    """Send files and make one dataset of them. ``resume``: the id of an upload of the first file that was broken off; ``started`` is told that id."""
    sizes = [_size(p) for p in paths]
    if not paths:
        raise RequestError(ErrorCode.INVALID_REQUEST, "at least one file is needed")
    done = Progress(total=sum(sizes), tell=progress)
    done.at(0)
    if len(paths) == 1 and shuffle is None and resume is None and sizes[0] <= resumable_above:
        data: bytes = yield Read(paths[0], 0, sizes[0])
        dataset = yield from send(calls.upload_form(paths[0].name, data, key, options), policy)
        done.at(sizes[0])
        return dataset
    sources = []
    for i, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        if i == 0 and resume is not None:
            state = yield from send(calls.upload(resume), policy)
            if state.size != size:
                raise RequestError(ErrorCode.CONFLICT, f"upload {resume} is of {state.size} bytes and {path} has {size}")
        else:
            state = yield from send(calls.start_upload(path.name, size), policy)
        if i == 0 and started is not None:
            started(state.upload_id)
        yield from _send_file(path, state, policy, done)
        done.before += size
        sources.append({"upload_id": state.upload_id})
    return (yield from send(calls.create_dataset(sources, shuffle, key, options), policy))


def _size(path: Path) -> int:
    if not path.is_file():
        raise RequestError(ErrorCode.NOT_FOUND, f"{path} is not a file")
    return path.stat().st_size


def _send_file(path: Path, state: Upload, policy: Policy, progress: Progress) -> Flow[None]:
    """Append blocks from the offset that the coordinator has; after a failure ask it where it stands and go on from there."""
    offset, deadline, delays = state.offset, None, policy.delays()
    progress.at(offset)
    while offset < state.size:
        block: bytes = yield Read(path, offset, min(BLOCK, state.size - offset))
        if not block:
            raise RequestError(ErrorCode.CONFLICT, f"{path} became shorter while it was uploaded")
        error: ApiError
        try:
            response: httpx.Response = yield Send(calls.append(state.upload_id, offset, block))
        except httpx.TransportError as e:
            error = unreachable(policy.url, e)
        else:
            if response.is_success:
                offset = _offset(response.headers.get("Upload-Offset"), offset + len(block))
                deadline, delays = None, policy.delays()
                progress.at(offset)
                continue
            error = problem_of(response)
            if error.code != ErrorCode.CONFLICT and not (error.retryable and error.status in RETRIED):
                raise error
        now, delay = policy.clock(), next(delays)
        deadline = now + policy.patience_s if deadline is None else deadline
        if now + delay > deadline:
            error.message += f"; upload {state.upload_id} stands at {offset} of {state.size} bytes and can be resumed"
            error.detail["upload_id"] = state.upload_id
            raise error
        yield Sleep(delay)
        there = (yield from send(calls.upload(state.upload_id), policy)).offset
        if there > offset:  # a cut keeps what arrived: that is progress
            deadline, delays = None, policy.delays()
        offset = there
        progress.at(offset)


def _offset(header: str | None, otherwise: int) -> int:
    return int(header) if header is not None and header.isascii() and header.isdigit() else otherwise


# ------------------------------------------------------------------ how a job goes
def events(job_id: str, policy: Policy, *, heartbeats: bool = False, deadline: float | None = None) -> Flow[None]:
    """Emits snapshots until the job has ended: the present one by a GET, so that it is of now, then changes by events.

    A cut is bridged by a GET again, and the stream opened anew. Without an event stream (an older coordinator, Redis away) the job is asked
    for every second. ``heartbeats``: emit the last snapshot again when nothing changed for about 10 s. ``deadline`` (of the policy's
    clock): return by then.
    """
    follower = _Follower(job_id, heartbeats)
    streams = True
    delays = policy.delays()
    while True:
        yield from follower.take((yield from send(calls.job(job_id), policy)))
        if follower.ended or (deadline is not None and policy.clock() >= deadline):
            return
        near = deadline is not None and deadline - policy.clock() < NEAR_DEADLINE_S
        if streams and not near:
            try:
                response: httpx.Response = yield Open(calls.events(job_id, follower.last_id))
                if response.is_success and response.headers.get("content-type", "").startswith(calls.EVENT_STREAM):
                    delays = policy.delays()
                    yield from follower.stream(policy, deadline)
                elif response.is_success or response.status_code in NO_SUCH_ENDPOINT:
                    streams = False  # or there is no such job any more: the GET tells
            except httpx.TransportError:
                pass  # the GET is tried with patience
        if follower.ended:
            return
        pause = next(delays) if streams and not near else POLL_S
        yield Sleep(pause if deadline is None else max(0.0, min(pause, deadline - policy.clock())))


class _Follower:
    """What was seen of a job so far; a snapshot that is not newer is not emitted."""

    def __init__(self, job_id: str, heartbeats: bool) -> None:
        self.last_id = ""
        self.last: Job | None = None
        self._job_id = job_id
        self._heartbeats = heartbeats

    @property
    def ended(self) -> bool:
        return self.last is not None and self.last.ended

    def take(self, job: Job) -> Flow[None]:
        newer = self.last is None or job.version == 0 or job.version > self.last.version
        if newer:
            self.last, self.last_id = job, str(job.version or "")  # the ids of the stream are versions
        if newer or self._heartbeats:
            yield Emit(self.last)

    def stream(self, policy: Policy, deadline: float | None) -> Flow[None]:
        decoder = Decoder()
        while chunk := (yield Chunk()):
            for event in self._decoded(decoder, chunk):
                if event.name == "job" and event.data:
                    yield from self.take(self._job(event.data))
                elif event.comment and self._heartbeats and self.last is not None:
                    yield Emit(self.last)
            if self.ended or (deadline is not None and deadline - policy.clock() < NEAR_DEADLINE_S):
                return

    def _decoded(self, decoder: Decoder, chunk: bytes) -> list[Any]:
        try:
            return decoder.feed(chunk)
        except ValueError as e:
            raise ApiError(ErrorCode.INTERNAL, f"events of {self._job_id}: {e}") from e

    def _job(self, data: str) -> Job:
        try:
            return Job.from_dict(json.loads(data))
        except (ValueError, TypeError) as e:
            raise ApiError(ErrorCode.INTERNAL, f"events of {self._job_id}: not a job ({type(e).__name__}: {e})") from e


def wait(job_id: str, policy: Policy, *, timeout_s: float | None = None) -> Flow[Job]:
    """The job once it has ended, however it did. Raises WaitTimeoutError; a pause does not end the wait."""
    deadline = None if timeout_s is None else policy.clock() + timeout_s
    job = yield from _last(events(job_id, policy, deadline=deadline))
    if job is not None and job.ended:
        return job
    stands = f"{' '.join(filter(None, (job.state, job.reason)))} {job.rows.ended}/{job.rows.total} rows" if job is not None else "unknown"
    raise WaitTimeoutError(ErrorCode.INCOMPLETE, f"{job_id} has not ended after {timeout_s:g} s: {stands}")


def _last(flow: Flow[None]) -> Flow[Any]:
    """The last item that a flow emits, its other steps passed through."""
    item: Any = None
    try:
        step = next(flow)
        while True:
            if isinstance(step, Emit):
                item = step.item
                step = next(flow)
                continue
            try:
                outcome = yield step
            except httpx.TransportError as e:
                step = flow.throw(e)
            else:
                step = flow.send(outcome)
    except StopIteration:
        return item
