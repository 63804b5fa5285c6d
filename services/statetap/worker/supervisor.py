"""The RQ worker of this process (one queue, a horse a batch), and the thread that says which engine stands beside it.

Invariant: a horse never outlives its parent, a SIGTERM reaches the horse too, and no outage of Redis ends the process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from types import FrameType
from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry
from rq import Queue, Worker
from rq.exceptions import StopRequested
from rq.job import Job
from rq.serializers import JSONSerializer

from ..contracts import keys
from ..contracts.capture import LEASE_FILE
from ..contracts.errors import EngineError
from ..contracts.records import EngineInfo
from ..parent import tie
from . import drain
from .context import Context, read_ready
from .lease import AWAY, connect, give_back, remove_lease_folder

log = logging.getLogger(__name__)

HEALTH_EVERY_S = 5.0
REGISTER_EVERY_S = keys.ENGINE_TTL_S / 3
WORKER_TTL_S = 60  # RQ blocks for 15 s less on an empty queue; its default is seven minutes


def rq_connection(url: str) -> redis.Redis:
    """RQ's own connection: retried for some seconds within a call, because RQ ends on an error in the wrong place."""
    return redis.Redis.from_url(
        url,
        socket_connect_timeout=5.0,
        retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), 6),
        retry_on_error=[redis.ConnectionError, redis.TimeoutError],
    )


class BatchWorker(Worker):
    """RQ's forking worker, with our signals and without what would end it while Redis is away."""

    max_connection_wait_time = 5.0

    def __init__(self, context: Context, connection: redis.Redis, stop: threading.Event) -> None:
        queue = Queue(keys.queue(context.ready.profile.profile_id), connection=connection, serializer=JSONSerializer)
        # A name of its own: after an outage RQ may still hold the former one for alive.
        name = f"{context.worker_id}-{secrets.token_hex(2)}"
        super().__init__([queue], name=name, connection=connection, serializer=JSONSerializer, worker_ttl=WORKER_TTL_S)
        self._context = context
        self._stop = stop
        self._waiting = False

    # signals

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """SIGTERM and SIGINT: take no new batch; the horse drains. Further signals change nothing."""
        if not self._stop.is_set():
            log.info("event=stop_requested signal=%s", signal.Signals(signum).name)
        self.drain()
        if self._waiting:
            raise StopRequested

    def drain(self) -> None:
        """Take no new batch and have the horse drain."""
        self._stop.set()
        self._stop_requested = True
        self._term_horse()

    def _term_horse(self) -> None:
        if self.horse_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.horse_pid, signal.SIGTERM)

    def dequeue_job_and_maintain_ttl(self, timeout: int | None, max_idle_time: int | None = None) -> Any:
        self._waiting = True
        try:
            if self._stop.is_set():
                raise StopRequested
            return super().dequeue_job_and_maintain_ttl(timeout, max_idle_time)
        finally:
            self._waiting = False

    # the horse

    def fork_work_horse(self, job: Job, queue: Queue) -> None:
        super().fork_work_horse(job, queue)
        if self._stop.is_set():  # a signal that came while the horse was made had nobody to go to
            self._term_horse()

    def main_work_horse(self, job: Job, queue: Queue) -> None:
        assert self.pid is not None  # the parent's
        tie(self.pid, signal.SIGKILL)
        super().main_work_horse(job, queue)

    def setup_work_horse_signals(self) -> None:
        drain.install()
        if self._stop.is_set():  # the parent's handler, inherited, took it
            drain.request()

    def monitor_work_horse(self, job: Job, queue: Queue) -> None:
        super().monitor_work_horse(job, queue)
        for lease in sweep_own(self._context):  # of a horse that was killed: one that ends gives it back itself
            try:
                give_back(self.connection, job.kwargs["job_id"], job.kwargs["batch"], lease)
            except AWAY as e:
                log.warning("event=redis_away doing=give_back error=%s", type(e).__name__)

    # Redis

    def subscribe(self) -> None:
        """RQ's remote commands are not used; without the thread the fork has one thing less to inherit."""

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        try:
            super().heartbeat(timeout, pipeline)
        except AWAY as e:
            log.warning("event=redis_away doing=heartbeat error=%s", type(e).__name__)

    def maintain_heartbeats(self, job: Job) -> None:
        try:
            super().maintain_heartbeats(job)
        except AWAY as e:
            log.warning("event=redis_away doing=heartbeat error=%s", type(e).__name__)

    def set_current_job_working_time(self, current_job_working_time: float, pipeline: Any = None) -> None:
        try:
            super().set_current_job_working_time(current_job_working_time, pipeline)
        except AWAY as e:
            log.warning("event=redis_away doing=working_time error=%s", type(e).__name__)


