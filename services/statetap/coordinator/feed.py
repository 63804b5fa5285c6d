"""The reconciler's writes to Redis: batches given out, attempts that were lost, and the keys of a job that ended.

Invariant: each change of a batch's outstanding entry is one Lua script that looks before it writes, so two reconcilers give a
batch out once and account for a loss once. Redis carries references only: job, batch, attempt.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer

from ..contracts import keys
from ..contracts.records import Control
from .connections import connect

log = logging.getLogger(__name__)

# Give a batch out unless it is out, or somebody works on it (a horse that took its lease again after Redis was wiped).
# KEYS outstanding, attempts, lease; ARGV field, batch, rq id without the attempt, time. Returns the attempt, 0 when it is out.
GIVE = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 or redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
local attempt = redis.call('HINCRBY', KEYS[2], ARGV[2], 1)
redis.call('HSET', KEYS[1], ARGV[1],
    cjson.encode({attempt = attempt, rq_id = ARGV[3] .. attempt, enqueued_at = tonumber(ARGV[4]), started = false}))
return attempt
"""

# Take back an attempt whose holder is gone: its rows in flight become suspects, one that was alone is charged. Then give the
# batch out again (ARGV[6] = '1') or not.
# KEYS outstanding, attempts, lease, inflight, suspects, losses; ARGV as above, then the attempt, '1' | '0'.
# Returns {took back 0|1, new attempt or 0, rows that were in flight}.
MISSING = """
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if not raw then return 0 end
local entry = cjson.decode(raw)
if entry.attempt ~= tonumber(ARGV[2]) or entry.started then return 0 end
entry.missing_at = tonumber(ARGV[3])
redis.call('HSET', KEYS[1], ARGV[1], cjson.encode(entry))
return 1
"""

LAPSE = """
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if not raw or cjson.decode(raw).attempt ~= tonumber(ARGV[5]) or redis.call('EXISTS', KEYS[3]) == 1 then return {0, 0, 0} end
local rows = redis.call('SMEMBERS', KEYS[4])
for _, row in ipairs(rows) do redis.call('SADD', KEYS[5], row) end
if #rows == 1 then redis.call('HINCRBY', KEYS[6], rows[1], 1) end
redis.call('DEL', KEYS[4])
if ARGV[6] ~= '1' then
    redis.call('HDEL', KEYS[1], ARGV[1])
    return {1, 0, #rows}
end
local attempt = redis.call('HINCRBY', KEYS[2], ARGV[2], 1)
redis.call('HSET', KEYS[1], ARGV[1],
    cjson.encode({attempt = attempt, rq_id = ARGV[3] .. attempt, enqueued_at = tonumber(ARGV[4]), started = false, lost = true}))
return {1, attempt, #rows}
"""

# KEYS queue; ARGV number of ids, the ids as they were seen, the same in the wanted order. Returns 0 when they are others now.
REORDER = """
local n = tonumber(ARGV[1])
local now = redis.call('LRANGE', KEYS[1], 0, -1)
if #now ~= n then return 0 end
for i = 1, n do if now[i] ~= ARGV[1 + i] then return 0 end end
redis.call('DEL', KEYS[1])
redis.call('RPUSH', KEYS[1], unpack(ARGV, n + 2, 2 * n + 1))
return 1
"""

YIELD_TTL_S = 60
RESULT_TTL_S = 60  # of RQ's records: they are for a look at what went wrong, never a truth
FAILURE_TTL_S = 600
ENDED_TTL_S = 3600  # a horse of an ended job that wakes late still reads that it has to leave


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A batch that is given out, as keys.outstanding has it. ``lost``: because its last attempt's holder was gone."""

    job_id: str
    batch: int
    attempt: int
    rq_id: str
    started: bool
    lost: bool = False
    enqueued_at: float = 0.0  # seconds since the epoch
    missing_at: float = 0.0  # the same; 0: not seen to be missing


