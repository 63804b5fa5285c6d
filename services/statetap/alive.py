"""``python -m statetap.alive``: exit code 0 where an RQ worker of this host is registered in Redis: the health check of the containers of
workers and of ingestion, which listen on no port.

RQ's record of a worker goes some minutes after its last sign of life, and at once when it stops.
"""

from __future__ import annotations

import os
import socket
import sys

import redis
from rq import Worker

DEFAULT_REDIS = "redis://127.0.0.1:6379/0"


def main() -> int:
    """1, and a sentence, where there is none or Redis does not answer."""
    connection = redis.Redis.from_url(os.environ.get("STATETAP_REDIS_URL") or DEFAULT_REDIS, socket_connect_timeout=3.0, socket_timeout=3.0)
    host = socket.gethostname()
    try:
        workers = Worker.all(connection=connection)
    except redis.RedisError as e:
        print(f"redis_unavailable: {type(e).__name__}", file=sys.stderr)
        return 1
    if any(w.hostname == host for w in workers):
        return 0
    print(f"no worker of {host} is registered", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
