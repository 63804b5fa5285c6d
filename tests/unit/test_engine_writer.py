"""The writers: a file is whole or absent, every region of the ring comes back, and nothing ends a thread."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from statetap.contracts.capture import new_lease, new_rid
from statetap.contracts.errors import ErrorCode
from statetap.contracts.profile import CaptureProfile, NormSpec
from statetap.contracts.tensors import AUX, FINAL_PRE, INPUT_IDS, tap_header
from statetap.engine import writer
from statetap.engine.metrics import total
from statetap.engine.ring import Ring
from statetap.engine.writer import Rows, Writers

H, K = 4, 2
PROFILE = CaptureProfile(
    model="m", revision="r", quantization="none", boundaries=(1, 0), final="pre", dtype="F32", hidden=H, num_layers=3, vocab_size=1000,
    max_length=512, norm=NormSpec(variant="rmsnorm", eps=1e-6),
)  # fmt: skip


class Said:
    """Stands for the way to the HTTP process: keeps what was sent."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    def of(self, rid: str) -> list[str]:
        return [m.get("code") or m["status"] for m in self.messages if m["rid"] == rid]


class Rig:
    def __init__(self, tap: Path, threads: int = 2) -> None:
        self.tap, self.said, self.ring, self.sent = tap, Said(), Ring(1 << 20), []
        self.lease = new_lease()
        (tap / self.lease).mkdir()
        self.writers = Writers(tap, PROFILE, self.said, threads=threads)  # type: ignore[arg-type]
        self.threads = self.writers._threads

    def rid(self, row: int = 0) -> str:
        return new_rid(self.lease, row)

    def put(self, rid: str, ids: list[int], start: int, stop: int, ready: object = None, total: int | None = None) -> None:
        planes = {k: v[start:stop] for k, v in states(ids).items()}
        region = self.ring.take(sum(t.nbytes for t in planes.values()), 1)
        assert region is not None
        self.writers.put(Rows(rid=rid, total=total or len(ids), position=start, planes=planes, region=region, ready=ready))

    def drain(self) -> None:
        """Until every thread did all that it was given (twice: drop_all gives them more)."""
        for _ in range(2):
            for thread in self.threads:
                done = threading.Event()
                thread._do_mark = lambda event: event.set()  # type: ignore[attr-defined]
                thread.jobs.put(("mark", done))
                assert done.wait(20), "a writer thread died"

    def files(self) -> list[str]:
        return sorted(p.name for p in (self.tap / self.lease).iterdir())

    def check_idle(self, finals: set[str] | None = None) -> None:
        self.drain()
        assert self.ring.used == 0
        assert self.writers.open_files == 0
        if finals is not None:
            assert self.files() == sorted(f"{rid}.safetensors" for rid in finals)

    def check_whole(self, rid: str, ids: list[int]) -> None:
        path = self.tap / self.lease / f"{rid}.safetensors"
        assert path.stat().st_size == tap_header(PROFILE, len(ids)).size
        have = load_file(path)
        for name, wanted in states(ids).items():
            assert torch.equal(have[name], wanted), name


def states(ids: list[int]) -> dict[str, torch.Tensor]:
    """Rows that tell their prompt and position: no two prompts and no two positions have equal ones."""
    key = torch.tensor([[hash(tuple(ids)) % 9973 + 1, i, t, 1] for i, t in enumerate(ids)], dtype=torch.float32)
    return {AUX: torch.cat([key, -key], 1), FINAL_PRE: key + 0.5, INPUT_IDS: torch.tensor(ids, dtype=torch.int32)}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    yield Rig(tmp_path)


IDS = list(range(10, 60))


def test_chunks_make_one_whole_file_and_what_is_counted_is_what_was_sent(rig: Rig) -> None:
    rids = [rig.rid(i) for i in range(20)]
    prompts = {rid: [i, *IDS] for i, rid in enumerate(rids)}
    for start, stop in ((0, 20), (20, 40), (40, 51)):
        for rid in rids:
            rig.put(rid, prompts[rid], start, stop)
    rig.check_idle(set(rids))
    for rid in rids:
        rig.check_whole(rid, prompts[rid])
        assert rig.said.of(rid) == ["ok"]
    counted = total(rig.writers.tallies)
    size = tap_header(PROFILE, 51).size
    assert (counted["captured_requests"], counted["captured_tokens"]) == (20, 20 * 51)
    assert counted["captured_bytes"] == counted["written_bytes"] == 20 * size
    assert counted["write_seconds"] > 0 and not counted["errors"]


