"""A small TCP proxy that can cut connections: the real means by which tests make a network fail."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

BLOCK = 1 << 16


class Proxy:
    """Forwards to ``port`` of this host. ``cut`` closes all connections; ``cut_after`` closes the one over which so many bytes went up."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.connections = 0
        self.cuts = 0
        self.last_up = b""  # the end of what went from client to server
        self._up_left: int | None = None
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)

    def cut_after(self, up: int) -> None:
        """Once: when ``up`` more bytes went from client to server, close that connection there."""
        with self._lock:
            self._up_left = up

    def cut(self) -> None:
        with self._lock:
            doomed, self._open = self._open, set()
        for s in doomed:
            self._shut(s)
        self.cuts += bool(doomed)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            with self._lock:
                self.connections += 1
                self._open |= {client, server}
            for source, sink, up in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._copy, args=(source, sink, up), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _copy(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        try:
            while data := source.recv(BLOCK):
                allowed = self._allowed(len(data)) if up else None
                sink.sendall(data if allowed is None else data[:allowed])
                if up:
                    self.last_up = (self.last_up + data)[-BLOCK:]
                if allowed is not None:
                    self.cuts += 1
                    break
        except OSError:
            pass  # cut on the other side
        with self._lock:
            self._open -= {source, sink}
        for s in (source, sink):
            self._shut(s)

    def _allowed(self, n: int) -> int | None:
        """None, or how many of these bytes still go through before the cut."""
        with self._lock:
            if self._up_left is None:
                return None
            if n < self._up_left:
                self._up_left -= n
                return None
            left, self._up_left = self._up_left, None
            return left

    @staticmethod
    def _shut(s: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it was closed already
            s.shutdown(socket.SHUT_RDWR)
        s.close()
