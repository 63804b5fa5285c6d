"""One attempt at one batch, in the horse's event loop: feed, prefill, check, commit, tell.

Invariant: every row that was sent ends in one of three ways: its record is in the ledger, it is open for the next attempt, or
another attempt has it. Prefills in flight, uncommitted rows and tap bytes are bounded, whatever the size of the batch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..contracts.capture import new_rid
from ..contracts.errors import ErrorCode, RowError, StoreError
from ..contracts.records import Batch, Bound, JobSpec, PauseReason, RowRecord, RowState
from ..contracts.tensors import tap_bytes
from ..store.commit import GROUP_ROWS, Committer, Outcome
from ..store.fs import remove
from ..store.resume import Resumed
from ..store.rows import Row, RowsFile
from ..store.sample import Placed, SampleWriter, Staged
from ..store.samples import FolderSamples, samples_of
from . import drain
from .admission import Admission, refuse
from .circuit import Circuit
from .context import Context, EngineNow
from .engine import EngineClient, PrefillError
from .lease import BatchKeys, LeaseKeeper
from .opening import open_batch
from .outage import Outage, Verdict
from .tally import Tally
from .waits import Waits

log = logging.getLogger(__name__)

T = TypeVar("T")

POISONED_AFTER = 3  # losses at which the row was alone in flight
BACKOFF_S = 0.25  # before the second try of a row; doubles up to BACKOFF_MOST_S
BACKOFF_MOST_S = 4.0
REDIS_GRACE_S = 30.0  # how long the end of a batch waits for a Redis that is away

DRAIN = "drain"
LOST = "lost"
INTERNAL = ErrorCode.INTERNAL.value


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A row that was admitted and has no outcome yet."""

    row: Row
    generation: int
    reserved: int  # bytes of the tap
    ended: asyncio.Event


