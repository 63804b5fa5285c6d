"""Clients of Redis, with one policy of timeouts and retries.

A connection that broke (a restart of Redis) is made again and the command sent again within a quarter of a second: everything we send
may be sent twice. A Redis that is away is an error at once, because the reconciler looks again anyway.
"""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

RETRIES = 3
_TIMEOUTS: dict[str, Any] = {"socket_timeout": 5.0, "socket_connect_timeout": 2.0}


def _backoff() -> ExponentialBackoff:
    return ExponentialBackoff(cap=0.1, base=0.02)


def connect(url: str, *, decode: bool) -> redis.Redis:
    """A client for threads. ``decode``: replies are str (RQ needs bytes)."""
    retry = Retry(_backoff(), RETRIES, supported_errors=(redis.ConnectionError,))
    return redis.Redis.from_url(url, decode_responses=decode, retry=retry, **_TIMEOUTS)


def connect_async(url: str) -> redis.asyncio.Redis:
    """A client for the event loop; replies are str."""
    retry = redis.asyncio.retry.Retry(_backoff(), RETRIES, supported_errors=(redis.ConnectionError,))
    return redis.asyncio.Redis.from_url(url, decode_responses=True, retry=retry, **_TIMEOUTS)
