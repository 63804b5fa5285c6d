"""Which rows of a forward belong to whom, and what becomes of a forward for which there is no room."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from statetap.contracts.capture import lease_of, new_lease, new_rid
from statetap.engine.ring import Ring
from statetap.engine.taps import ForwardPlan, Taps, plan_of
from tests.unit.test_engine_writer import PROFILE, H, Rig

LEASE = new_lease()


def request(rid: str, prompt: int, *, aborted: bool = False, finished: bool = False) -> Any:
    return SimpleNamespace(rid=rid, origin_input_ids=[0] * prompt, to_finish="abort" if aborted else None, finished=lambda: finished)


def plan(*rows: tuple[Any, int, int]) -> ForwardPlan | None:
    """Of (request, rows in this forward, prefix)."""
    batch = SimpleNamespace(extend_seq_lens_cpu=[n for _, n, _ in rows], extend_prefix_lens_cpu=[p for _, _, p in rows])
    return plan_of(batch, [r for r, _, _ in rows], lease_of)


def test_rows_go_by_batch_order_and_positions_by_prefix() -> None:
    a, b, c = (new_rid(LEASE, i) for i in range(3))
    found = plan((request(a, 10), 4, 6), (request("HEALTH_CHECK_1", 1), 1, 0), (request(b, 7), 7, 0), (request(c, 100), 20, 40))
    assert found is not None and found.rows == 32
    assert [(s.rid, s.start, s.position, s.rows, s.total) for s in found.spans] == [
        (a, 0, 6, 4, 10), (b, 5, 0, 7, 7), (c, 12, 40, 20, 100),
    ]  # fmt: skip


def test_decoding_rows_of_a_mixed_forward_are_not_of_the_prompt() -> None:
    decoding, again, new = (new_rid(LEASE, i) for i in range(3))
    found = plan(
        (request(new, 5), 5, 0),
        (request(again, 8), 11, 0),  # after a retraction: its prompt and three generated tokens
        (request(decoding, 8), 1, 8),
    )
    assert found is not None
    assert [(s.rid, s.start, s.position, s.rows) for s in found.spans] == [(new, 0, 0, 5), (again, 5, 0, 8)]


def test_an_aborted_request_still_runs_and_is_not_captured() -> None:
    aborted, finished, good = (new_rid(LEASE, i) for i in range(3))
    found = plan((request(aborted, 1, aborted=True), 1, 0), (request(finished, 4, finished=True), 4, 0), (request(good, 4), 4, 0))
    assert found is not None and [s.rid for s in found.spans] == [good]
    assert plan((request(aborted, 1, aborted=True), 1, 0)) is None
    assert plan((request("someone", 3), 3, 0)) is None


class Layer(torch.nn.Module):
    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return hidden_states + 1


class Stack(torch.nn.Module):
    """Three blocks that each add one, and a norm that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(PROFILE.num_layers))
        self.norm = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(hidden_states=x)
        return self.norm(x)


class Forward:
    """A model with taps over real writers, and a ring of a given size."""

    def __init__(self, tap: Path, ring: int) -> None:
        self.rig = Rig(tap)
        self.rig.ring = Ring(ring)
        self.stack = Stack()
        self.taps = Taps(self.stack, PROFILE, self.rig.writers, self.rig.ring)

    def run(self, *prompts: tuple[str, int]) -> None:
        found = plan(*((request(rid, n), n, 0) for rid, n in prompts))
        assert found is not None
        x = torch.arange(found.rows, dtype=torch.float32)[:, None].expand(-1, H).clone()
        self.taps.begin(found, x.device, x.dtype)
        self.stack(x)
        self.taps.end(torch.arange(found.rows))


def test_a_forward_without_room_fails_its_requests_and_the_next_ones_have_room_again(tmp_path: Path) -> None:
    forward = Forward(tmp_path, 8 << 10)
    rig, (a, b, c, d) = forward.rig, [forward.rig.rid(i) for i in range(4)]
    held = rig.ring.take(4 << 10, 1)  # as by writers that are slow
    assert held is not None
    forward.run((a, 40), (b, 60))
    forward.run((c, 10))
    rig.drain()
    assert rig.said.of(a) == rig.said.of(b) == ["capture_backpressure"] and rig.said.of(c) == ["ok"]
    assert rig.ring.used == held.size
    held.done()
    forward.run((d, 100))
    rig.check_idle({c, d})
    assert forward.taps.tally.forwards == 2


def test_a_forward_larger_than_the_ring_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    forward = Forward(tmp_path, 1 << 10)
    rid = forward.rig.rid()
    forward.run((rid, 200))
    forward.rig.check_idle(set())
    assert forward.rig.said.of(rid) == ["capture_backpressure"]


def test_a_tap_that_did_not_fire_and_a_forward_that_raised_leave_nothing(tmp_path: Path) -> None:
    forward = Forward(tmp_path, 1 << 20)
    missing, raised, good = (forward.rig.rid(i) for i in range(3))
    hook = next(iter(forward.stack.layers[1]._forward_pre_hooks))
    kept = forward.stack.layers[1]._forward_pre_hooks.pop(hook)
    forward.run((missing, 5))
    forward.stack.layers[1]._forward_pre_hooks[hook] = kept

    found = plan((request(raised, 5), 5, 0))
    assert found is not None
    forward.taps.begin(found, torch.device("cpu"), torch.float32)
    forward.taps.abandon()
    forward.run((good, 5))
    forward.rig.check_idle({good})
    assert forward.rig.said.of(missing) == ["capture_incomplete"] and forward.rig.said.of(raised) == []


def test_a_copy_to_the_host_that_fails_fails_the_requests_and_gives_the_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Forward(tmp_path, 1 << 20)
    bad, good = forward.rig.rid(0), forward.rig.rid(1)

    def broken(*args: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(forward.taps, "_to_host", broken)
    forward.run((bad, 5))
    monkeypatch.undo()
    forward.run((good, 5))
    forward.rig.check_idle({good})
    assert forward.rig.said.of(bad) == ["capture_incomplete"]
