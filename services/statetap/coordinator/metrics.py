"""/metrics: what the coordinator knows, as Prometheus text.

Invariant: labels are bounded. No row and no dataset is a label; a job is one only until it ends. Counters count what this process has seen
since it started and never fall, whatever becomes of a job. A scrape works while Redis is away (``statetap_redis_up`` is 0 then, and what
only Redis knows is left out).
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
import redis
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..contracts import keys
from ..contracts.errors import StatetapError
from ..contracts.records import EngineInfo, JobControl, JobSpec, JobState
from ..store.fs import free_bytes
from . import engines, models
from .catalog import ended
from .context import Context
from .sizing import least_free

REDIS_S = 3.0  # a scrape does not wait longer for it
_METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "PUT", "DELETE", "OPTIONS"})


@dataclass(frozen=True, kw_only=True)
class Described:
    """``name`` as Prometheus stores it, but for the ``_bucket``, ``_sum`` and ``_count`` of histograms and summaries."""

    name: str
    type: str  # gauge | counter | summary | histogram
    help: str
    labels: tuple[str, ...] = ()


def _d(name: str, type: str, help: str, *labels: str) -> Described:
    return Described(name=name, type=type, help=help, labels=labels)


METRICS: tuple[Described, ...] = (
    _d("statetap_build_info", "gauge", "Always 1; the label names the version.", "version"),
    _d("statetap_redis_up", "gauge", "1 when Redis answers."),
    _d("statetap_jobs", "gauge", "Jobs on the store, by state.", "state"),
    _d("statetap_datasets", "gauge", "Datasets on the store, by state.", "state"),
    _d("statetap_job_rows", "gauge", "Rows of a job that has not ended, by what became of them.", "job_id", "state"),
    _d("statetap_job_tokens_done", "gauge", "Tokens of done rows of a job that has not ended.", "job_id"),
    _d("statetap_job_tokens_per_second", "gauge", "Tokens prefilled a second over the last 30 s, of a job that has not ended.", "job_id"),
    _d("statetap_job_eta_seconds", "gauge", "Seconds left of a running job, by tokens; absent when unknown.", "job_id"),
    _d("statetap_rows_total", "counter", "Rows that got a terminal state.", "state"),
    _d("statetap_rows_reused_total", "counter", "Of the done rows: taken from earlier jobs, not prefilled."),
    _d("statetap_row_errors_total", "counter", "Rows that failed or were skipped, by error code.", "code"),
    _d("statetap_tokens_total", "counter", "Tokens of rows that were done."),
    _d("statetap_committed_bytes_total", "counter", "Bytes of files that were committed."),
    _d("statetap_rows_per_second", "gauge", "Rows done a second over the last 30 s, all jobs."),
    _d("statetap_tokens_per_second", "gauge", "Tokens prefilled a second over the last 30 s, all jobs."),
    _d("statetap_bytes_per_second", "gauge", "Bytes committed a second over the last 30 s, all jobs."),
    _d("statetap_queue_batches", "gauge", "Batches that wait in the queue of a capture profile.", "profile_id"),
    _d("statetap_outstanding_batches", "gauge", "Batches of a capture profile that were given out and not handed back.", "profile_id"),
    _d("statetap_engines", "gauge", "Live engines of a capture profile.", "profile_id"),
    _d("statetap_engines_healthy", "gauge", "Of the live engines: those that answer.", "profile_id"),
    _d("statetap_workers", "gauge", "Live workers of a capture profile.", "profile_id"),
    _d("statetap_store_free_bytes", "gauge", "Bytes of the store that can still be written."),
    _d("statetap_store_kept_free_bytes", "gauge", "Free bytes below which jobs pause as low_disk."),
    _d("statetap_store_reserved_bytes", "gauge", "Bytes that jobs which have not ended still need."),
    _d("statetap_reconciler_tick_seconds", "summary", "Looks of the reconciler that ended well, and the seconds they took."),
    _d("statetap_reconciler_last_tick_age_seconds", "gauge", "Seconds since the last look that ended well."),
    _d("statetap_event_watchers", "gauge", "Open event streams."),
    _d("statetap_http_requests_total", "counter", "Requests by route template.", "route", "method", "status"),
    _d(
        "statetap_http_request_seconds",
        "histogram",
        "Seconds until a request was answered; of an event stream: until it began.",
        "route",
        "method",
    ),
    _d("process_resident_memory_bytes", "gauge", "Resident memory size in bytes."),
    _d("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds."),
    _d("process_open_fds", "gauge", "Number of open file descriptors."),
    _d("process_max_fds", "gauge", "Maximum number of open file descriptors."),
    _d("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes."),
    _d("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds."),
)
"""Everything that is exported; docs/reference/metrics.md is made from it."""

_BY_NAME = {m.name: m for m in METRICS}


@dataclass(kw_only=True)
class _Seen:
    """What a job's counters stood at when it was last looked at."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    ended: bool = False


