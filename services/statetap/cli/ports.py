"""A port for a process that binds it much later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 10_240
TRIES = 200


def lasting_free_port(ephemeral: Path = RANGE) -> int:
    """A port of loopback that is free, and that no outgoing connection will take meanwhile: below those that the kernel gives out itself.

    SGLang takes only a number, and binds it when the model is loaded.
    """
    try:
        first = int(ephemeral.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = LOWEST
    for _ in range(TRIES if first > LOWEST else 0):
        with socket.socket() as s:
            try:
                # By chance, so that two stacks that start at once take different ones.
                s.bind(("127.0.0.1", random.randrange(LOWEST, first)))
            except OSError:
                continue
            return int(s.getsockname()[1])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