def parse_outstanding(raw: dict[str, str]) -> tuple[list[Entry], list[str]]:
    """Entries of the hash, and the fields that are none."""
    entries, wrong = [], []
    for field, value in raw.items():
        job_id, _, batch = field.rpartition(":")
        try:
            data = json.loads(value)
            entries.append(
                Entry(
                    job_id=job_id,
                    batch=int(batch),
                    attempt=int(data["attempt"]),
                    rq_id=str(data.get("rq_id", "")),
                    started=bool(data.get("started")),
                    lost=bool(data.get("lost")),
                    enqueued_at=float(data.get("enqueued_at", 0.0)),
                    missing_at=float(data.get("missing_at", 0.0)),
                )
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            wrong.append(field)
    return entries, wrong


class Feed:
    """All methods raise redis.RedisError when Redis is away; nothing is half done then that the next tick does not see."""

    def __init__(self, url: str) -> None:
        self.redis = connect(url, decode=True)
        self._rq = connect(url, decode=False)
        self._queues: dict[str, Queue] = {}
        self._give = self.redis.register_script(GIVE)
        self._lapse = self.redis.register_script(LAPSE)
        self._missing = self.redis.register_script(MISSING)
        self._reorder = self.redis.register_script(REORDER)

    def close(self) -> None:
        self.redis.close()
        self._rq.close()

    def _queue(self, name: str) -> Queue:
        if name not in self._queues:
            self._queues[name] = Queue(name, connection=self._rq, serializer=JSONSerializer)
        return self._queues[name]

    def queued(self, name: str) -> list[str]:
        """RQ ids that wait in a queue, the next one first (LRANGE; RQ's registries are no truth)."""
        return list(map(str, self.redis.lrange(f"rq:queue:{name}", 0, -1)))

    def give(self, profile_id: str, job_id: str, batch: int) -> int | None:
        """Give a batch out: its attempt, or None when it is out already."""
        attempt = int(self._give(keys=self._keys(profile_id, job_id, batch)[:3], args=self._args(job_id, batch)))
        if not attempt:
            return None
        self._enqueue_batch(profile_id, job_id, batch, attempt, at_front=False)
        return attempt

    def reorder(self, name: str, seen: list[str], wanted: list[str]) -> bool:
        """Put the queued ids into this order; False when the queue is not as it was ``seen`` any more (a worker took one)."""
        return bool(self._reorder(keys=[f"rq:queue:{name}"], args=[len(seen), *seen, *wanted]))

    def give_way(self, job_id: str, batch: int, attempt: int) -> None:
        """Ask an attempt to commit what is in flight and to hand the rest back."""
        self.redis.set(keys.give_way(job_id, batch, attempt), "1", ex=YIELD_TTL_S)

    def missing(self, profile_id: str, entry: Entry) -> None:
        """Remember since when a batch is in no queue and has not been started."""
        self._missing(keys=[keys.outstanding(profile_id)], args=[f"{entry.job_id}:{entry.batch}", entry.attempt, time.time()])

    def lapse(self, profile_id: str, entry: Entry, *, again: bool) -> tuple[bool, int]:
        """Take back an attempt whose holder is gone, and give the batch out anew, before all others, if ``again``.

        Returns whether it was ours to take back, and the new attempt (0: none).
        """
        reply = self._lapse(
            keys=self._keys(profile_id, entry.job_id, entry.batch),
            args=[*self._args(entry.job_id, entry.batch), entry.attempt, "1" if again else "0"],
        )
        taken, attempt, rows = (int(v) for v in reply)
        if attempt:
            self._enqueue_batch(profile_id, entry.job_id, entry.batch, attempt, at_front=True)
        if taken:
            log.info(
                "%s batch %d attempt %d is lost with %d rows in flight; %s",
                entry.job_id,
                entry.batch,
                entry.attempt,
                rows,
                f"given out again as attempt {attempt}" if attempt else "taken back",
            )
        return bool(taken), attempt

    def _keys(self, profile_id: str, job_id: str, batch: int) -> list[str]:
        return [
            keys.outstanding(profile_id),
            keys.attempts(job_id),
            keys.lease(job_id, batch),
            keys.inflight(job_id, batch),
            keys.suspects(job_id, batch),
            keys.losses(job_id),
        ]

    def _args(self, job_id: str, batch: int) -> list[str | int | float]:
        return [f"{job_id}:{batch}", batch, keys.rq_id(job_id, batch, 0)[:-1], round(time.time(), 3)]

    def _enqueue_batch(self, profile_id: str, job_id: str, batch: int, attempt: int, *, at_front: bool) -> None:
        self._queue(keys.queue(profile_id)).enqueue(
            keys.BATCH_TASK,
            kwargs={"job_id": job_id, "batch": batch, "attempt": attempt},
            job_id=keys.rq_id(job_id, batch, attempt),
            job_timeout=-1,
            result_ttl=RESULT_TTL_S,
            failure_ttl=FAILURE_TTL_S,
            at_front=at_front,
        )

    def enqueue_ingestion(self, dataset_id: str) -> None:
        self._queue(keys.INGEST_QUEUE).enqueue(
            keys.INGEST_TASK,
            args=[dataset_id],
            job_id=ingest_rq_id(dataset_id),
            job_timeout=-1,
            result_ttl=RESULT_TTL_S,
            failure_ttl=FAILURE_TTL_S,
        )

    def totals(self, job_id: str) -> dict[str, str]:
        """Batch -> JSON BatchTotals, as published."""
        return {str(k): str(v) for k, v in self.redis.hgetall(keys.totals(job_id)).items()}

    def engine_records(self) -> list[str | None]:
        """The registered engine records, unparsed."""
        names = list(self.redis.scan_iter(match=keys.ENGINES_PATTERN, count=1000))
        return [None if v is None else str(v) for v in self.redis.mget(names)] if names else []

    def last_error(self, rq_id: str) -> str:
        """The last line of what an attempt raised, as RQ kept it; "" when there is nothing."""
        try:
            result = Job.fetch(rq_id, connection=self._rq, serializer=JSONSerializer).latest_result()
        except NoSuchJobError:
            return ""
        lines = (result.exc_string or "").strip().splitlines() if result else []
        return lines[-1][:500] if lines else ""

    def drop_job(self, profile_id: str, job_id: str, batches: int, control: Control) -> None:
        """Forget an ended job. Totals and control get a TTL instead, so that a late horse leaves nothing behind for ever."""
        fields = map(str, self.redis.hkeys(keys.outstanding(profile_id)))
        entries = [f for f in fields if f.rpartition(":")[0] == job_id]
        with self.redis.pipeline(transaction=False) as pipe:
            if entries:
                pipe.hdel(keys.outstanding(profile_id), *entries)
            pipe.set(keys.control(job_id), control.value, ex=ENDED_TTL_S)
            pipe.expire(keys.totals(job_id), ENDED_TTL_S)
            # Known stays a while: another coordinator, a tick behind, must not take the drop for a wipe.
            pipe.set(keys.known(job_id), "1", ex=ENDED_TTL_S)
            pipe.unlink(*(f(job_id) for f in (keys.attempts, keys.losses, keys.pause, keys.streak, keys.bound)))
            for names in _chunks(f(job_id, b) for b in range(batches) for f in (keys.inflight, keys.suspects)):
                pipe.unlink(*names)
            pipe.execute()


def ingest_rq_id(dataset_id: str) -> str:
    return f"ingest-{dataset_id}"


def _chunks(names: Iterable[str], size: int = 500) -> Iterable[list[str]]:
    chunk: list[str] = []
    for name in names:
        chunk.append(name)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