class Progress:
    """Counters over all jobs, from how far each was at two looks."""

    def __init__(self) -> None:
        self.totals: Counter[tuple[str, str]] = Counter()  # (metric, label)
        self._since = time.time()
        self._jobs: dict[str, _Seen] = {}

    def wanted(self, spec: JobSpec, control: JobControl) -> bool:
        """Whether a job can have gone on since the last look: all that work, and those that ended in this process's time, once."""
        seen = self._jobs.get(spec.job_id)
        return not ended(control) or (not seen.ended if seen else spec.created_at >= self._since)

    def add(self, job: models.Job) -> None:
        now = Counter(
            {("rows", s): getattr(job.rows, s) for s in ("done", "failed", "skipped")}
            | {("code", code): n for code, n in job.errors.items()}
            | {("reused", ""): job.rows.reused, ("tokens", ""): job.tokens.done, ("bytes", ""): job.bytes.committed}
        )
        seen = self._jobs.get(job.job_id)
        if seen is None:
            # What an older job has was done before: it is where counting begins.
            seen = self._jobs[job.job_id] = _Seen(counts=Counter() if job.created_at >= self._since else now)
        self.totals.update(now - seen.counts)  # positive differences only: rows can be opened again
        seen.counts, seen.ended = now, job.state.terminal

    def forget(self, present: set[str]) -> None:
        for job_id in self._jobs.keys() - present:
            del self._jobs[job_id]


@dataclass(kw_only=True)
class _Look:
    """What one scrape saw. None: Redis did not say."""

    states: Counter[str]
    datasets: Counter[str]
    jobs: list[models.Job]  # that have not ended
    free: int = 0
    kept_free: int = 0
    reserved: int = 0
    engines: list[EngineInfo] | None = None
    queued: dict[str, int] = field(default_factory=dict)
    outstanding: dict[str, int] = field(default_factory=dict)


