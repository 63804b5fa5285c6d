"""Long steps of a job that run in the background: totals folded again from the ledger, and the three ways a job ends.

Invariant: the store is written before Redis forgets; a crash anywhere leaves a job that the next look ends again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable

import redis

from ..contracts import keys
from ..contracts.errors import ErrorCode, StatetapError
from ..contracts.layout import ROWS
from ..contracts.records import Control, JobControl, JobState
from ..store.complete import drop_stale_completion, finish_job
from ..store.fs import store_error
from ..store.ledger import JobLedger, totals_of
from ..store.retries import last_generation
from .catalog import Catalog, ended
from .feed import Feed
from .view import SETTLE_S, JobView

log = logging.getLogger(__name__)

FLUSH_BATCHES = 64  # of folded totals that go to Redis in one round trip
INCOMPLETE_LIMIT = 3  # times that a job's missing rows are run again before it is failed


class Endings:
    def __init__(self, catalog: Catalog, feed: Feed) -> None:
        self._catalog = catalog
        self._feed = feed

    def guarded(self, view: JobView, task: Callable[[JobView], None]) -> None:
        """Run a task; what goes wrong on the store becomes the job's trouble, Redis's absence is left to the next look."""
        try:
            task(view)
        except StatetapError as e:
            log.warning("%s: %s", view.spec.job_id, e)
            view.in_trouble(e.code.value, e.message)
        except OSError as e:
            error = store_error(e, f"job {view.spec.job_id}")
            log.warning("%s: %s", view.spec.job_id, error)
            view.in_trouble(error.code.value, error.message)
        except redis.RedisError as e:
            log.warning("%s: Redis went away: %s", view.spec.job_id, type(e).__name__)

    def rebuild(self, view: JobView) -> None:
        """Totals of every batch that has a ledger, folded again batch by batch; then the job is known to this Redis.

        What a horse published meanwhile is newer and stays.
        """
        job_id = view.spec.job_id
        client = self._feed.redis
        ledger = JobLedger(self._catalog.job_path(job_id))
        names = [b for b in ledger.batches() if b < len(view.plan)]
        for at in range(0, len(names), FLUSH_BATCHES):
            with client.pipeline(transaction=False) as pipe:
                for batch in names[at : at + FLUSH_BATCHES]:
                    totals = totals_of(batch, ledger.records(batch).values())
                    pipe.hsetnx(keys.totals(job_id), str(batch), _json(totals.to_dict()))
                pipe.execute()
        client.set(keys.known(job_id), "1")
        if names:
            log.info("%s: totals of %d batches were folded from the ledger", job_id, len(names))
            # Redis was wiped under horses that are at work: a batch given out before they took their lease again would cut them off.
            view.hold_until = time.monotonic() + SETTLE_S
        view.window.reset()
        view.touched = True

    def finish(self, view: JobView) -> None:
        """Manifest and COMPLETE, then the final state; or batches whose rows turn out to be missing are run again."""
        spec = view.spec
        sums = view.sums
        try:
            report = finish_job(self._catalog.job_path(spec.job_id), self._catalog.dataset_path(spec.dataset_id) / ROWS)
        except StatetapError as e:
            if e.code is not ErrorCode.INCOMPLETE:
                raise
            self._run_again(view, e)
            return
        final = sums.to_final() | {n: getattr(report, n) for n in ("done", "failed", "skipped", "tokens", "bytes", "reused", "engines")}
        state = JobState.COMPLETED_WITH_ERRORS if report.failed or report.skipped else JobState.COMPLETED
        self.end(view, state, final=final, retries=report.retries)

    def _run_again(self, view: JobView, error: StatetapError) -> None:
        """Rows or files are missing though all totals say finished: forget these totals, so that their batches are given out again."""
        view.incomplete += 1
        log.warning("%s: %s", view.spec.job_id, error)
        if view.incomplete > INCOMPLETE_LIMIT:
            self.end(view, JobState.FAILED, reason=error.code.value, message=error.message)
            return
        self._feed.redis.hdel(keys.totals(view.spec.job_id), *map(str, error.detail["batches"]))
        view.window.reset()
        view.touched = True

    def cancel(self, view: JobView) -> None:
        """End a cancelled job that nobody works on. Batches that were cut off are folded again: their last totals may be missing."""
        job_id = view.spec.job_id
        client = self._feed.redis
        ledger = JobLedger(self._catalog.job_path(job_id))
        for batch in ledger.batches():
            if batch < len(view.plan) and not view.fold.finished[batch]:
                totals = totals_of(batch, ledger.records(batch).values())
                client.hset(keys.totals(job_id), str(batch), _json(totals.to_dict()))
        view.fold.update(self._feed.totals(job_id))
        self.end(view, JobState.CANCELLED, message="cancelled on request")

    def end(
        self,
        view: JobView,
        state: JobState,
        *,
        reason: str = "",
        message: str = "",
        final: dict[str, object] | None = None,
        retries: int | None = None,
    ) -> None:
        """Write the terminal state, then forget the job in Redis.

        ``retries``: the generation of the newest retry that the end knows of. Rows that were opened again since keep the job going.
        """
        spec = view.spec
        now = time.time()
        path = self._catalog.job_path(spec.job_id)

        def change(control: JobControl) -> JobControl:
            if ended(control):  # another coordinator was first
                return control
            if retries is not None and drop_stale_completion(path, last_generation(path)):
                return control
            return JobControl.from_dict(
                control.to_dict()
                | {"state": state.value, "reason": reason, "message": message, "ended_at": now}
                # A job that ended between two looks was never seen running.
                | {"started_at": control.started_at or (spec.created_at if final else 0.0), "final": final or view.sums.to_final()}
            )

        control = self._catalog.change_control(spec.job_id, change)
        if not ended(control):
            log.info("%s: rows were opened again while it ended: it goes on", spec.job_id)
            view.touched = True
            return
        log.info("%s: %s%s", spec.job_id, control.state, f" ({control.reason}: {control.message})" if control.reason else "")
        wish = Control.CANCEL if state in (JobState.CANCELLED, JobState.FAILED) else Control.RUN
        self._feed.drop_job(view.profile_id, spec.job_id, len(view.plan), wish)


def _json(data: dict[str, object]) -> str:
    return json.dumps(data, separators=(",", ":"))
