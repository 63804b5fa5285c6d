"""Fixtures of the tests against a real S3 service. They need packages of the system: ``make s3`` says which."""

from tests.support.ceph import ceph, cluster
from tests.support.redis import redis_server

__all__ = ["ceph", "cluster", "redis_server"]
