"""The horse's answer to SIGTERM: send nothing more, finish and commit what is in flight, hand back the rest.

Invariant: a SIGTERM is never lost, whether it comes before, while or after the event loop runs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

_requested = False
_listener: Callable[[], None] | None = None


def request(*_: object) -> None:
    """The signal handler (Python calls it in the main thread)."""
    global _requested
    _requested = True
    if _listener is not None:
        _listener()


def requested() -> bool:
    return _requested


def listen(callback: Callable[[], None] | None) -> None:
    """Call ``callback`` on a request, at once where there was one; None ends it. It has to be safe at any point of the main thread."""
    global _listener
    _listener = callback
    if callback is not None and _requested:
        callback()


def install() -> None:
    """In the horse, before the task. Ctrl-C reaches the parent, which sends SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, request)
