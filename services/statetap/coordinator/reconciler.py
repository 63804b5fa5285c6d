"""The one loop that gives out work: each second it compares what is on the store with what Redis says, and closes the gap.

Invariant: level-triggered. Nothing here is the only copy of anything: kill it at any point, run two at once, or wipe Redis, and
the next look does what is still to be done. A tick never does work in proportion to rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import redis

from ..contracts import keys
from ..contracts.errors import ErrorCode, StatetapError, StoreError
from ..contracts.records import Control, EngineInfo, JobControl, JobState, Retain
from ..store.fs import free_bytes, store_error
from . import engines
from .arranging import arrange
from .background import Background
from .catalog import Catalog, ended
from .endings import Endings
from .feed import Entry, Feed, parse_outstanding
from .ingestion import feed_ingestion
from .sizing import least_free
from .states import Pause, Seen, Verdict, judge, parse_pause
from .totals import Rates
from .view import FRUITLESS_LIMIT, SETTLE_S, Given, JobView

log = logging.getLogger(__name__)

BATCHES_A_WORKER = 2  # one that runs, one that waits for it to end
MIN_OUTSTANDING = 2


class Reconciler:
    """Runs in a thread of its own. ``wake`` may be called from any thread."""

    def __init__(
        self, catalog: Catalog, feed: Feed, *, tick_s: float, requeue_after_s: float, rate_window_s: float, min_free_bytes: int
    ) -> None:
        self._catalog = catalog
        self._feed = feed
        self._tick_s = tick_s
        self._requeue_after_s = requeue_after_s
        self._rate_window_s = rate_window_s
        self._min_free_bytes = min_free_bytes
        self._views: dict[str, JobView] = {}
        self._wake = threading.Event()
        self._stopping = False
        self._away = False  # Redis, at the last tick
        self._settled_at = 0.0  # before it a lease that is gone proves nothing: it lapsed while Redis was away
        self._queued: dict[str, set[str]] = {}
        self._background = Background(self.wake)
        self._endings = Endings(catalog, feed)
        self._finished: dict[str, int] = defaultdict(int)  # profile -> batches that ended since the last tick
        self.looked = (0, 0.0, time.monotonic())  # ticks that ended well, the seconds they took together, when the last one ended
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ask the loop to end and wait a while. It may be cut off anywhere."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)

    def wake(self) -> None:
        """Look now rather than at the next tick."""
        self._wake.set()

    def rates(self, job_id: str) -> Rates:
        """Speed of a job over the window; zero for one that is not known (yet)."""
        view = self._views.get(job_id)
        return view.window.rates() if view else Rates()

    def _run(self) -> None:
        while not self._stopping:
            started = time.monotonic()
            self._wake.clear()
            try:
                self.tick()
                self.looked = (self.looked[0] + 1, self.looked[1] + time.monotonic() - started, time.monotonic())
                if self._away:
                    log.info("Redis is back")
                self._away = False
            except redis.RedisError as e:
                if not self._away:
                    # Only the kind: the text can hold the URL.
                    log.warning("Redis is away (%s); jobs go on when it is back", type(e).__name__)
                self._away = True
                self._settled_at = time.monotonic() + SETTLE_S
                time.sleep(self._tick_s / 2)
            except StatetapError as e:
                log.warning("%s", e)
            except Exception:
                log.exception("a tick failed")
                time.sleep(self._tick_s / 2)
            self._wake.wait(max(0.0, self._tick_s - (time.monotonic() - started)))

    # one look

    def tick(self) -> None:
        """One look. Raises RedisError when Redis is away, StoreError when the store cannot be listed."""
        now = time.monotonic()
        self._queued.clear()
        views = self._open_views()
        # Each part stands alone: a dataset folder that cannot be read must not hold up the jobs.
        try:
            feed_ingestion(self._catalog, self._feed)
        except StatetapError as e:
            log.warning("datasets: %s", e)
        if not views:
            return
        live = engines.parse(self._feed.engine_records())
        try:
            free = free_bytes(self._catalog.store)
            least = least_free(self._catalog.store, self._min_free_bytes)
        except OSError as e:
            raise store_error(e, "look at the store's free space") from e
        marks = self._read(views)
        fed: dict[str, list[JobView]] = defaultdict(list)
        for view in views:
            if self._background.busy(view.spec.job_id):
                continue
            try:
                verdict = self._step(view, marks[view.spec.job_id], live, free, least, now)
            except StatetapError as e:
                log.warning("%s: %s", view.spec.job_id, e)
                view.in_trouble(e.code.value, e.message)
                continue
            if verdict is not None and verdict.feeds:
                fed[view.profile_id].append(view)
        for profile_id, group in fed.items():
            workers = engines.workers_of(live, profile_id)
            self._give(profile_id, group, workers, now)
            arrange(self._feed, profile_id, group, workers, now)

    def _open_views(self) -> list[JobView]:
        """Views of all jobs that have not ended; those of ended ones are dropped."""
        views = []
        present = set()
        for job_id in self._catalog.job_ids():
            try:
                if ended(self._catalog.control(job_id)):
                    continue
                present.add(job_id)
                if job_id not in self._views:
                    self._views[job_id] = JobView.open(self._catalog.job(job_id), self._catalog.plan(job_id), self._rate_window_s)
                views.append(self._views[job_id])
            except StatetapError as e:
                log.warning("%s: %s", job_id, e)
        for job_id in self._views.keys() - present:
            del self._views[job_id]
            self._catalog.forget_plan(job_id)
        return views

    def _read(self, views: list[JobView]) -> dict[str, tuple[bool, str | None, str | None]]:
        """Refresh entries, leases and totals; for each job: (known to this Redis, its control there, a horse's pause).

        Entries are read before totals: a horse publishes before it hands back, so an entry that is gone has its totals.
        """
        profiles = sorted({v.profile_id for v in views})
        with self._feed.redis.pipeline(transaction=False) as pipe:
            for profile_id in profiles:
                pipe.hgetall(keys.outstanding(profile_id))
            for v in views:
                pipe.mget(keys.known(v.spec.job_id), keys.control(v.spec.job_id), keys.pause(v.spec.job_id))
            replies = pipe.execute()
        by_job: dict[str, list[Entry]] = defaultdict(list)
        for profile_id, raw in zip(profiles, replies, strict=False):
            found, wrong = parse_outstanding(raw)
            if wrong:
                log.warning("profile %s: %d outstanding entries do not parse and are removed", profile_id, len(wrong))
                self._feed.redis.hdel(keys.outstanding(profile_id), *wrong)
            for entry in found:
                by_job[entry.job_id].append(entry)
        marks = {v.spec.job_id: (bool(m[0]), m[1], m[2]) for v, m in zip(views, replies[len(profiles) :], strict=True)}
        idle = [v for v in views if not self._background.busy(v.spec.job_id)]
        for v in idle:
            v.entries = {e.batch: e for e in by_job[v.spec.job_id] if 0 <= e.batch < len(v.plan)}
            v.touched = v.touched or bool(v.entries or v.given)
        self._read_leases_and_totals(idle)
        return marks

    def _read_leases_and_totals(self, views: list[JobView]) -> None:
        with self._feed.redis.pipeline(transaction=False) as pipe:
            for v in views:
                for batch in v.entries:
                    pipe.exists(keys.lease(v.spec.job_id, batch))
                if v.touched:
                    pipe.hgetall(keys.totals(v.spec.job_id))
            replies = iter(pipe.execute())
        for v in views:
            v.leased = {batch for batch in v.entries if next(replies)}
            if v.touched:
                before = v.sums.finished
                v.fold.update(next(replies))
                # No more than were out: totals that were folded again are no speed.
                self._finished[v.profile_id] += min(max(v.sums.finished - before, 0), len(v.given))
                # An entry that goes before the next look was out at this one: its totals are read once more then.
                v.touched = bool(v.entries)

    # one job

    def _step(
        self, view: JobView, marks: tuple[bool, str | None, str | None], live: list[EngineInfo], free: int, least: int, now: float
    ) -> Verdict | None:
        """Bring one job forward; its verdict, or None when it is not to be fed now."""
        known, redis_control, worker_pause = marks
        job_id = view.spec.job_id
        if not self._check(view):
            return None
        if not known:
            if now >= view.trouble_until:
                self._start(view, self._endings.rebuild)
            return None
        control = self._catalog.control(job_id)
        view.window.add(now, view.sums)
        if control.control == Control.CANCEL:
            self._cancel(view, redis_control, now)
            return None
        finished = view.sums.finished == len(view.plan)
        if finished and now >= view.trouble_until:
            self._start(view, self._endings.finish)
            return None
        pause = parse_pause(worker_pause)
        if pause is not None and pause.stands and control.control == Control.RUN:
            control = self._open_for_good(view, pause)
        seen = self._seen(view, control, live, free, least, pause, now)
        verdict = judge(seen)
        if not verdict.feeds and not view.entries:
            view.window.reset()
        self._save(view, control, verdict)
        if redis_control != verdict.control:
            self._feed.redis.set(keys.control(job_id), verdict.control.value)
        for given in view.handed_back(now, excused=not verdict.feeds):
            if view.fruitless >= FRUITLESS_LIMIT:
                self._open_circuit(view, given, now)
        self._take_back(view, again=verdict.feeds, now=now)
        return None if finished or now < view.hold_until else verdict

    def _start(self, view: JobView, task: Callable[[JobView], None]) -> None:
        self._background.start(view.spec.job_id, lambda: self._endings.guarded(view, task))

    def _check(self, view: JobView) -> bool:
        """Compare the job with its dataset once: a job whose rows are others than it was planned for must not go on."""
        if view.checked:
            return True
        report = self._catalog.report(view.spec.dataset_id)
        if report is None:
            raise StoreError(ErrorCode.STORE_IO, f"the report of dataset {view.spec.dataset_id} is not on the store")
        rows = int(view.plan.stops[-1]) if len(view.plan) else 0
        if report.content_hash != view.spec.content_hash or rows != view.spec.rows or len(view.plan) != view.spec.batches:
            message = f"dataset {view.spec.dataset_id} or the plan on the store differs from what the job was made from"
            self._endings.end(view, JobState.FAILED, reason=ErrorCode.PLAN_MISMATCH.value, message=message)
            return False
        view.checked = True
        return True

    def _seen(
        self, view: JobView, control: JobControl, live: list[EngineInfo], free: int, least: int, pause: Pause | None, now: float
    ) -> Seen:
        if now >= view.trouble_until:
            view.trouble = None
        mine = [e for e in live if e.profile_id == view.profile_id]
        started = bool(control.started_at or view.sums.rows or view.leased or any(e.started for e in view.entries.values()))
        return Seen(
            control=control.control,
            standing=(control.reason, control.message) if control.control == Control.PAUSE else ("", ""),
            started=started,
            engines=len(mine),
            healthy=sum(e.healthy for e in mine),
            free_bytes=free,
            min_free_bytes=least,
            start_command=engines.start_command(view.spec.profile),
            unread=view.unread(self._catalog.acks(view.spec.job_id).bytes if view.spec.retain == Retain.UNTIL_READ else 0),
            worker_pause=(pause.reason, pause.message) if pause is not None else None,
            trouble=view.trouble,
            circuit=view.circuit_message if now < view.circuit_until else "",
        )

    def _save(self, view: JobView, control: JobControl, verdict: Verdict) -> None:
        """control.json only when state or reason changed (a message alone, with its numbers, is no change)."""
        if (control.state, control.reason) == (verdict.state, verdict.reason):
            return

        def change(c: JobControl) -> JobControl:
            if ended(c) or c.control != control.control:  # a person was faster: the next look judges anew
                return c
            started_at = c.started_at or (time.time() if verdict.state == JobState.RUNNING else 0.0)
            new = {"state": str(verdict.state), "reason": verdict.reason, "message": verdict.message, "started_at": started_at}
            return JobControl.from_dict(c.to_dict() | new)

        self._catalog.change_control(view.spec.job_id, change)
        log.info("%s: %s%s", view.spec.job_id, verdict.state, f" ({verdict.reason}: {verdict.message})" if verdict.reason else "")

    def _open_for_good(self, view: JobView, pause: Pause) -> JobControl:
        """Rows failed one after another with one cause: no row more until a person has looked at it."""

        def change(c: JobControl) -> JobControl:
            if ended(c) or c.control != Control.RUN:
                return c
            new = {"control": Control.PAUSE.value, "state": JobState.PAUSED.value, "reason": pause.reason, "message": pause.message}
            return JobControl.from_dict(c.to_dict() | new)

        control = self._catalog.change_control(view.spec.job_id, change)
        self._feed.redis.delete(keys.pause(view.spec.job_id))  # control.json has it now
        log.warning("%s: %s: %s", view.spec.job_id, control.reason, control.message)
        return control

    def _open_circuit(self, view: JobView, given: Given, now: float) -> None:
        error = self._feed.last_error(given.entry.rq_id)
        message = f"{FRUITLESS_LIMIT} attempts in a row ended without a row" + (f"; the last one with: {error}" if error else "")
        view.open_circuit(now, f"{message}. It is tried again every half minute; look at the worker's log")

    # attempts

    def _take_back(self, view: JobView, *, again: bool, now: float) -> None:
        """Requeue (or only take back) what was started and lost its lease, or was never started and is in no queue."""
        idle = [e for e in view.entries.values() if e.batch not in view.leased]
        waiting = [e for e in idle if not e.started]
        queued = self._queue_of(view.profile_id) if waiting else set()
        missing = {(e.batch, e.attempt): self._missing_since(view, e, now) for e in waiting if e.rq_id not in queued}
        view.missing_since = missing
        for entry in idle:
            since = missing.get((entry.batch, entry.attempt))
            lost = entry.started and now >= self._settled_at
            if lost or (since is not None and now - since > self._requeue_after_s):
                self._lapse(view, entry, again=again and not view.fold.finished[entry.batch])

    def _missing_since(self, view: JobView, entry: Entry, now: float) -> float:
        """Monotonic; by what a former coordinator saw, where one did: killed every few seconds, none would ever have waited long enough."""
        if (since := view.missing_since.get((entry.batch, entry.attempt))) is not None:
            return since
        if entry.missing_at:
            return now - max(time.time() - entry.missing_at, 0.0)
        self._feed.missing(view.profile_id, entry)
        return now

    def _queue_of(self, profile_id: str) -> set[str]:
        """RQ ids in a profile's queue, read once a tick however many jobs it has."""
        if profile_id not in self._queued:
            self._queued[profile_id] = set(self._feed.queued(keys.queue(profile_id)))
        return self._queued[profile_id]

    def _lapse(self, view: JobView, entry: Entry, *, again: bool) -> None:
        taken, attempt = self._feed.lapse(view.profile_id, entry, again=again)
        if not taken:
            return
        del view.entries[entry.batch]
        view.given.pop(entry.batch, None)
        if attempt:
            self._note_given(view, entry.batch, attempt)

    def _note_given(self, view: JobView, batch: int, attempt: int) -> None:
        rq_id = keys.rq_id(view.spec.job_id, batch, attempt)
        entry = Entry(job_id=view.spec.job_id, batch=batch, attempt=attempt, rq_id=rq_id, started=False)
        view.entries[batch] = entry
        view.given[batch] = Given(entry=entry, rows=view.fold.rows_of(batch))
        view.touched = True

    def _cancel(self, view: JobView, redis_control: str | None, now: float) -> None:
        """Take everything back; end the job when nobody works on it any more."""
        if redis_control != Control.CANCEL:
            self._feed.redis.set(keys.control(view.spec.job_id), Control.CANCEL.value)
        for entry in [e for e in view.entries.values() if e.batch not in view.leased]:
            self._lapse(view, entry, again=False)
        if not view.entries and now >= view.trouble_until:
            self._start(view, self._endings.cancel)

    def _give(self, profile_id: str, group: list[JobView], workers: int, now: float) -> None:
        """Fill up to about two batches a worker, higher priority first, in turn over jobs of one priority.

        Batches that ended since the last tick are added: with batches shorter than a tick the queue would run dry otherwise.
        """
        out = sum(len(v.entries) for v in self._views.values() if v.profile_id == profile_id)
        want = max(MIN_OUTSTANDING, BATCHES_A_WORKER * workers) + self._finished.pop(profile_id, 0)
        held: dict[str, set[int]] = defaultdict(set)
        candidates = list(group)
        while candidates:
            if out >= want:  # each job has one that waits all the same: fairness.py sees to it that it is run in its turn
                candidates = [v for v in candidates if v.entries.keys() <= v.leased]
                if not candidates:
                    return
            view = min(candidates, key=lambda v: (-v.spec.priority, len(v.entries), v.last_fed, v.spec.created_at))
            batch = view.feedable(now, held[view.spec.job_id])
            if batch is None:
                candidates.remove(view)
                continue
            attempt = self._feed.give(profile_id, view.spec.job_id, batch)
            if attempt is None:  # somebody has it: another loop's, or a horse from before Redis was wiped
                held[view.spec.job_id].add(batch)
                continue
            if view.room is not None:
                view.room -= view.bytes_left(batch)
            view.last_fed = time.monotonic()
            self._note_given(view, batch, attempt)
            out += 1