class Metrics:
    """The registry of one coordinator."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        count, seconds = _BY_NAME["statetap_http_requests_total"], _BY_NAME["statetap_http_request_seconds"]
        self._requests = CounterMetric(count.name, count.help, count.labels, registry=self._registry)
        self._seconds = Histogram(seconds.name, seconds.help, seconds.labels, registry=self._registry)
        self._progress = Progress()
        self._lock = anyio.Lock()

    def observe(self, route: str, method: str, status: int, seconds: float) -> None:
        method = method if method in _METHODS else "other"
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route, method).observe(seconds)

    async def scrape(self, ctx: Context) -> bytes:
        """The text. Raises StoreError when the store cannot be looked at."""
        async with self._lock:  # two scrapes at once would count the same progress twice
            look = await self._look(ctx)
            return await anyio.to_thread.run_sync(
                lambda: generate_latest(_Families([*self._registry.collect(), *self._families(ctx, look)]))
            )

    async def _look(self, ctx: Context) -> _Look:
        def store() -> tuple[_Look, list[JobSpec], list[JobSpec]]:
            pairs = []
            for spec in ctx.catalog.jobs():
                with contextlib.suppress(StatetapError):  # one that is being deleted, or that cannot be read, does not hide the others
                    pairs.append((spec, ctx.catalog.control(spec.job_id)))
            self._progress.forget({s.job_id for s, _ in pairs})
            look = _Look(
                states=Counter(c.state for _, c in pairs),
                datasets=Counter((r.state if (r := ctx.catalog.report(i)) else "ingesting") for i in ctx.catalog.dataset_ids()),
                jobs=[],
                free=free_bytes(ctx.catalog.store),
                kept_free=least_free(ctx.catalog.store, ctx.settings.min_free_bytes),
            )
            moved = [s for s, c in pairs if self._progress.wanted(s, c)]
            return look, moved, [s for s, c in pairs if not ended(c)]

        look, moved, working = await anyio.to_thread.run_sync(store)
        profiles = {s.profile_id for s in working}
        try:
            with anyio.fail_after(REDIS_S):
                look.engines = await ctx.engines()
                profiles |= {e.profile_id for e in look.engines}
                async with ctx.redis.pipeline(transaction=False) as pipe:
                    for profile_id in sorted(profiles):
                        pipe.llen(f"rq:queue:{keys.queue(profile_id)}")
                        pipe.hlen(keys.outstanding(profile_id))
                    replies = await pipe.execute()
                look.queued = dict(zip(sorted(profiles), replies[::2], strict=True))
                look.outstanding = dict(zip(sorted(profiles), replies[1::2], strict=True))
        except (redis.RedisError, TimeoutError):
            look.engines = None
        jobs = await ctx.status.tell(moved, without_redis=look.engines is None)
        for job in jobs:
            self._progress.add(job)
        look.jobs = [j for j in jobs if not j.state.terminal]
        look.reserved = sum(max(j.bytes.expected - j.bytes.committed, 0) for j in look.jobs if not j.samples)
        return look

    def _families(self, ctx: Context, look: _Look) -> Iterator[Metric]:
        done = self._progress.totals
        ticks, seconds, at = ctx.reconciler.looked
        yield _gauge("statetap_build_info", [((__version__,), 1)])
        yield _gauge("statetap_redis_up", [((), float(look.engines is not None))])
        yield _gauge("statetap_jobs", [((s.value,), look.states[s.value]) for s in JobState])
        yield _gauge("statetap_datasets", [((s,), look.datasets[s]) for s in ("ingesting", "ready", "failed")])
        yield _gauge(
            "statetap_job_rows",
            [((j.job_id, s), getattr(j.rows, s)) for j in look.jobs for s in ("done", "failed", "skipped", "open")],
        )
        yield _gauge("statetap_job_tokens_done", [((j.job_id,), j.tokens.done) for j in look.jobs])
        yield _gauge("statetap_job_tokens_per_second", [((j.job_id,), j.rates.tokens_per_s) for j in look.jobs])
        yield _gauge("statetap_job_eta_seconds", [((j.job_id,), j.eta_s) for j in look.jobs if j.eta_s is not None])
        yield _counter("statetap_rows_total", [((s,), done["rows", s]) for s in ("done", "failed", "skipped")])
        yield _counter("statetap_rows_reused_total", [((), done["reused", ""])])
        yield _counter("statetap_row_errors_total", [((c,), n) for (kind, c), n in sorted(done.items()) if kind == "code"])
        yield _counter("statetap_tokens_total", [((), done["tokens", ""])])
        yield _counter("statetap_committed_bytes_total", [((), done["bytes", ""])])
        for unit in ("rows", "tokens", "bytes"):
            yield _gauge(f"statetap_{unit}_per_second", [((), sum(getattr(j.rates, f"{unit}_per_s") for j in look.jobs))])
        yield _gauge("statetap_queue_batches", [((p,), n) for p, n in look.queued.items()])
        yield _gauge("statetap_outstanding_batches", [((p,), n) for p, n in look.outstanding.items()])
        live = Counter(e.profile_id for e in look.engines or ())
        healthy = Counter(e.profile_id for e in look.engines or () if e.healthy)
        yield _gauge("statetap_engines", [((p,), n) for p, n in live.items()])
        yield _gauge("statetap_engines_healthy", [((p,), healthy[p]) for p in live])
        yield _gauge("statetap_workers", [((p,), engines.workers_of(look.engines or (), p)) for p in live])
        yield _gauge("statetap_store_free_bytes", [((), look.free)])
        yield _gauge("statetap_store_kept_free_bytes", [((), look.kept_free)])
        yield _gauge("statetap_store_reserved_bytes", [((), look.reserved)])
        described = _BY_NAME["statetap_reconciler_tick_seconds"]
        yield SummaryMetricFamily(described.name, described.help, count_value=ticks, sum_value=seconds)
        yield _gauge("statetap_reconciler_last_tick_age_seconds", [((), time.monotonic() - at)])
        yield _gauge("statetap_event_watchers", [((), ctx.events.watchers)])


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


Samples = list[tuple[tuple[str, ...], float]]


def _gauge(name: str, samples: Samples) -> Metric:
    described = _BY_NAME[name]
    family = GaugeMetricFamily(name, described.help, labels=described.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _counter(name: str, samples: Samples) -> Metric:
    described = _BY_NAME[name]
    family = CounterMetricFamily(name, described.help, labels=described.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


class RequestMetrics:
    """Pure ASGI, around everything else: counts each request once, under its route's template."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        status, stream_s = 500, 0.0

        async def watch(message: Message) -> None:
            nonlocal status, stream_s
            if message["type"] == "http.response.start":
                status = message["status"]
                if any(k == b"content-type" and v.startswith(b"text/event-stream") for k, v in message["headers"]):
                    stream_s = time.monotonic() - started
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            # Nothing of the request itself is a label: a path that no route has is one for all of them.
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.observe(route, scope["method"], status, stream_s or time.monotonic() - started)
