"""Beyond its budgets the engine fails requests with their code and goes on: a small ring under slow writers, a small tap, writers that
stand still, and a prefix cache that nobody asked for.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from statetap.engine.tiny import make_tiny
from tests.support.engine import Engine, start_engine, wait_ready
from tests.support.engine_load import Ids, Load, References, load, prompts

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(240)]

SITE = Path(__file__).parent / "broken_site"
CHUNK, TAP_MIB, DEADLINE_S = 64, 8, 4
RING_BYTES = 176_000  # of at least 2 forwards of 64 tokens of 1,280 bytes


def site(what: str) -> dict[str, str]:
    return {"STATETAP_TEST_SITE": what, "PYTHONPATH": os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def tap() -> Iterator[Path]:
    """A tmpfs of its own of 8 MiB, where this user may mount one."""
    folder = Path(tempfile.mkdtemp(prefix="statetap-test-", dir="/dev/shm"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={TAP_MIB}m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    yield folder
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file: while it is there, each write takes as long as it says."""
    return tmp_path_factory.mktemp("slow") / "seconds"


@pytest.fixture(scope="module")
def engine(model: Path, tap: Path, slow: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    env = {
        **site("slow_writer,prefix_cache"),
        "STATETAP_TEST_SLOW": str(slow),
        "STATETAP_ENGINE_RING_BYTES": str(RING_BYTES),
        "STATETAP_ENGINE_DEADLINE_S": str(DEADLINE_S),
    }
    args = ("--boundaries", "0,3,6", "--final", "both", "--grace", "0.2")
    engine = start_engine(
        model, tap, tmp_path_factory.mktemp("engine") / "log", *args, sglang=("--chunked-prefill-size", str(CHUNK)), env=env
    )
    yield wait_ready(engine)
    engine.stop()


@pytest.fixture(autouse=True)
def full_speed(slow: Path) -> Iterator[None]:
    yield
    slow.unlink(missing_ok=True)


class Fresh:
    """Prompts of which no two have a beginning in common: the prefix cache of this engine knows none of them."""

    used = 4

    def __call__(self, count: int, length: int) -> list[Ids]:
        first = Fresh.used + 1
        Fresh.used += count
        return [(first + i, *ids) for i, ids in enumerate(prompts(first, [length - 1] * count))]


fresh = Fresh()


async def goes_on(on: Load, references: References) -> None:
    """Nothing is held and nothing is partial; a request now is captured, and rightly."""
    await on.idle()
    assert all(name.endswith(".safetensors") for name in on.files())
    (ids,) = fresh(1, 200)
    for _ in range(5):  # one after the other: each fits
        sent = await on.capture(ids)
        if sent.ok:
            break
        (ids,) = fresh(1, 200)
    assert sent.ok, sent
    on.path(sent).unlink()


@pytest.mark.parametrize("at_once", [32, 64])
async def test_a_full_ring_is_capture_backpressure_of_some_and_the_engine_never_stalls(engine: Engine, slow: Path, at_once: int) -> None:
    async with load(engine) as on:
        before = await on.idle()
        slow.write_text("0.03")
        tasks = [asyncio.create_task(on.capture(ids)) for ids in fresh(at_once, 180)]
        await on.healthy()  # in time, while the writers are far behind
        assert (await on.plain(fresh(1, 40)[0])).status == 200
        sent = await asyncio.gather(*tasks)
        slow.unlink()
        codes = Counter(s.capture.get("code", "ok") for s in sent)
        assert set(codes) <= {"ok", "capture_backpressure", "capture_incomplete"} and codes["capture_backpressure"] > at_once // 4, codes
        after = await on.idle()
        assert on.files() == {on.path(s).name for s in sent if s.ok}
        code = "statetap_engine_errors_total{capture_backpressure}"
        assert after[code] - before.get(code, 0) == codes["capture_backpressure"]
        assert after["statetap_engine_ring_limit_bytes"] == RING_BYTES
        for s in sent:
            on.path(s).unlink(missing_ok=True)
        await goes_on(on, References())


async def test_writers_that_stand_still_fail_their_requests_at_the_deadline_and_no_others(engine: Engine, slow: Path) -> None:
    async with load(engine) as on:
        slow.write_text("stall")
        tasks = [asyncio.create_task(on.capture(ids)) for ids in fresh(6, 20)]
        await on.healthy()
        assert (await on.plain(fresh(1, 40)[0])).status == 200
        sent = await asyncio.gather(*tasks)
        assert {s.capture["code"] for s in sent} == {"capture_incomplete"}, [s.capture for s in sent]
        assert all("not there in time" in s.capture["message"] for s in sent)
        slow.unlink()
        await on.settled(set())
        await goes_on(on, References())


async def test_a_full_tap_is_tap_full_of_some_and_later_ones_work(engine: Engine, tap: Path) -> None:
    if not os.path.ismount(tap):
        pytest.skip("this user may not mount a tmpfs")
    async with load(engine) as on:
        before = await on.idle()
        sent = [await on.capture(ids) for ids in fresh(20, 500)]  # 20 x 646 KiB into 8 MiB, and nobody takes them
        codes = Counter(s.capture.get("code", "ok") for s in sent)
        assert set(codes) <= {"ok", "tap_full", "capture_backpressure"} and codes["tap_full"] >= 5 and codes["ok"] >= 5, codes
        after = await on.idle()
        assert on.files() == {on.path(s).name for s in sent if s.ok}
        code = "statetap_engine_errors_total{tap_full}"
        assert after[code] - before.get(code, 0) == codes["tap_full"]
        for s in sent:
            on.path(s).unlink(missing_ok=True)
        foreign = tap / "somebody-elses"
        with foreign.open("wb") as f, pytest.raises(OSError, match="No space left"):
            while True:
                f.write(bytes(1 << 20))
                f.flush()
        assert (await on.capture(fresh(1, 100)[0])).capture["code"] == "tap_full"
        foreign.unlink()
        await goes_on(on, References())


async def test_a_prefix_cache_makes_errors_and_never_short_files(engine: Engine) -> None:
    async with load(engine) as on:
        (first,) = fresh(1, 100)
        assert (await on.capture(first)).ok
        again = [await on.capture(ids) for ids in (first, first[:50] + (7,) * 80, (*first, 9))]
        for s in again:
            assert s.capture["code"] == "capture_incomplete" and "prefix cache" in s.capture["message"], s.capture
        assert len(on.files()) == 1