def sweep_own(context: Context) -> list[str]:
    """Remove the tap folders of this worker's dead horses: at this moment it has none. The engine would only do it in half a minute.

    Returns their leases.
    """
    leases = []
    for note in context.settings.tap.glob(f"*/{LEASE_FILE}"):
        try:
            if json.loads(note.read_bytes()).get("worker_id") == context.worker_id:
                remove_lease_folder(note.parent)
                leases.append(note.parent.name)
        except (OSError, ValueError, AttributeError):
            continue  # another worker's, just being written or removed
    return leases


class EngineKeeper:
    """The thread that registers the engine beside this worker, with its health, and sees when it becomes another one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ready = context.ready
        self._closing = threading.Event()
        self._client = connect(context.settings.redis_url.get_secret_value())
        self._key = keys.engine(context.ready.profile.profile_id, context.worker_id)
        self._registered_at = round(time.time(), 3)
        self.changed = threading.Event()
        """Set when the engine has another profile now: this worker has to start again."""
        self._on_change: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="engine-keeper", daemon=True)

    def start(self, on_change: Callable[[], None]) -> None:
        """``on_change`` is called once, in the thread, when ``changed`` is set."""
        self._on_change = on_change
        self._thread.start()

    def close(self) -> None:
        """End, and take the registration back."""
        self._closing.set()
        self._thread.join()
        try:
            self._client.delete(self._key)
        except AWAY:
            log.info("event=not_unregistered reason=redis_away")
        self._client.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            healthy = self._look()
            try:
                self._client.set(self._key, json.dumps(self._info(healthy).to_dict()), ex=int(keys.ENGINE_TTL_S))
            except AWAY as e:
                log.warning("event=redis_away doing=register error=%s", type(e).__name__)
            self._closing.wait(min(HEALTH_EVERY_S, REGISTER_EVERY_S))

    def _look(self) -> bool:
        """Is the engine there, healthy and still the one we serve?"""
        try:
            ready = read_ready(self._context.settings.tap)
        except EngineError as e:
            log.warning("event=engine_not_ready error=%s", e)
            return False
        if ready is None:
            return False
        if ready.profile.profile_id != self._context.ready.profile.profile_id and not self.changed.is_set():
            log.warning("event=engine_changed profile=%s was=%s", ready.profile.profile_id, self._context.ready.profile.profile_id)
            self.changed.set()
            self._on_change()
        elif not self.changed.is_set():
            self._ready = ready  # it may have started again, with other versions
        return not self.changed.is_set() and self._health()

    def _health(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._context.settings.engine_url.rstrip('/')}/health", timeout=4) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError, ValueError):
            return False

    def _info(self, healthy: bool) -> EngineInfo:
        ready = self._ready
        return EngineInfo(
            engine_id=ready.engine_id,
            url=self._context.settings.engine_url,
            profile_id=ready.profile.profile_id,
            profile=ready.profile.to_dict(),
            workers=1,
            worker_ids=[self._context.worker_id],
            tap_bytes=self._context.tap_total,
            healthy=healthy,
            self_check=ready.self_check,
            registered_at=self._registered_at,
        )
