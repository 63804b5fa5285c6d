"""The Redis side of one attempt at a batch: its lease, and everything that only the lease's holder may change.

Invariant: totals, suspects and the lease itself change only while the lease's value is ours (each change is one Lua script that
looks first), so an attempt that lost its lease can publish nothing stale. Redis being away delays this and loses nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import redis
from redis.backoff import NoBackoff
from redis.commands.core import Script
from redis.retry import Retry

from ..contracts import keys
from ..contracts.capture import LEASE_FILE
from ..contracts.records import BatchTotals, Control, PauseReason

log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSE_TTL_S = 15
LEFTOVER_TTL_S = 7 * 86_400  # of inflight and suspects: long enough for a job that is paused over a holiday
WAITS_TTL_S = 30
YIELD = "yield"
AWAY = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.OutOfMemoryError, redis.exceptions.ReadOnlyError)
"""Redis is away, or takes no writes for now: tried again, and never the end of a thread."""
REMOVE_S = 5.0  # what the engine has in hand at a horse's end is written within this
_OVERTAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)  # a file came, or went, since the folder was listed
TICK_S = 1.0  # control is read, and the lease file touched, this often

# Take the lease. Rows that a lost attempt left in flight, and that nobody has moved yet, become suspects.
_BEGIN = """
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
local raw = redis.call('HGET', KEYS[2], ARGV[3])
if raw then
    local entry = cjson.decode(raw)
    if entry.attempt == tonumber(ARGV[4]) then
        entry.started = true
        redis.call('HSET', KEYS[2], ARGV[3], cjson.encode(entry))
    end
end
if redis.call('EXISTS', KEYS[3]) == 1 then
    redis.call('SUNIONSTORE', KEYS[4], KEYS[3], KEYS[4])
    redis.call('DEL', KEYS[3])
end
if redis.call('EXISTS', KEYS[4]) == 1 then redis.call('EXPIRE', KEYS[4], ARGV[5]) end
return 1
"""

# Keep the lease. One that lapsed is taken again only while the batch is still given to this attempt, or Redis was wiped
# (then even the totals that this attempt published at its start are gone).
_KEEP = """
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) return 1 end
if holder then return 0 end
local raw = redis.call('HGET', KEYS[2], ARGV[3])
if raw and cjson.decode(raw).attempt ~= tonumber(ARGV[4]) then return 0 end
if not raw and redis.call('HEXISTS', KEYS[3], ARGV[5]) == 1 then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 2
"""

# Record rows as in flight.
_SENDING = """
local holder = redis.call('GET', KEYS[1])
if not holder then return -1 end
if holder ~= ARGV[1] then return 0 end
redis.call('SADD', KEYS[2], unpack(ARGV, 3))
redis.call('EXPIRE', KEYS[2], ARGV[2])
return 1
"""

# Publish totals; ARGV[4..] are rows that have their outcome.
_PUBLISH = """
local holder = redis.call('GET', KEYS[1])
if not holder then return -1 end
if holder ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
for i = 4, #ARGV, 1000 do
    local last = math.min(i + 999, #ARGV)
    redis.call('SREM', KEYS[3], unpack(ARGV, i, last))
    redis.call('SREM', KEYS[4], unpack(ARGV, i, last))
end
return 1
"""

_GIVE_BACK = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

_END = """
local raw = redis.call('HGET', KEYS[2], ARGV[2])
if raw and cjson.decode(raw).attempt == tonumber(ARGV[3]) then redis.call('HDEL', KEYS[2], ARGV[2]) end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1], KEYS[3])
return 1
"""


def connect(url: str) -> redis.Redis:
    """A client whose calls fail fast: retrying is :meth:`BatchKeys.call`'s work, which can be given up."""
    return redis.Redis.from_url(url, decode_responses=True, socket_timeout=5.0, socket_connect_timeout=5.0, retry=Retry(NoBackoff(), 0))


def give_back(client: redis.Redis, job_id: str, batch: int, lease: str) -> None:
    """Take the lease of a horse that is dead from it, so that its batch is run again at once and not when the lease lapses. What it had in
    flight stays recorded: those rows are suspects."""
    client.eval(_GIVE_BACK, 1, keys.lease(job_id, batch), lease)


