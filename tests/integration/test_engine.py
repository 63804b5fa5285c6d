"""The capture plugin in the real SGLang, on the CPU, through our launcher."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors import safe_open

from statetap.contracts.capture import LEASE_FILE, NORM_FILE, READY_FILE, new_rid
from statetap.contracts.tensors import INPUT_IDS, parse_header, tap_header
from statetap.engine.failure import FAILED_FILE
from statetap.engine.parity import Reference, compare_files
from statetap.engine.tiny import make_tiny
from tests.support.engine import Engine, start_engine, wait_ready

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(240)]

TOLERANCE = 1e-5
SHM_BEFORE: set[str] = set()


def segments_of_engines() -> set[str]:
    """What SGLang and Python's multiprocessing leave in shared memory when they are killed."""
    return {p.name for p in Path("/dev/shm").iterdir() if p.name.startswith(("sglang_loads_", "sem.mp-", "psm_"))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def tap() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="statetap-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def engine(model: Path, tap: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Chunked prefill on, with a chunk far below the prompts' lengths; boundaries out of order and with both ends."""
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    SHM_BEFORE.update(segments_of_engines())
    running = start_engine(model, tap, log, "--boundaries", "3,0,6,5", "--final", "both", sglang=("--chunked-prefill-size", "64"))
    yield wait_ready(running)
    if running.process.poll() is None:
        running.stop()


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(str(model))


def body(rid: str, ids: list[int], new: int = 0) -> dict:
    return {"rid": rid, "input_ids": ids, "sampling_params": {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}}


async def post(session: aiohttp.ClientSession, engine: Engine, request: dict) -> tuple[int, dict]:
    async with session.post(f"{engine.url}/generate", json=request) as response:
        return response.status, await response.json()


def prompts(seed: int, count: int, longest: int) -> list[list[int]]:
    rnd = random.Random(seed)
    return [[rnd.randint(5, 1023) for _ in range(rnd.randint(1, longest))] for _ in range(count)]


async def test_every_state_equals_transformers_under_chunked_mixed_load(engine: Engine, reference: Reference) -> None:
    lease = engine.lease()
    rows = [*prompts(1, 40, 300), [7], [9] * 257, list(range(5, 1005)), *[[11, 12, 13] * 30] * 4]
    async with aiohttp.ClientSession() as session:
        plain = [asyncio.create_task(post(session, engine, body(f"other-{i}", ids, new=4))) for i, ids in enumerate(prompts(2, 10, 200))]
        rids = [new_rid(lease, i) for i in range(len(rows))]
        replies = await asyncio.gather(*(post(session, engine, body(rid, ids)) for rid, ids in zip(rids, rows, strict=True)))
        await asyncio.gather(*plain)
    files = []
    for rid, ids, (status, reply) in zip(rids, rows, replies, strict=True):
        assert status == 200
        capture = reply["meta_info"]["capture"]
        assert capture["status"] == "ok" and capture["rows"] == len(ids), capture
        path = engine.tap / capture["path"]
        assert path.parent.name == lease and path.name == f"{rid}.safetensors"
        assert parse_header(path.read_bytes()[:4096]) == tap_header(engine.profile, len(ids))
        with safe_open(str(path), "pt") as f:
            assert f.get_tensor(INPUT_IDS).tolist() == ids
        files.append(path)
    parity = compare_files(files, engine.profile, reference)
    assert parity.rows == len(rows)
    assert set(parity.errors) == {"3", "0", "6", "5", "final_pre", "final_post"}
    assert parity.worst < TOLERANCE, parity
    assert parity.shifted > 0.1, parity
    # nothing but our files: requests that did not ask left none, and nothing is half written
    assert {p.name for p in (engine.tap / lease).iterdir()} == {p.name for p in files} | {LEASE_FILE}


async def test_the_file_is_there_before_the_reply_and_requests_that_do_not_ask_are_not_captured(engine: Engine) -> None:
    lease = engine.lease()
    async with aiohttp.ClientSession() as session:
        status, reply = await post(session, engine, body("someone-else", [5, 6, 7], new=2))
        assert status == 200 and "capture" not in reply["meta_info"]
        async with session.get(f"{engine.url}/health_generate") as health:
            assert health.status == 200
        for i in range(20):
            rid = new_rid(lease, i)
            _, reply = await post(session, engine, body(rid, [5, 6, 7, 8 + i]))
            assert (engine.tap / reply["meta_info"]["capture"]["path"]).exists()
    assert len(list((engine.tap / lease).glob("*.safetensors"))) == 20


async def test_a_rid_is_not_used_twice_and_a_lease_must_exist(engine: Engine) -> None:
    lease = engine.lease()
    rid = new_rid(lease, 1)
    async with aiohttp.ClientSession() as session:
        first, _ = await post(session, engine, body(rid, [5, 6, 7]))
        again, reply = await post(session, engine, body(rid, [8, 9]))
        assert (first, again) == (200, 400) and "used before" in json.dumps(reply)
        (engine.tap / lease / f"{rid}.safetensors").unlink()  # as a worker does
        late, reply = await post(session, engine, body(rid, [8, 9]))
        assert late == 200 and reply["meta_info"]["capture"]["code"] == "capture_incomplete"
        missing, reply = await post(session, engine, body(new_rid("0123456789abcdef", 1), [5, 6]))
        assert missing == 400 and "no lease folder" in json.dumps(reply)
    assert not list((engine.tap / lease).glob("*.safetensors"))


async def test_aborts_and_disconnects_leave_no_file(engine: Engine) -> None:
    lease = engine.lease()
    async with aiohttp.ClientSession() as session:
        rids = [new_rid(lease, i) for i in range(6)]
        tasks = [asyncio.create_task(post(session, engine, body(rid, [7] * 4000, new=200))) for rid in rids]
        await asyncio.sleep(0.05)
        for rid in rids[:3]:
            async with session.post(f"{engine.url}/abort_request", json={"rid": rid}) as response:
                assert response.status == 200
        for task in tasks[3:]:
            task.cancel()  # closes the connection
        done = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in done[:3]:
            assert outcome[1]["meta_info"]["capture"]["status"] == "error", outcome
        # the engine still serves, and what it captures now is whole
        status, reply = await post(session, engine, body(new_rid(lease, 99), [5] * 100))
        assert status == 200 and reply["meta_info"]["capture"]["status"] == "ok"
        for _ in range(150):  # disconnects are noticed by SGLang every 4 s
            left = [p.name for p in (engine.tap / lease).iterdir() if any(rid in p.name for rid in rids)]
            if not left:
                break
            await asyncio.sleep(0.1)
        assert left == []


async def test_a_lease_folder_that_goes_away_is_an_error_of_the_request_only(engine: Engine) -> None:
    lease = engine.lease()
    async with aiohttp.ClientSession() as session:
        task = asyncio.create_task(post(session, engine, body(new_rid(lease, 0), [7] * 3000)))
        await asyncio.sleep(0.02)
        shutil.rmtree(engine.tap / lease)
        status, reply = await task
        assert status in (200, 400)
        if status == 200:
            assert reply["meta_info"]["capture"]["status"] == "error"
        lease = engine.lease()
        status, reply = await post(session, engine, body(new_rid(lease, 1), [5, 6, 7]))
        assert reply["meta_info"]["capture"]["status"] == "ok"


def test_ready_names_the_profile_and_the_self_check_has_controls(engine: Engine) -> None:
    ready = engine.ready
    assert engine.profile.boundaries == (3, 0, 6, 5) and engine.profile.final == "both"
    assert ready["profile_id"] == engine.profile.profile_id
    check = ready["self_check"]
    assert check["ok"] and check["checked_by"] == "attention_input"
    assert set(check["boundaries"]) == {"0", "3", "5"}
    own = check["own_capture"]  # before 0.5.22 SGLang has none of boundary 0
    assert all(error <= TOLERANCE for error in own.values()) and {"3", "5"} <= set(own)
    assert all(v["error"] <= TOLERANCE < 0.05 < v["shifted"] for v in [*check["boundaries"].values(), check["final"]])
    with safe_open(str(engine.tap / NORM_FILE), "pt") as f:
        assert f.get_tensor("weight").shape == (64,) and f.get_tensor("weight").dtype == torch.float32
        assert f.metadata() == {"variant": "rmsnorm", "eps": "1e-06"}


def test_stop_leaves_nothing_behind(engine: Engine) -> None:  # last: it ends the module's engine
    assert engine.stop() == 0
    assert not (engine.tap / READY_FILE).exists() and not (engine.tap / NORM_FILE).exists()
    assert not segments_of_engines() - SHM_BEFORE


@pytest.mark.parametrize(
    ("args", "sglang", "env", "code", "words"),
    [
        (("--boundaries", "9"), (), {}, "invalid_request", "outside [0, 6]"),
        ((), ("--pp-size", "2"), {}, "flag_refused", "--pp-size"),
        ((), ("--enable-two-batch-overlap",), {}, "flag_refused", "--enable-two-batch-overlap"),
        ((), (), {"SGLANG_RUST_SERVER": "1"}, "flag_refused", "SGLANG_RUST_SERVER"),
        ((), (), {"STATETAP_TEST_SITE": "missing_target"}, "engine_start_failed", "there is no sglang"),
        ((), (), {"STATETAP_TEST_SITE": "shifted"}, "self_check_failed", "it holds boundary 2"),
        ((), (), {"STATETAP_TEST_SITE": "crash"}, "engine_start_failed", "before the engine was ready"),
    ],
    ids=[
        "boundary out of range",
        "pipeline parallel",
        "two-batch overlap",
        "rust server",
        "hook target gone",
        "capture one layer off",
        "scheduler crashes",
    ],
)
def test_an_engine_that_cannot_capture_rightly_does_not_start_and_says_why(
    model: Path, tmp_path: Path, args: tuple[str, ...], sglang: tuple[str, ...], env: dict[str, str], code: str, words: str
) -> None:
    tap, before = tmp_path / "tap", segments_of_engines()
    site = Path(__file__).parent / "broken_site"  # sitecustomize.py there breaks the plugin on purpose
    if "STATETAP_TEST_SITE" in env:
        env = {**env, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    engine = start_engine(model, tap, tmp_path / "log", *args, sglang=sglang, env=env)
    assert engine.process.wait(120) == 3
    failure = json.loads((tap / FAILED_FILE).read_text())
    assert failure["code"] == code and words in failure["message"], failure
    assert not (tap / READY_FILE).exists()
    assert not segments_of_engines() - before
