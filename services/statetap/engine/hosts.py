"""One engine over several hosts: which node this is, and the link by which the launchers of its nodes know of each other.

Node 0 listens on the port after that of ``--dist-init-addr``; the others join there before they start SGLang. Invariant: no node of an
engine runs on without the others. An end that is said, a connection that closes and a silence of LOST_S all end the link with a reason,
and the launcher ends its part of the engine with it. SGLang itself would go on: an idle engine asks nothing of its other ranks, and a
collective waits for minutes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..contracts.errors import EngineError, ErrorCode

logger = logging.getLogger("statetap.engine")

BEAT_S = 2.0
LOST_S = 20.0  # a host that is gone says nothing; ten beats, so that a stalled network is not taken for one
RETRY_S = 0.5
HELLO_S = 5.0
HELLO_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Where this launcher stands. ``count`` nodes, of which this is ``rank``; ``address`` (host:port) is where node 0's ranks meet."""

    count: int = 1
    rank: int = 0
    address: str = ""

    @property
    def several(self) -> bool:
        return self.count > 1

    @property
    def link(self) -> tuple[str, int]:
        """Host and port of the launchers' link."""
        host, port = _split(self.address)
        return host, port + 1

    def check(self, tp: int) -> None:
        """Raises EngineError ``invalid_request`` that names the argument which does not fit."""
        wrong = ""
        if not 0 <= self.rank < self.count:
            wrong = f"--node-rank {self.rank}: there are {self.count} nodes (--nnodes), counted from 0"
        elif not self.several:
            wrong = f"--dist-init-addr {self.address}: it goes with --nnodes above 1" if self.address else ""
        elif tp % self.count:
            wrong = f"--tp {tp}: it cannot be divided among {self.count} nodes (--nnodes)"
        else:
            try:
                host, port = _split(self.address)
                fits = bool(host) and 0 < port < 65535
            except ValueError:
                fits = False
            if not fits:
                wrong = f"--dist-init-addr {self.address!r}: HOST:PORT of node 0 is needed (the port after it is used too)"
        if wrong:
            raise EngineError(ErrorCode.INVALID_REQUEST, wrong)


ALONE = Nodes()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Why a link ended. ``clean``: the other side was stopped, and said so."""

    reason: str
    clean: bool


class Link:
    """What the launchers of all nodes share: beats on each connection, and the first reason why one of them ended."""

    def __init__(self, *, beat_s: float, lost_s: float) -> None:
        self._beat_s, self._lost_s = beat_s, lost_s
        self._ended: Ended | None = None
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._peers: dict[int, socket.socket] = {}
        self._said: Ended | None = None  # by this node, to those that are there and those that come late

    @property
    def ended(self) -> Ended | None:
        return self._ended

    def wait(self, seconds: float) -> Ended | None:
        """Why the link ended, or None when it has not within ``seconds``."""
        self._is_over.wait(seconds)
        return self._ended

    def close(self, reason: str, *, clean: bool) -> None:
        """Tell the others that this node ends, and why."""
        said = Ended(reason=reason, clean=clean)
        self._end(said)
        with self._lock:
            self._said = self._said or said
        self._tell(said)

    def _tell(self, said: Ended) -> None:
        """Each peer hears it once."""
        with self._lock:
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            with contextlib.suppress(OSError), peer:
                _send(peer, {"end": said.reason, "clean": said.clean})
                peer.shutdown(socket.SHUT_RDWR)

    def _end(self, ended: Ended) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = ended
        self._is_over.set()

    def _hold(self, node: int, peer: socket.socket, lines: BinaryIO) -> None:
        """Beat and listen until the connection ends. For a thread of its own."""
        threading.Thread(target=self._beat, args=(peer,), name=f"statetap-beat-{node}", daemon=True).start()
        with lines:  # the socket stays open: close() has a word to say on it
            self._end(self._listen(node, lines))

    def _beat(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the reader learns of it too, and knows more
            while not self._is_over.wait(self._beat_s):
                _send(peer, {})

    def _listen(self, node: int, lines: BinaryIO) -> Ended:
        try:
            for line in lines:
                message = json.loads(line)
                if "end" in message:
                    return Ended(reason=f"node {node} has ended: {message['end']}", clean=bool(message["clean"]))
        except TimeoutError:
            return Ended(reason=f"nothing was heard of node {node} for {self._lost_s:.0f} s", clean=False)
        except (OSError, ValueError) as e:
            return Ended(reason=f"the connection to node {node} broke: {e}", clean=False)
        return Ended(reason=f"node {node} is gone: its launcher closed the connection without a word", clean=False)


class Head(Link):
    """Node 0's side. ``facts`` must be the same on every node; the others have ``timeout_s`` to join."""

    def __init__(self, nodes: Nodes, facts: dict[str, Any], *, timeout_s: float, beat_s: float = BEAT_S, lost_s: float = LOST_S) -> None:
        """Raises EngineError ``engine_start_failed`` when it cannot listen."""
        super().__init__(beat_s=beat_s, lost_s=lost_s)
        self._nodes, self._facts, self._deadline = nodes, facts, time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        port = nodes.link[1]
        try:
            # On every address, as the store of torch's ranks beside it: the name of this host may not be known yet.
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
        except OSError as e:
            raise EngineError(ErrorCode.ENGINE_START_FAILED, f"node 0 cannot listen on port {port} for the other nodes: {e}") from e
        self._server.settimeout(RETRY_S)
        threading.Thread(target=self._accept, name="statetap-nodes", daemon=True).start()

    def _accept(self) -> None:
        with self._server:
            while not self._is_over.is_set():
                missing = set(range(1, self._nodes.count)) - set(self._peers)
                if not missing:
                    logger.info("all %d nodes have joined", self._nodes.count)
                    return
                if time.monotonic() > self._deadline:
                    who = ", ".join(map(str, sorted(missing)))
                    self._end(Ended(reason=f"node {who} of {self._nodes.count} did not join within {self._timeout_s:.0f} s", clean=False))
                    return
                with contextlib.suppress(TimeoutError):
                    peer, address = self._server.accept()
                    self._greet(peer, str(address[0]))

    def _greet(self, peer: socket.socket, address: str) -> None:
        peer.settimeout(HELLO_S)
        lines = peer.makefile("rb")
        try:
            hello = json.loads(lines.readline(HELLO_BYTES))
            node, facts = int(hello["node"]), dict(hello["facts"])
            if node in self._peers or not 0 < node < self._nodes.count:
                raise ValueError(f"there is no place for a node {node}")
            why = differences(self._facts, facts)
            peer.settimeout(self._lost_s)  # before others may close it
            with self._lock:  # who is told that it has joined is there when this node says its end
                _send(peer, {"refused": why} if why else {"joined": True})
                if not why:
                    self._peers[node] = peer
        except (OSError, ValueError, KeyError, TypeError) as e:
            logger.warning("%s is not let in as a node of this engine: %r", address, e)
            lines.close()
            peer.close()
            return
        if why:
            lines.close()
            peer.close()
            self._end(Ended(reason=f"node {node} was not started as node 0: {why}", clean=False))
            return
        logger.info("node %d has joined from %s", node, address)
        if self._said is not None:
            self._tell(self._said)
        threading.Thread(target=self._hold, args=(node, peer, lines), name=f"statetap-node-{node}", daemon=True).start()