class BatchKeys:
    """Redis as one attempt at a batch sees it. Thread-safe."""

    def __init__(self, client: redis.Redis, *, profile_id: str, job_id: str, batch: int, attempt: int, lease: str) -> None:
        self._client = client
        self._job_id = job_id
        self._batch = batch
        self._attempt = attempt
        self._lease = lease
        self._field = f"{job_id}:{batch}"
        self._lease_key = keys.lease(job_id, batch)
        self._yield_key = keys.give_way(job_id, batch, attempt)
        self._outstanding = keys.outstanding(profile_id)
        self._inflight = keys.inflight(job_id, batch)
        self._suspects = keys.suspects(job_id, batch)
        self._begin = client.register_script(_BEGIN)
        self._keep = client.register_script(_KEEP)
        self._sending = client.register_script(_SENDING)
        self._publish = client.register_script(_PUBLISH)
        self._end = client.register_script(_END)

    def call(self, doing: str, function: Callable[[], T], give_up: Callable[[], bool]) -> T | None:
        """``function()``, again and again while Redis is away; None when ``give_up`` says so."""
        wait = 0.05
        while True:
            try:
                return function()
            except AWAY as e:
                if give_up():
                    log.warning("event=redis_given_up doing=%s batch=%s error=%s", doing, self._field, type(e).__name__)
                    return None
                if wait == 0.8:
                    log.warning("event=redis_away doing=%s batch=%s error=%s", doing, self._field, type(e).__name__)
                time.sleep(wait)
                wait = min(wait * 2, 1.6)

    def begin(self) -> bool:
        """Take the lease and mark the batch as started; False when another attempt holds it."""
        ttl = int(keys.LEASE_TTL_S * 1000)
        arguments: list[str | int] = [self._lease, ttl, self._field, self._attempt, LEFTOVER_TTL_S]
        return bool(self._begin(keys=[self._lease_key, self._outstanding, self._inflight, self._suspects], args=arguments))

    def keep(self) -> bool:
        """Refresh the lease; False when it is another's now."""
        kept = self._keep(
            keys=[self._lease_key, self._outstanding, keys.totals(self._job_id)],
            args=[self._lease, int(keys.LEASE_TTL_S * 1000), self._field, self._attempt, self._batch],
        )
        if kept == 2:
            log.warning("event=lease_taken_again batch=%s", self._field)
        return bool(kept)

    def control(self) -> str:
        """What a person wants of the job; ``run`` where Redis does not say (wiped: the reconciler says it again).

        ``yield``: nothing, but another job has no worker.
        """
        control, give_way = self._client.mget(keys.control(self._job_id), self._yield_key)
        return YIELD if give_way and control in (None, Control.RUN.value) else str(control or Control.RUN.value)

    def suspects(self) -> dict[int, int]:
        """Row -> losses at which it was alone in flight, of the rows that have to run alone, in order."""
        rows = sorted(int(row) for row in self._client.smembers(self._suspects))
        if not rows:
            return {}
        losses = self._client.hmget(keys.losses(self._job_id), [str(row) for row in rows])
        return {row: int(n or 0) for row, n in zip(rows, losses, strict=True)}

    def sending(self, rows: Iterable[int]) -> bool:
        """Record rows as in flight, before they are sent; False when the lease is another's: then they must not be."""
        return self._as_holder(self._sending, [self._lease_key, self._inflight], [self._lease, LEFTOVER_TTL_S, *rows])

    def publish(self, totals: BatchTotals, answered: list[int]) -> bool:
        """Publish totals and forget rows that have their outcome; False when the lease is not ours."""
        data = json.dumps(totals.to_dict(), separators=(",", ":"))
        arguments: list[str | int] = [self._lease, self._batch, data, *answered]
        script_keys = [self._lease_key, keys.totals(self._job_id), self._inflight, self._suspects]
        return self._as_holder(self._publish, script_keys, arguments)

    def _as_holder(self, script: Script, script_keys: list[str], arguments: list[str | int]) -> bool:
        done = script(keys=script_keys, args=arguments)
        if done == -1 and self.keep():  # lapsed while Redis was away, or Redis was wiped
            done = script(keys=script_keys, args=arguments)
        return done == 1

    def pause(self, reason: PauseReason, message: str, *, code: str = "") -> None:
        """Tell the reconciler why this batch is handed back; it gives out nothing of the job while this stands.

        ``code``: the cause that opened the circuit; then the reconciler makes it a pause that a person ends.
        """
        data = {"reason": reason.value, "message": message, "code": code, "at": round(time.time(), 3)}
        self._client.set(keys.pause(self._job_id), json.dumps(data), ex=PAUSE_TTL_S)

    def streak(self) -> tuple[str, int]:
        """(code, rows): how the job's rows failed at the end of the last batch."""
        raw = self._client.get(keys.streak(self._job_id))
        data = json.loads(raw) if raw else {}
        return str(data.get("code", "")), int(data.get("rows", 0))

    def keep_streak(self, code: str, rows: int) -> bool:
        self._client.set(keys.streak(self._job_id), json.dumps({"code": code, "rows": rows}), ex=LEFTOVER_TTL_S)
        return True

    def tell_waits(self, worker_id: str, waits: dict[str, float]) -> None:
        """What this worker's feeder waited for lately."""
        with self._client.pipeline(transaction=False) as pipe:
            pipe.hset(keys.bound(self._job_id), worker_id, json.dumps({"at": round(time.time(), 3)} | waits))
            pipe.expire(keys.bound(self._job_id), WAITS_TTL_S)
            pipe.execute()

    def end(self) -> None:
        """Give the lease back, and take the batch off the list of those given out where it is still given to this attempt."""
        self._end(keys=[self._lease_key, self._outstanding, self._inflight], args=[self._lease, self._field, self._attempt])