class BatchRun:
    """Made and run once, inside an event loop. ``reason`` says afterwards why it stopped early ("" when it did all rows)."""

    def __init__(
        self, context: Context, spec: JobSpec, job_dir: Path, batch: Batch, lease: str, rows: RowsFile, batch_keys: BatchKeys
    ) -> None:
        settings = context.settings
        self._settings = settings
        self._context = context
        self._spec = spec
        self._profile = spec.capture_profile
        self._batch = batch
        self._lease = lease
        self._folder = settings.tap / lease
        self._job_dir = job_dir
        self._rows = rows
        self._keys = batch_keys
        self.reason = ""
        self.message = ""
        self.circuit = Circuit(settings.circuit_failures)
        self.waits = Waits()
        self.tally = Tally(batch.batch)
        self._bug: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._sent: dict[int, _Sent] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._working = 0  # rows between admission and their hand-over to the committer
        self._feeder_waits = False
        # Beside the window: two groups may wait for the committer, so that it always has one to work on.
        self._admission = Admission(window=settings.window, rows=settings.window + 2 * GROUP_ROWS, tap_share=context.tap_share)
        self._answered: list[int] = []  # rows with an outcome that Redis has not been told of
        self._dirty = asyncio.Event()
        self._ending = False
        self._give_up_at = float("inf")  # monotonic; when Redis is not waited for any longer
        self._drain_until = float("inf")  # monotonic
        self._engine = EngineClient(settings.engine_url, settings.request_timeout_s)
        self._outage = Outage(self._engine, settings.engine_down_after_s)
        self._samples = samples_of(job_dir, spec)
        bucket = None if isinstance(self._samples, FolderSamples) else self._samples
        self._writer = SampleWriter(job_dir, spec.sample_format, lease, bucket, settings.put_bytes)
        self._write_pool = ThreadPoolExecutor(settings.put_threads if bucket else settings.write_threads, thread_name_prefix="write")
        self._redis_pool = ThreadPoolExecutor(1, thread_name_prefix="redis")
        engine = EngineNow(settings.tap, context.ready)
        self._committer = Committer(job_dir, spec.sample_format, batch.batch, lease, self._tell, self._samples, engine)

    async def run(self) -> Resumed:
        """Resume and do the open rows; what resuming found is returned. Raises what is no row's fault."""
        publisher: asyncio.Task[None] | None = None
        self._keeper = LeaseKeeper(self._keys, self._folder, self._context.worker_id, self._stop_from_thread, self.waits.recent)
        drain.listen(lambda: self._stop_from_thread(DRAIN))
        try:
            # In a thread: the lease is refreshed and a stop is heard while files are checked for adoption.
            opening = partial(open_batch, self._settings, self._job_dir, self._spec, self._batch, self._rows, self._lease)
            resumed = await asyncio.to_thread(opening, self._samples, lambda: bool(self.reason))
            for record in resumed.records.values():
                self.tally.add(record)
            self._dirty.set()  # told at once: it may be all there is
            publisher = asyncio.create_task(self._publish_forever())
            before = await self._redis("streak", self._keys.streak) or ("", 0)
            self.circuit = Circuit(self._settings.circuit_failures, *before)
            await self._feed(resumed)
            await self._finish_rows()
            if (self.circuit.code, self.circuit.rows) != before:
                await self._redis("streak", lambda: self._keys.keep_streak(self.circuit.code, self.circuit.rows))
        finally:
            drain.listen(None)
            await self._close(publisher)
        if self._bug:
            raise self._bug
        return resumed

    async def _close(self, publisher: asyncio.Task[None] | None) -> None:
        for task in self._tasks:  # none are left but after a drain that took too long, or where feeding failed
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.to_thread(self._committer.close)
        await asyncio.sleep(0)  # lets in the last outcomes, which the committer's thread posted before it ended
        self._give_up_at = time.monotonic() + (self._settings.drain_s if self.reason == DRAIN else REDIS_GRACE_S)
        self._ending = True
        self._dirty.set()
        try:
            if publisher is not None:
                await publisher
        finally:
            await asyncio.to_thread(self._keeper.close)
            await self._outage.close()
            await self._engine.close()
            # What hangs beyond a drain ends with the process, and counts as what a killed one was at.
            self._write_pool.shutdown(wait=time.monotonic() < self._drain_until, cancel_futures=True)
            self._redis_pool.shutdown()

    def stop(self, reason: str, message: str = "") -> None:
        """Send nothing more; finish and commit what is in flight. The first reason stays."""
        if reason == DRAIN:
            self._drain_until = min(self._drain_until, time.monotonic() + self._settings.drain_s)
        if not self.reason:
            self.reason, self.message = reason, message
            log.info("event=stopping batch=%d reason=%s message=%s", self._batch.batch, reason, message or "-")
        self._admission.wake()

    def _stop_from_thread(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self.stop, reason)

    # feeding

    async def _feed(self, resumed: Resumed) -> None:
        alone = await self._redis("suspects", self._keys.suspects) or {}
        # Recorded before the loss and not told any more: no suspects.
        self._answered += [number for number in alone if number not in resumed.open_rows]
        self._dirty.set()
        for number, losses in alone.items():
            if number in resumed.open_rows and not self.reason:
                await self._run_alone(number, resumed.open_rows[number], losses)
        todo = self._sendable({n: g for n, g in resumed.open_rows.items() if n not in alone})
        following = next(todo, None)
        while following is not None and not self.reason:
            group: list[_Sent] = []
            while following is not None and (item := self._admit(*following)):
                group.append(item)
                following = next(todo, None)
            if group:
                await self._send(group)
            else:
                await self._wait(self._admission.changed())

    def _sendable(self, generations: dict[int, int]) -> Iterator[tuple[Row, int]]:
        """Rows to send, in order; those that are never sent are recorded on the way."""
        if not generations:
            return
        for row in self._rows.read(min(generations), max(generations) + 1):
            generation = generations.get(row.row)
            if generation is None:
                continue
            refused = refuse(row, generation, self._profile, self._spec.longest, self._context.tap_share)
            if refused is None:
                yield row, generation
            else:
                self._committer.submit(refused)

    def _admit(self, row: Row, generation: int) -> _Sent | None:
        reserved = tap_bytes(self._profile, len(row.input_ids))
        if not self._admission.admit(reserved):
            return None
        item = _Sent(row=row, generation=generation, reserved=reserved, ended=asyncio.Event())
        self._sent[row.row] = item
        self._working += 1
        return item

    async def _send(self, group: list[_Sent]) -> None:
        """Say in Redis that these rows are in flight, then send them. All that were admitted meanwhile share one round trip."""
        self._feeder_waits = False
        self._committer.hurry(False)
        rows = [item.row.row for item in group]
        said = await self._redis("sending", lambda: self._keys.sending(rows))
        if said is False:
            self.stop(LOST)
        for item in group:
            if not said:
                self._admission.answered()
                self._worked(item, None)
                continue
            task = asyncio.create_task(self._do(item))
            self._tasks.add(task)
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._bug = self._bug or bug
            self.stop(INTERNAL, repr(bug))

    async def _run_alone(self, number: int, generation: int, losses: int) -> None:
        """A row that was in flight at a loss: nothing else is under way, so another loss is its own."""
        if losses >= POISONED_AFTER:
            message = f"{losses} workers were lost while this row was alone in flight"
            self._committer.submit(self._failed(number, generation, ErrorCode.POISONED, message))
            return
        log.info("event=running_alone batch=%d row=%d losses=%d", self._batch.batch, number, losses)
        for row, _ in self._sendable({number: generation}):
            while (item := self._admit(row, generation)) is None:
                await self._wait(self._admission.changed())
            await self._send([item])
            await self._wait(item.ended.wait())
        await self._publish()  # it is no suspect any more: before the next one can take this worker down

    async def _wait(self, event: Awaitable[object]) -> None:
        """Wait for rows under way. Nothing can join the committer's group meanwhile once all are handed over."""
        self._feeder_waits = True
        self._hurry_if_idle()
        self.waits.begin(self._admission.short_of)
        try:
            await event
        finally:
            self.waits.end()

    async def _finish_rows(self) -> None:
        self._feeder_waits = True
        self._hurry_if_idle()
        self.waits.begin(Bound.PREFILL)
        while self._tasks and time.monotonic() < self._drain_until:
            await asyncio.wait(self._tasks, timeout=min(1.0, max(0.0, self._drain_until - time.monotonic())))
        if self._tasks:
            log.warning("event=drain_timeout batch=%d rows_left_open=%d", self._batch.batch, len(self._tasks))

    def _hurry_if_idle(self) -> None:
        if self._feeder_waits and not self._working:
            self._committer.hurry(True)

    # one row

    async def _do(self, item: _Sent) -> None:
        """From the first prefill to the hand-over to the committer."""
        result: Staged | Placed | RowRecord | None = None
        try:
            result = await self._extract(item)
        except StoreError as e:
            self._store_trouble(e)
        finally:
            self._worked(item, result)

    def _worked(self, item: _Sent, result: Staged | Placed | RowRecord | None) -> None:
        """Hand a row over to the committer; None leaves it open."""
        self._working -= 1
        if result is not None:
            self._committer.submit(result)
        else:
            self._end(item.row.row)
        self._hurry_if_idle()

    async def _extract(self, item: _Sent) -> Staged | Placed | RowRecord | None:
        """Prefill and stage, again where that can help. None: the row stays open. Raises StoreError."""
        number = item.row.row
        ids_json = json.dumps(item.row.input_ids.tolist(), separators=(",", ":"))
        busy_until = self._loop.time() + self._settings.request_timeout_s
        tries, waits = 0, 0
        while True:
            rid = new_rid(self._lease, number)
            tap_file = self._folder / f"{rid}.safetensors"
            if tries or waits:
                self._admission.again()
            try:
                try:
                    sent = self._loop.time()
                    reply = await self._engine.prefill(rid, ids_json)
                    self.waits.replied(self._loop.time() - sent, reply.held_s)
                    if reply.path != f"{self._lease}/{tap_file.name}":
                        raise PrefillError(ErrorCode.PROTOCOL_MISMATCH, f"the reply names the file {reply.path!r}", again=False)
                finally:
                    self._admission.answered()
                staged = await self._loop.run_in_executor(self._write_pool, self._writer.stage, item.row, item.generation, tap_file)
                self.circuit.good()
                return staged
            except PrefillError as e:
                error: PrefillError | RowError = e
                again = e.again
                charged = not (e.busy and self._loop.time() < busy_until)
                if e.unreachable or (e.code is ErrorCode.ENGINE_TIMEOUT and not e.busy):
                    verdict = await self._outage.verdict()
                    if verdict is Verdict.GONE:
                        self.stop(PauseReason.ENGINE_DOWN.value, f"the engine did not answer: {e.message}")
                        return None
                    charged = verdict is Verdict.UP
            except RowError as e:
                error, again, charged = e, e.retryable, True
            except StoreError:
                remove(tap_file)
                raise
            remove(tap_file)
            tries += charged
            waits += not charged
            if self.circuit.stops(error.code, error.message):
                self.stop(PauseReason.CIRCUIT_OPEN.value, self.circuit.message)
                return None
            if not again or tries >= self._settings.row_attempts:
                log.warning("event=row_failed row=%d tries=%d error=%s", number, tries, error)
                if self.circuit.failed(error.code, error.message):
                    self.stop(PauseReason.CIRCUIT_OPEN.value, self.circuit.message)
                return self._failed(number, item.generation, error.code, error.message)
            if self.reason:
                return None
            log.info("event=row_again row=%d tries=%d error=%s", number, tries, error)
            if error.code is ErrorCode.CAPTURE_INCOMPLETE:
                self._keeper.touch()  # the engine may have taken our folder for dead
            await asyncio.sleep(min(BACKOFF_S * 2 ** (tries + waits - 1), BACKOFF_MOST_S))

    def _failed(self, row: int, generation: int, code: ErrorCode, message: str) -> RowRecord:
        state = RowState.FAILED.value
        return RowRecord(row=row, state=state, generation=generation, code=code.value, message=message, at=round(time.time(), 3))

    def _store_trouble(self, error: StoreError) -> None:
        full = error.code is ErrorCode.STORE_FULL
        self.stop((PauseReason.LOW_DISK if full else PauseReason.CIRCUIT_OPEN).value, str(error))

    # outcomes

    def _tell(self, outcomes: Sequence[Outcome]) -> None:
        """In the committer's thread, after the ledger's fsync."""
        self._loop.call_soon_threadsafe(self._told, outcomes)

    def _told(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.record is not None:
                self.tally.add(outcome.record)
                self._answered.append(outcome.row)
            elif outcome.error is not None:
                self._store_trouble(outcome.error)
            self._end(outcome.row)
        self._dirty.set()

    def _end(self, number: int) -> None:
        item = self._sent.pop(number, None)
        if item is not None:  # None: a row that was never sent
            self._admission.ended(item.reserved)
            item.ended.set()

    # Redis

    async def _publish_forever(self) -> None:
        while not self._ending or self._dirty.is_set():
            await self._dirty.wait()
            self._dirty.clear()
            await self._publish()

    async def _publish(self) -> None:
        answered, self._answered = self._answered, []
        totals = self.tally.totals()
        published = await self._redis("totals", lambda: self._keys.publish(totals, answered))
        if published is False:
            self.stop(LOST)

    async def _redis(self, doing: str, function: Callable[[], T]) -> T | None:
        """Call Redis off the loop; None when it was away for so long that this was given up."""
        return await self._loop.run_in_executor(self._redis_pool, self._keys.call, doing, function, self._has_given_up)

    def _has_given_up(self) -> bool:
        return time.monotonic() > min(self._give_up_at, self._drain_until)
