"""Fixtures that tests of the chart share."""

from tests.support.redis import redis_server

__all__ = ["redis_server"]
