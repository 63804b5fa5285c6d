"""A rig a test: real redis-server, real worker processes, a stub engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.redis import RedisServer, redis_client, redis_server
from tests.support.workers import Rig

__all__ = ["redis_client", "redis_server"]


@pytest.fixture
def rig(tmp_path: Path, redis_server: RedisServer) -> Iterator[Rig]:
    with Rig(tmp_path / "rig", redis_server.url, drain_s=10, engine_down_after_s=1.5) as made:
        yield made