class LeaseKeeper:
    """The thread of a horse that refreshes its lease, touches its lease file in the tap and reads the job's control key."""

    def __init__(
        self,
        batch_keys: BatchKeys,
        folder: Path,
        worker_id: str,
        on_change: Callable[[str], None],
        waits: Callable[[], dict[str, float]],
    ) -> None:
        """``on_change`` is called in the thread, with ``lost``, ``yield``, ``pause`` or ``cancel``; what ``waits`` says is told with each refresh."""
        self._keys = batch_keys
        self._folder = folder
        self._note = json.dumps({"worker_id": worker_id, "pid": os.getpid()}).encode()
        self._on_change = on_change
        self._worker_id = worker_id
        self._waits = waits
        self._stop = threading.Event()
        self.lost = False
        make_lease_folder(folder, self._note)
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        if not self.lost:
            # A batch of a small job is over before the first refresh.
            with contextlib.suppress(*AWAY):
                self._keys.tell_waits(self._worker_id, self._waits())

    def touch(self) -> None:
        """Say to the engine that the folder is in use; make it again where the engine took it for dead."""
        try:
            os.utime(self._folder / LEASE_FILE)
        except FileNotFoundError:
            log.warning("event=lease_folder_gone folder=%s", self._folder.name)
            make_lease_folder(self._folder, self._note)

    def _run(self) -> None:
        refreshed = time.monotonic()
        while not self._stop.wait(TICK_S):
            try:
                self.touch()
                control = self._keys.control()
                if control != Control.RUN.value:
                    self._on_change(control)
                if time.monotonic() - refreshed >= keys.LEASE_REFRESH_S - TICK_S / 2:
                    if not self._keys.keep():
                        self.lost = True
                        self._on_change("lost")
                        return
                    refreshed = time.monotonic()
                    self._keys.tell_waits(self._worker_id, self._waits())
            except AWAY as e:
                # The next tick tries again; a lease that lapsed meanwhile is taken again or found lost then.
                log.debug("event=lease_not_refreshed error=%s", type(e).__name__)
            except OSError as e:
                log.warning("event=tap_error folder=%s error=%s", self._folder.name, e)


def make_lease_folder(folder: Path, note: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LEASE_FILE).write_bytes(note)


def remove_lease_folder(folder: Path) -> None:
    """Remove it although the engine may still be writing what its horse had asked for: a file that comes in between makes ``rmtree`` fail
    at the folder itself, with the lease file gone, by which it would be found again. That is tried again at once, for REMOVE_S: whoever
    waits loses the race to an engine that goes on. What cannot be removed for another reason is left to the engine's sweep.
    """
    hopeless: list[OSError] = []

    def failed(_: object, __: str, info: tuple[type[BaseException], BaseException, object]) -> None:
        error = info[1]
        if isinstance(error, OSError) and error.errno not in _OVERTAKEN:
            hopeless.append(error)

    deadline = time.monotonic() + REMOVE_S
    while folder.exists():
        shutil.rmtree(folder, onerror=failed)
        if hopeless or time.monotonic() > deadline:
            log.warning("event=lease_folder_left folder=%s error=%s", folder.name, hopeless[0] if hopeless else "it is written into")
            return
