"""Redis as it has to be set up: append-only file, no eviction, new enough, near."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from .finding import Finding, failed, fine, warned

TIMEOUT_S = 3.0
PINGS = 50
SLOW_S = 0.02
OLDEST = (6, 2)  # LMOVE


def findings(url: str | None) -> Iterator[Finding]:
    if url is None:
        yield warned("redis", "was not asked directly", "Give it as STATETAP_REDIS_URL; `coordinator ready` tells whether it answers.")
        return
    import redis  # not at the top: most verbs need it not

    try:
        client = redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, decode_responses=True)
    except ValueError as e:
        # Not the URL itself: it can hold a password.
        yield failed("redis", f"the URL is not one of Redis ({type(e).__name__})", "redis://[:password@]host:port/db or unix://path")
        return
    try:
        client.ping()
        yield from _set_up(client)
    except redis.RedisError as e:
        yield failed("redis", f"does not answer ({type(e).__name__})", "Start it, or correct STATETAP_REDIS_URL.")
    finally:
        client.close()


def _set_up(client: object) -> Iterator[Finding]:
    # INFO rather than CONFIG GET: managed services forbid that.
    info: dict[str, object] = client.info()  # type: ignore[attr-defined]
    version = str(info.get("redis_version", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    yield fine("redis", f"version {version}") if numbers >= OLDEST else failed("redis", f"version {version}", "Use Redis 6.2 or newer.")
    if str(info.get("aof_enabled")) == "1":
        yield fine("redis", "append-only file is on")
    else:
        yield failed("redis", "append-only file is off: leases and the queue go with a restart", "Set `appendonly yes`.")
    policy = str(info.get("maxmemory_policy"))
    if policy == "noeviction":
        yield fine("redis", "maxmemory-policy noeviction")
    else:
        yield failed("redis", f"maxmemory-policy {policy}: it may drop what is in the queue", "Set `maxmemory-policy noeviction`.")
    times = []
    for _ in range(PINGS):
        began = time.perf_counter()
        client.ping()  # type: ignore[attr-defined]
        times.append(time.perf_counter() - began)
    median = statistics.median(times)
    text = f"{median * 1000:.2f} ms a round trip"
    yield fine("redis", text) if median < SLOW_S else warned("redis", text, "Workers ask it often: run it nearer.")