class Member(Link):
    """The side of every other node."""

    def __init__(self, nodes: Nodes, facts: dict[str, Any], *, beat_s: float = BEAT_S, lost_s: float = LOST_S) -> None:
        super().__init__(beat_s=beat_s, lost_s=lost_s)
        self._nodes, self._facts = nodes, facts

    def join(self, timeout_s: float) -> None:
        """Wait for node 0 and join it. Raises EngineError: ``engine_start_failed`` when it does not come, ``invalid_request`` when it refuses."""
        deadline, last = time.monotonic() + timeout_s, "?"
        logger.info("node %d waits for node 0 at %s:%d", self._nodes.rank, *self._nodes.link)
        while time.monotonic() < deadline:
            try:
                self._hello(socket.create_connection(self._nodes.link, timeout=self._lost_s))
            except (OSError, ValueError) as e:  # not there yet, its name not known yet, or it has not noticed that the last one is gone
                last = repr(e)
                time.sleep(RETRY_S)
            else:
                logger.info("node %d has joined node 0", self._nodes.rank)
                return
        host, port = self._nodes.link
        raise EngineError(ErrorCode.ENGINE_START_FAILED, f"node 0 was not found at {host}:{port} within {timeout_s:.0f} s: {last}")

    def _hello(self, peer: socket.socket) -> None:
        lines = peer.makefile("rb")
        try:
            _send(peer, {"node": self._nodes.rank, "facts": self._facts})
            answer = json.loads(lines.readline(HELLO_BYTES))
            if "refused" in answer:
                raise EngineError(ErrorCode.INVALID_REQUEST, f"node 0 refuses this node: {answer['refused']}")
        except BaseException:
            lines.close()
            peer.close()
            raise
        self._peers[0] = peer
        threading.Thread(target=self._hold, args=(0, peer, lines), name="statetap-node-0", daemon=True).start()


def differences(here: dict[str, Any], there: dict[str, Any]) -> str:
    """What two nodes were told differently, in words; empty where nothing was."""
    return "; ".join(
        f"{name} is {there.get(name)!r}, and {here.get(name)!r} on node 0"
        for name in {**here, **there}
        if here.get(name) != there.get(name)
    )


def _send(peer: socket.socket, message: dict[str, Any]) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")
