"""The HTTP process: a reply says ok when the file has its name, and whoever gets no such reply leaves no file."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from statetap.contracts.capture import LEASE_DEAD_AFTER_S, LEASE_FILE, new_lease, new_rid
from statetap.engine import channel, replies
from statetap.engine.channel import Outcomes, Sender
from statetap.engine.metrics import METRICS, Tally, render, total
from statetap.engine.settings import EngineSettings
from statetap.engine.sweep import sweep

OK = {"status": "ok", "path": "p", "rows": 3}


class Client:
    gone = False

    async def is_disconnected(self) -> bool:
        return self.gone


KEPT: list[Outcomes] = []  # their threads live as long as this process


class Process:
    """SGLang's HTTP process as far as replies see it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, deadline_s: float) -> None:
        self.aborted: list[str] = []
        name = f"statetap-test-{secrets.token_hex(4)}"
        self.outcomes, self.sender = Outcomes(name), Sender(name)
        KEPT.append(self.outcomes)
        monkeypatch.setattr(replies, "OUTCOMES", self.outcomes)
        monkeypatch.setattr(replies, "_abort", lambda manager, rid: self.aborted.append(rid))
        monkeypatch.setattr(replies, "current", lambda: EngineSettings(deadline_s=deadline_s))
        monkeypatch.setattr(replies, "DISCONNECT_POLL_S", 0.02)
        replies.RESULTS.clear()

    def ask(self, rid: str, client: Any = None, reason: Any = "length", fails: Exception | None = None) -> Any:
        async def inner() -> AsyncIterator[dict[str, Any]]:
            if fails is not None:
                raise fails
            yield {"meta_info": {"finish_reason": {"type": reason}}}

        return replies.around_wait(lambda *args: inner(), None, SimpleNamespace(rid=rid), client or Client())

    def close(self) -> None:
        if self.sender._socket is not None:
            self.sender._socket.close()

    def settled(self) -> dict[str, int]:
        assert self.outcomes.waiting == 0
        return dict(replies.RESULTS)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    process = Process(monkeypatch, 30)
    yield process
    process.close()


def rid() -> str:
    return new_rid(new_lease(), 1)


async def reply_of(generator: Any) -> dict[str, Any]:
    """As the HTTP server does it: one item, and the generator is dropped."""
    out = await generator.__anext__()
    await generator.aclose()
    return out["meta_info"].get("capture")


async def test_a_reply_waits_for_the_file_and_dropping_its_generator_is_no_abort(process: Process) -> None:
    name = rid()
    task = asyncio.create_task(reply_of(process.ask(name)))
    await asyncio.sleep(0.05)
    assert not task.done() and process.outcomes.waiting == 1
    process.sender.send({"rid": name, **OK})
    reply = await task
    assert reply["status"] == "ok" and reply["rows"] == 3 and reply["held_s"] > 0
    gc.collect()
    assert process.settled() == {"ok": 1} and process.aborted == []


async def test_an_outcome_that_is_there_first_is_not_lost(process: Process) -> None:
    name = rid()
    process.sender.send({"rid": name, **OK})
    for _ in range(100):
        if name in process.outcomes._unclaimed:
            break
        await asyncio.sleep(0.01)
    assert (await reply_of(process.ask(name)))["status"] == "ok"
    assert not process.outcomes._unclaimed


async def test_an_error_an_abort_and_a_passed_deadline_are_said_and_the_file_is_asked_away(monkeypatch: pytest.MonkeyPatch) -> None:
    process, failed, aborted, late = Process(monkeypatch, 0.1), rid(), rid(), rid()
    process.sender.send({"rid": failed, "status": "error", "code": "tap_full", "message": "no space"})
    assert (await reply_of(process.ask(failed)))["code"] == "tap_full"
    assert "aborted" in (await reply_of(process.ask(aborted, reason="abort")))["message"]
    assert "not there in time" in (await reply_of(process.ask(late)))["message"]
    assert process.aborted == [failed, aborted, late]
    assert process.settled() == {"tap_full": 1, "capture_incomplete": 2}
    process.close()


