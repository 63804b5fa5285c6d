"""The page in a real Chromium, over a real coordinator, redis-server and workers; the stub engine stands in SGLang's place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chromium import browser, page
from tests.support.redis import RedisServer, free_port, redis_client, redis_server
from tests.support.service import Service

__all__ = ["browser", "page", "redis_client", "redis_server"]


@pytest.fixture
def service(tmp_path: Path, redis_server: RedisServer) -> Iterator[Service]:
    """On a port of its own, which it keeps over restarts."""
    with Service(tmp_path, redis_server.url, settings={"PORT": str(free_port())}) as made:
        yield made
