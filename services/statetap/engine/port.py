"""Whether the engine's port can be had: SGLang binds it only when the model is loaded, which may take an hour."""

from __future__ import annotations

import errno
import socket
import time

from ..contracts.errors import EngineError, ErrorCode

PATIENCE_S = 10.0  # an engine that was killed a moment ago may hold it still


def is_taken(host: str, port: int) -> bool:
    """As the HTTP server of SGLang binds it. False too where the address is not of this host: the server says that better."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
            s.listen()
        except OSError as e:
            return e.errno == errno.EADDRINUSE
    return False


def check_port(host: str, port: int, patience_s: float = PATIENCE_S) -> None:
    """Raises EngineError ``engine_start_failed`` when another process has the port, and keeps it."""
    deadline = time.monotonic() + patience_s
    while is_taken(host, port):
        if time.monotonic() > deadline:
            message = f"port {port} of {host} is taken"
            raise EngineError(ErrorCode.ENGINE_START_FAILED, message, next_step="End what listens there, or give another --port.")
        time.sleep(0.2)
