"""The link between the launchers of one engine: no node goes on without the others, and each knows why."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from statetap.contracts.errors import EngineError
from statetap.engine import hosts
from statetap.engine.flags import server_argv
from statetap.engine.hosts import ALONE, Head, Link, Member, Nodes
from tests.support.engine import free_pair

FACTS: dict[str, Any] = {"--tp": 4, "boundaries": "2,16,29"}
FAST = {"beat_s": 0.05, "lost_s": 0.5}


Make = Callable[..., Any]


@pytest.fixture
def made() -> Iterator[Make]:
    """Makes a link (``kind, nodes, facts``) that is closed at the end."""
    links: list[Link] = []

    def make(kind: type[Link], count: int, rank: int, address: str, facts: dict[str, Any] = FACTS, **more: Any) -> Any:
        links.append(kind(Nodes(count=count, rank=rank, address=address), dict(facts), **{**FAST, **more}))  # type: ignore[arg-type]
        return links[-1]

    yield make
    for link in links:
        link.close("the test is over", clean=True)


@contextmanager
def engine(count: int, **times: Any) -> Iterator[tuple[Head, list[Member]]]:
    """The links of an engine of ``count`` nodes, all joined."""
    address = f"127.0.0.1:{free_pair()}"
    zero = Head(Nodes(count=count, address=address), FACTS, timeout_s=10, **{**FAST, **times})
    members = [Member(Nodes(count=count, rank=r, address=address), dict(FACTS), **{**FAST, **times}) for r in range(1, count)]
    try:
        for member in members:
            member.join(10)
        yield zero, members
    finally:
        for link in [zero, *members]:
            link.close("the test is over", clean=True)


def test_an_end_that_is_said_while_a_node_joins_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail with a node that is known to the link after it was told that it has joined: it waited for ``lost_s``."""
    heads: list[Head] = []
    send = hosts._send

    def send_slowly(peer: socket.socket, message: dict[str, Any]) -> None:
        send(peer, message)
        if "joined" in message:
            threading.Thread(target=heads[0].close, args=("it was stopped",), kwargs={"clean": True}).start()
            time.sleep(0.3)  # it has ended within, unless it has to wait for us

    monkeypatch.setattr(hosts, "_send", send_slowly)
    address = f"127.0.0.1:{free_pair()}"
    heads.append(Head(Nodes(count=2, address=address), FACTS, timeout_s=10, beat_s=0.05, lost_s=60))
    member = Member(Nodes(count=2, rank=1, address=address), dict(FACTS), beat_s=0.05, lost_s=60)
    try:
        member.join(10)
        ended = member.wait(5)
        assert ended is not None and ended.clean and ended.reason == "node 0 has ended: it was stopped"
    finally:
        for link in (heads[0], member):
            link.close("the test is over", clean=True)


def test_nodes_that_all_live_stay_joined() -> None:
    """Seen to fail without the beats: silence of ``lost_s`` ended the link."""
    with engine(3) as (head, members):
        assert head.wait(4 * FAST["lost_s"]) is None
        assert [m.ended for m in members] == [None, None]


def test_what_one_node_says_at_its_end_is_what_the_others_tell() -> None:
    """Seen to fail with a link that takes every end for the same (``clean`` not sent)."""
    with engine(3, lost_s=60) as (head, (first, second)):
        second.close("out of memory", clean=False)
        ended = head.wait(5)
        assert ended is not None and not ended.clean and ended.reason == "node 2 has ended: out of memory"
        head.close(ended.reason, clean=False)  # as the launcher does
        ended = first.wait(5)
        assert ended is not None and not ended.clean and ended.reason == "node 0 has ended: node 2 has ended: out of memory"
    with engine(2, lost_s=60) as (head, (member,)):
        head.close("it was stopped", clean=True)
        ended = member.wait(5)
        assert ended is not None and ended.clean and ended.reason == "node 0 has ended: it was stopped"


def test_a_launcher_that_was_killed_is_gone_at_once() -> None:
    """Seen to fail with a reader that waited for the silence and took no end of the stream for an end."""
    with engine(2, lost_s=60) as (head, (member,)):
        member._peers[0].shutdown(socket.SHUT_RDWR)  # what the kernel does for a process that is killed
        ended = head.wait(5)
        assert ended is not None and not ended.clean and "node 1 is gone" in ended.reason


def test_a_host_that_says_nothing_is_lost_within_the_time(made: Make) -> None:
    """A host without power closes no connection. Seen to fail without a timeout on the socket: the test's wait ran out."""
    port = free_pair()
    head = made(Head, 2, 0, f"127.0.0.1:{port}", timeout_s=10)
    with socket.create_connection(("127.0.0.1", port + 1)) as silent:
        silent.sendall(json.dumps({"node": 1, "facts": FACTS}).encode() + b"\n")
        began = time.monotonic()
        ended = head.wait(10)
        assert ended is not None and not ended.clean and "nothing was heard of node 1 for" in ended.reason
        assert FAST["lost_s"] * 0.9 < time.monotonic() - began < 5