@pytest.mark.parametrize("when", ["while it waits", "when the file is there"])
async def test_a_client_that_is_gone_leaves_no_file(process: Process, when: str) -> None:
    name, client = rid(), Client()
    client.gone = True
    if when == "when the file is there":
        process.sender.send({"rid": name, **OK})
    with pytest.raises(ValueError, match="the client is gone"):
        await reply_of(process.ask(name, client))
    assert process.aborted == [name] and process.settled() == {"gone": 1}


async def test_what_sglang_refuses_or_cancels_leaves_no_file(process: Process) -> None:
    refused, cancelled = rid(), rid()
    with pytest.raises(ValueError, match="too long"):
        await reply_of(process.ask(refused, fails=ValueError("too long")))
    task = asyncio.create_task(reply_of(process.ask(cancelled)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gc.collect()
    await asyncio.sleep(0)
    assert process.aborted == [refused, cancelled] and process.settled() == {"gone": 2}


async def test_others_are_let_through_untouched(process: Process) -> None:
    assert await reply_of(process.ask("HEALTH_CHECK_1")) is None
    assert process.settled() == {} and process.aborted == []


def test_outcomes_that_nobody_claims_are_bounded(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "UNCLAIMED_KEPT", 10)
    for i in range(50):
        process.sender.send({"rid": f"r{i}", **OK})
    process.sender.send({"fact": "end", "value": 1})
    assert process.outcomes.wait_fact("end", 10) == 1 and process.outcomes.fact("nothing") is None
    assert list(process.outcomes._unclaimed) == [f"r{i}" for i in range(40, 50)]


def test_a_sender_whose_connection_broke_makes_a_new_one(process: Process) -> None:
    process.sender.send({"fact": "a", "value": 1})
    assert process.sender._socket is not None
    process.sender._socket.close()
    process.sender.send({"fact": "b", "value": 2})
    assert process.outcomes.wait_fact("b", 10) == 2


def test_metrics_are_prometheus_text_and_each_is_described() -> None:
    first, second = Tally(captured_tokens=3, copy_seconds=0.5), Tally(captured_tokens=4)
    first.errors["tap_full"] += 2
    second.errors["tap_full"] += 1
    second.errors["capture_backpressure"] += 1
    values = total([first, second])
    assert set(vars(Tally())) <= set(METRICS) and {*values, *replies.metrics(), "open_files", "ring_used_bytes", "ring_limit_bytes"} == set(
        METRICS
    )
    text = render(values)
    assert "statetap_engine_captured_tokens_total 7\n" in text and "statetap_engine_copy_seconds_total 0.5\n" in text
    assert 'statetap_engine_errors_total{code="capture_backpressure"} 1\nstatetap_engine_errors_total{code="tap_full"} 3\n' in text


def test_only_leases_that_are_dead_are_swept(tmp_path: Path) -> None:
    now = time.time()
    dead, live, bare, young = (tmp_path / new_lease() for _ in range(4))
    for folder, age in ((dead, LEASE_DEAD_AFTER_S + 1), (live, LEASE_DEAD_AFTER_S - 1), (bare, LEASE_DEAD_AFTER_S + 1), (young, 0)):
        folder.mkdir()
        (folder / "st.safetensors.tmp").write_text("x")
        if folder in (dead, live):
            (folder / LEASE_FILE).write_text("{}")
            os.utime(folder / LEASE_FILE, (now - age, now - age))
        else:  # without a lease file its own age counts
            os.utime(folder, (now - age, now - age))
    other = tmp_path / "not-a-lease"
    other.mkdir()
    os.utime(other, (0, 0))
    (tmp_path / "READY.json").write_text("{}")
    assert set(sweep(tmp_path, now)) == {dead.name, bare.name}
    assert {p.name for p in tmp_path.iterdir()} == {live.name, young.name, other.name, "READY.json"}