def test_one_file_descriptor_and_no_part_are_left_by_any_end(rig: Rig) -> None:
    before = len(os.listdir("/proc/self/fd"))
    hole, failed, dropped, all_dropped = (rig.rid(i) for i in range(4))
    rig.put(hole, IDS, 30, 50)  # a prefix cache had [0, 30)
    rig.put(failed, IDS, 0, 20)
    rig.writers.fail(failed, ErrorCode.CAPTURE_BACKPRESSURE, "full")
    rig.put(failed, IDS, 20, 50)  # the rest of the prompt runs all the same
    rig.put(dropped, IDS, 0, 20)
    rig.writers.drop(dropped)
    rig.put(dropped, IDS, 20, 50)
    rig.put(all_dropped, IDS, 0, 20)
    rig.writers.drop_all()
    rig.drain()
    rig.put(all_dropped, IDS, 20, 50)
    rig.check_idle(set())
    assert rig.said.of(hole) == ["capture_incomplete"]
    assert rig.said.of(failed) == ["capture_backpressure"]
    assert rig.said.of(dropped) == rig.said.of(all_dropped) == ["capture_incomplete"]
    assert len(os.listdir("/proc/self/fd")) == before
    counted = total(rig.writers.tallies)
    assert counted["errors"] == {"capture_incomplete": 1, "capture_backpressure": 1} and counted["aborted_requests"] == 2


def test_rows_that_come_after_the_end_make_no_file(rig: Rig) -> None:
    never, whole = rig.rid(0), rig.rid(1)
    rig.writers.drop(never)  # aborted while it waited
    rig.put(never, IDS, 0, 50)
    rig.put(whole, IDS, 0, 50)
    rig.drain()
    (rig.tap / rig.lease / f"{whole}.safetensors").unlink()  # as a worker does
    rig.put(whole, IDS, 0, 50)  # used again
    rig.check_idle(set())
    assert rig.said.of(never) == ["capture_incomplete"]
    assert rig.said.of(whole) == ["ok", "capture_incomplete"]


def test_an_abort_after_the_file_was_whole_removes_it(rig: Rig) -> None:
    rid = rig.rid()
    rig.put(rid, IDS, 0, 50)
    rig.writers.drop(rid)
    rig.check_idle(set())


def test_a_prompt_that_changes_its_length_fails(rig: Rig) -> None:
    rid = rig.rid()
    rig.put(rid, IDS, 0, 20)
    rig.put(rid, IDS, 20, 40, total=40)
    rig.check_idle(set())
    assert rig.said.of(rid) == ["capture_incomplete"]


def test_a_copy_from_the_gpu_that_fails_fails_its_request_only(rig: Rig) -> None:
    class Broken:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error")

    bad, good = rig.rid(0), rig.rid(1)
    rig.put(bad, IDS, 0, 50, ready=Broken())
    rig.put(good, IDS, 0, 50)
    rig.check_idle({good})
    assert rig.said.of(bad) == ["capture_incomplete"]