def test_nodes_that_were_told_different_things_do_not_begin(made: Make) -> None:
    """Boundaries that differ would be a collective that only some ranks enter. Seen to fail without the comparison: both went on."""
    address = f"127.0.0.1:{free_pair()}"
    head = made(Head, 2, 0, address, timeout_s=10)
    with pytest.raises(EngineError) as e:
        made(Member, 2, 1, address, {**FACTS, "boundaries": "2,16"}).join(10)
    assert "boundaries is '2,16', and '2,16,29' on node 0" in e.value.message
    ended = head.wait(5)
    assert ended is not None and "boundaries" in ended.reason


def test_node_0_waits_so_long_for_the_others_and_they_for_it(made: Make) -> None:
    """Seen to fail without node 0's deadline: it waited for ever."""
    address = f"127.0.0.1:{free_pair()}"
    head = made(Head, 3, 0, address, timeout_s=1)
    made(Member, 3, 1, address).join(10)
    ended = head.wait(5)
    assert ended is not None and ended.reason == "node 2 of 3 did not join within 1 s"
    with pytest.raises(EngineError, match="node 0 was not found at"):
        made(Member, 2, 1, f"127.0.0.1:{free_pair()}").join(0.7)


def test_strangers_and_a_second_node_of_the_same_rank_harm_nobody(made: Make) -> None:
    """Seen to fail when a second node of a rank was let in and took the place of the first."""
    port = free_pair()
    address = f"127.0.0.1:{port}"
    head = made(Head, 3, 0, address, timeout_s=30)
    first = made(Member, 3, 1, address)
    first.join(10)
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"", json.dumps({"node": 7, "facts": FACTS}).encode() + b"\n", b"[]\n"):
        with socket.create_connection(("127.0.0.1", port + 1)) as stranger:
            stranger.sendall(said)
    with pytest.raises(EngineError):
        made(Member, 3, 1, address).join(1)
    assert head.ended is None and first.ended is None
    made(Member, 3, 2, address).join(10)
    assert head.wait(0.5) is None


def test_a_node_that_came_first_waits_for_node_0(made: Make) -> None:
    address = f"127.0.0.1:{free_pair()}"
    member = made(Member, 2, 1, address)
    joining = threading.Thread(target=member.join, args=(20,))
    joining.start()
    time.sleep(0.8)
    made(Head, 2, 0, address, timeout_s=10)
    joining.join(10)
    assert not joining.is_alive() and member.ended is None


def test_the_reason_is_told_to_the_node_that_was_silent(made: Make) -> None:
    """It may live on and come back. Seen to fail when the side that lost the link closed the connection at once."""
    address = f"127.0.0.1:{free_pair()}"
    head = made(Head, 2, 0, address, timeout_s=10)
    member = made(Member, 2, 1, address, beat_s=60.0, lost_s=60.0)
    member.join(10)
    ended = head.wait(5)
    assert ended is not None and "nothing was heard of node 1" in ended.reason
    head.close(ended.reason, clean=False)
    told = member.wait(5)
    assert told is not None and told.reason == f"node 0 has ended: {ended.reason}"


@pytest.mark.parametrize(
    ("nodes", "tp", "words"),
    [
        (Nodes(count=0), 1, "--node-rank 0"),
        (Nodes(count=2, rank=2, address="a:1"), 2, "--node-rank 2: there are 2 nodes"),
        (Nodes(count=2, rank=-1, address="a:1"), 2, "--node-rank -1"),
        (Nodes(rank=1), 1, "--node-rank 1: there are 1 nodes"),
        (Nodes(address="a:1"), 1, "--dist-init-addr a:1: it goes with --nnodes above 1"),
        (Nodes(count=2, address="a:1"), 3, "--tp 3: it cannot be divided among 2 nodes"),
        (Nodes(count=2), 2, "--dist-init-addr '': HOST:PORT of node 0 is needed"),
        (Nodes(count=2, address="a"), 2, "--dist-init-addr 'a'"),
        (Nodes(count=2, address=":25000"), 2, "--dist-init-addr ':25000'"),
        (Nodes(count=2, address="a:65535"), 2, "the port after it is used too"),
    ],
)
def test_arguments_that_do_not_fit_are_named(nodes: Nodes, tp: int, words: str) -> None:
    with pytest.raises(EngineError) as e:
        nodes.check(tp)
    assert e.value.code == "invalid_request" and words in e.value.message


def test_sglang_is_told_of_its_nodes_and_of_one_host_nothing() -> None:
    def argv(nodes: Nodes) -> list[str]:
        return server_argv(model="m", host="h", port=1, tp=4, trust_remote_code=False, cpu=False, extra=(), nodes=nodes)

    nodes = Nodes(count=2, rank=1, address="[fd00::1]:25000")
    nodes.check(4)
    assert nodes.link == ("fd00::1", 25001)
    at = argv(nodes).index("--nnodes")
    assert argv(nodes)[at : at + 6] == ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "[fd00::1]:25000"]
    assert not {"--nnodes", "--node-rank", "--dist-init-addr"} & set(argv(ALONE))
