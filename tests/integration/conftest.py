"""Fixtures of the integration tests: a real redis-server, a store folder, a coordinator process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.support.coordinator import Coordinator, FakeWorker
from tests.support.redis import RedisServer, redis_client, redis_server

__all__ = ["redis_client", "redis_server"]


@pytest.fixture
def coordinator(tmp_path: Path, redis_server: RedisServer) -> Iterator[Coordinator]:
    """Started, with a data folder at ``<tmp_path>/data``."""
    (tmp_path / "data").mkdir()
    process = Coordinator(tmp_path, redis_server.url, DATA_DIR=str(tmp_path / "data"))
    try:
        yield process.start()
    finally:
        process.close()


@pytest.fixture
def worker(redis_client: redis.Redis, coordinator: Coordinator) -> Iterator[FakeWorker]:
    fake = FakeWorker(redis_client, coordinator.store)
    yield fake
    fake.close()