@pytest.mark.parametrize("kind", ["gone", "file", "readonly"])
def test_a_lease_folder_that_is_not_one_any_more_ends_no_thread(rig: Rig, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = rig.tap / new_lease()
    if kind == "file":
        other.write_text("")  # ENOTDIR when opening, and again when removing
    elif kind == "readonly":
        other.mkdir()
        remove = Path.unlink

        def refuse(path: Path, missing_ok: bool = False) -> None:
            if path.parent == other:
                raise PermissionError(errno.EACCES, "read-only")
            remove(path, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "unlink", refuse)
    bad = [new_rid(other.name, i) for i in range(8)]  # both threads have some
    for rid in bad:
        rig.put(rid, IDS, 0, 20)
        rig.writers.fail(rid, ErrorCode.CAPTURE_BACKPRESSURE, "full")
        rig.writers.drop(rid)
        rig.put(rid, IDS, 20, 50)
    good = [rig.rid(i) for i in range(8)]
    for rid in good:
        rig.put(rid, IDS, 0, 50)
    rig.check_idle(set(good))
    assert all(rig.said.of(rid) for rid in bad)


@pytest.mark.parametrize(
    ("error", "code"), [("ENOSPC", "tap_full"), ("EDQUOT", "tap_full"), ("ENOMEM", "tap_full"), ("EIO", "capture_incomplete")]
)
@pytest.mark.parametrize("fails_at", [0, 1, 2, 3])
def test_a_full_tap_fails_the_request_leaves_nothing_and_passes(
    rig: Rig, error: str, code: str, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever write it is: the header, a plane, the ids."""
    rid, real, calls = rig.rid(), os.pwrite, []

    def short_then_full(fd: int, data: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == fails_at + 1:
            return real(fd, data[: len(data) // 2], offset)  # the last free pages
        if len(calls) > fails_at + 1:
            raise OSError(getattr(errno, error), os.strerror(getattr(errno, error)))
        return real(fd, data, offset)

    monkeypatch.setattr(writer.os, "pwrite", short_then_full)
    rig.put(rid, IDS, 0, 50)
    rig.check_idle(set())
    assert rig.said.of(rid) == [code]
    monkeypatch.undo()
    again = rig.rid(1)
    rig.put(again, IDS, 0, 50)
    rig.check_idle({again})
    rig.check_whole(again, IDS)


def test_what_is_remembered_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CLOSED_KEPT", 10)
    for i in range(200):
        rid = rig.rid(i)
        [lambda r: rig.put(r, IDS, 0, 50), rig.writers.drop, lambda r: rig.writers.fail(r, ErrorCode.TAP_FULL, "")][i % 3](rid)
    rig.drain()
    assert all(len(t._closed) <= 10 for t in rig.threads)
    rig.check_idle()


Step = tuple[str, int]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30))
def test_any_order_of_rows_failures_and_aborts_gives_whole_files_or_none(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Chunks of many prompts interleaved, rewritten from the start (retraction), some failed, dropped or with a hole."""
    rnd = random.Random(seed)
    rig = Rig(tmp_path_factory.mktemp("tap"))
    prompts = {rig.rid(i): [rnd.randrange(1000) for _ in range(rnd.randint(1, 60))] for i in range(rnd.randint(1, 12))}
    at = dict.fromkeys(prompts, 0)
    clean, holes, over = set(prompts), set(), set()
    actions: list[Callable[[str], None]] = []

    def chunk(rid: str) -> None:
        stop = min(len(prompts[rid]), at[rid] + rnd.randint(1, 20))
        rig.put(rid, prompts[rid], at[rid], stop)
        at[rid] = stop
        if stop == len(prompts[rid]):
            over.add(rid)

    def again(rid: str) -> None:
        at[rid] = 0
        holes.discard(rid)

    def skip(rid: str) -> None:
        if at[rid] < len(prompts[rid]) - 1 and rid not in over:
            at[rid] += 1
            holes.add(rid)

    def fail(rid: str) -> None:
        rig.writers.fail(rid, ErrorCode.CAPTURE_BACKPRESSURE, "")
        clean.discard(rid)

    def drop(rid: str) -> None:
        rig.writers.drop(rid)
        clean.discard(rid)

    actions = [chunk] * 12 + [again, skip, fail, drop]
    while open_ := [r for r in prompts if r not in over]:
        rid = rnd.choice(open_)
        rnd.choice(actions)(rid)
    rig.drain()
    for rid, ids in prompts.items():
        exists = (rig.tap / rig.lease / f"{rid}.safetensors").exists()
        if rid in clean and rid not in holes:
            assert exists
        if exists:
            rig.check_whole(rid, ids)
    rig.check_idle()
    assert all(name.endswith(".safetensors") for name in rig.files())
