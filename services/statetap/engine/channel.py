"""How the writer (in the scheduler's process) tells the HTTP process what became of a request: a stream of JSON lines over an
abstract Unix socket, so that a reply waits for a message and not for a polling interval.

Invariant: a message is sent after the file that it speaks of has its final name. A message can be lost only with the process
that sent it; the reply's deadline covers that.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections import OrderedDict
from typing import Any

logger = logging.getLogger(__name__)

UNCLAIMED_KEPT = 4096  # outcomes that nobody waits for (aborted, disconnected): bounded, oldest go first


class Sender:
    """Scheduler side. Thread-safe; reconnects; a message that cannot be sent is logged and dropped (the deadline covers it)."""

    def __init__(self, name: str) -> None:
        self._address = "\0" + name
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            for attempt in range(3):
                try:
                    if self._socket is None:
                        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                        self._socket.connect(self._address)
                    self._socket.sendall(data)
                    return
                except OSError as e:
                    logger.warning("statetap: message to the HTTP process not sent (try %d): %s", attempt + 1, e)
                    if self._socket is not None:
                        self._socket.close()
                    self._socket = None
                    time.sleep(0.05 * attempt)


class Outcomes:
    """HTTP side: rid -> outcome, filled by a reader thread, awaited in the event loop."""

    def __init__(self, name: str) -> None:
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind("\0" + name)
        self._server.listen(64)
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[dict[str, Any]]]] = {}
        self._unclaimed: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._facts: dict[str, Any] = {}
        self._news = threading.Condition(self._lock)
        threading.Thread(target=self._accept, name="statetap-outcomes", daemon=True).start()

    def expect(self, rid: str) -> asyncio.Future[dict[str, Any]]:
        """A future of this rid's outcome, in the running loop. Call :meth:`forget` when it is no longer wanted."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[dict[str, Any]] = loop.create_future()
        with self._lock:
            early = self._unclaimed.pop(rid, None)
            if early is None:
                self._waiting[rid] = (loop, future)
        if early is not None:
            future.set_result(early)
        return future

    def forget(self, rid: str) -> None:
        with self._lock:
            self._waiting.pop(rid, None)

    def wait_fact(self, name: str, timeout: float) -> Any:
        """A fact that the scheduler told (``{"fact": name, "value": …}``), or None when it did not come in time."""
        with self._news:
            self._news.wait_for(lambda: name in self._facts, timeout)
            return self._facts.get(name)

    def fact(self, name: str) -> Any:
        """A fact as it was told last, or None."""
        with self._lock:
            return self._facts.get(name)

    @property
    def waiting(self) -> int:
        """Requests whose outcome is expected."""
        with self._lock:
            return len(self._waiting)

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=self._read, args=(connection,), name="statetap-outcomes-reader", daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if "fact" in message:
                    with self._news:
                        self._facts[message["fact"]] = message["value"]
                        self._news.notify_all()
                else:
                    self._settle(message.pop("rid"), message)

    def _settle(self, rid: str, outcome: dict[str, Any]) -> None:
        with self._lock:
            waiting = self._waiting.pop(rid, None)
            if waiting is None:
                self._unclaimed[rid] = outcome
                if len(self._unclaimed) > UNCLAIMED_KEPT:
                    self._unclaimed.popitem(last=False)
                return
        loop, future = waiting
        loop.call_soon_threadsafe(_set, future, outcome)


def _set(future: asyncio.Future[dict[str, Any]], outcome: dict[str, Any]) -> None:
    if not future.done():  # its reply may be gone
        future.set_result(outcome)
