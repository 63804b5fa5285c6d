"""Fixtures of the integration tests: a real redis-server, a store folder, a coordinator process.

With xdist a file stays in one process, and those that start SGLang stay together: they look at what is left in /dev/shm.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.support.coordinator import Coordinator, FakeWorker
from tests.support.redis import RedisServer, redis_client, redis_server

__all__ = ["redis_client", "redis_server"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.stem.startswith("test_engine"))  # the longest goes first
    for item in items:
        name = item.path.stem
        item.add_marker(pytest.mark.xdist_group("engine" if name.startswith("test_engine") else name))


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
