"""Modes that break capture: refused by flag (whole, abbreviated, with =), and again by what SGLang resolved its settings to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from statetap.contracts.errors import EngineError
from statetap.engine import plugin
from statetap.engine.failure import FAILED_FILE
from statetap.engine.flags import OURS, REFUSED, REFUSED_ENVIRONMENT, check_environment, check_flags
from statetap.engine.modes import RESOLVED, check_modes
from statetap.engine.ring import ALIGN
from statetap.engine.settings import EngineSettings
from statetap.engine.tiny import make_tiny

# Of other versions than the tests' SGLang: aliases and flags that came or went.
ELSEWHERE = {"--dp", "--pp", "--tp", "--enable-piecewise-cuda-graph"}

ASK_SGLANG = """
from statetap.engine.cpu import boot; boot.install()
import argparse, json
from sglang.srt.server_args import ServerArgs
import sys
from statetap.contracts.errors import EngineError
from statetap.engine.flags import server_argv
from statetap.engine.modes import check_modes
from statetap.engine.plugin import forward_tokens
from statetap.engine.server import graph_flags
from sglang.srt.server_args import prepare_server_args
parser = argparse.ArgumentParser(); ServerArgs.add_cli_args(parser)
def verdict(cpu, leave_out, add):
    argv = server_argv(model=sys.argv[1], host="127.0.0.1", port=1, tp=1, trust_remote_code=False, cpu=cpu, extra=())
    argv = [a for a in [*argv, *graph_flags()] if a not in leave_out]
    try:
        server_args = prepare_server_args([*argv, *add])
        server_args.resolve_once()  # as the launcher of SGLang does
        check_modes(server_args)
        chunks.append(forward_tokens(server_args))
    except EngineError as e:
        return e.message
    return ""
chunks = []
verdicts = [verdict(*case) for case in json.loads(sys.argv[2])]
print("\\n" + json.dumps([sorted(parser._option_string_actions), sorted(ServerArgs.__struct_fields__), verdicts, chunks[0]]))
"""

# (on the CPU, flags of ours that are left out, flags that come in by another way, what is said) of the real SGLang's settings.
REAL = [
    (True, (), (), ""),
    (False, (), (), ""),
    (True, ("--disable-radix-cache",), (), "disable_radix_cache = False"),
    (True, (), ("--pp-size", "2"), "pp_size = 2"),
    (False, (), ("--tp-size", "16", "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:25000"), ""),
    (True, (), ("--tokenizer-worker-num", "2"), "tokenizer_worker_num = 2"),
    (True, (), ("--allow-auto-truncate",), "allow_auto_truncate = True"),
    (False, (), ("--cuda-graph-backend-prefill", "full"), "cuda_graph_config.prefill.backend = 'full'"),
]


Asked = tuple[set[str], set[str], list[str], int]


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Options and fields of the installed SGLang, and what is said of its resolved settings; asked in a process of its own."""
    model = str(make_tiny(tmp_path_factory.mktemp("model") / "tiny"))
    command = [sys.executable, "-c", ASK_SGLANG, model, json.dumps([case[:3] for case in REAL])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    options, fields, verdicts, chunk = json.loads(done.stdout.splitlines()[-1])
    return set(options), set(fields), verdicts, chunk


def test_every_flag_and_field_that_is_refused_is_one_of_sglangs(sglang: Asked) -> None:
    """A flag that was renamed would be refused in name only."""
    options, fields, *_ = sglang
    assert {*REFUSED, *OURS} - options == ELSEWHERE
    assert not set(RESOLVED) - fields


def test_modes_are_seen_in_what_the_real_sglang_resolved(sglang: Asked) -> None:
    for (_, left_out, added, words), said in zip(REAL, sglang[2], strict=True):
        assert (words in said) if words else not said, (left_out, added, said)


def test_a_refused_mode_ends_the_engine_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plugin, "current", lambda: EngineSettings(tap=str(tmp_path)))
    loaded: list[object] = []
    runner = SimpleNamespace(is_draft_worker=False, server_args=changed(disable_radix_cache=False))
    with pytest.raises(SystemExit, match="disable_radix_cache = False: tokens from a prefix cache have no states"):
        plugin.around_load_model(loaded.append, runner)
    assert not loaded and json.loads((tmp_path / FAILED_FILE).read_text())["code"] == "flag_refused"


def test_the_ring_holds_two_of_the_largest_forwards(sglang: Asked) -> None:
    """By the resolved chunk: what was asked for is None, and on some versions the record keeps only that."""
    assert plugin.forward_tokens(SimpleNamespace(chunked_prefill_size=64, max_prefill_tokens=16384)) == 64
    assert plugin.forward_tokens(SimpleNamespace(chunked_prefill_size=-1, max_prefill_tokens=16384)) == 16384
    assert plugin.forward_tokens(SimpleNamespace(chunked_prefill_size=None)) == 0
    assert sglang[3] == 4096  # nobody named it
    plugin.check_ring(2 * (64 * 104 + 4 * ALIGN), 64, 100)
    with pytest.raises(EngineError, match="STATETAP_ENGINE_RING_BYTES"):
        plugin.check_ring(2 * (64 * 104 + 4 * ALIGN) - 1, 64, 100)


def test_no_whole_flag_of_sglang_is_taken_for_the_beginning_of_a_refused_one(sglang: Asked) -> None:
    for option in sglang[0] - {*REFUSED, *OURS}:
        check_flags([option])


def test_every_mode_that_is_refused_by_flag_is_refused_when_resolved(sglang: Asked) -> None:
    """Flags whose field is looked at after parsing, or that say why they need not be."""
    by_flag_only = {
        "--config", "--radix-cache-backend", "--enable-hicache", "--enable-http-worker-reuseport", "--enable-mis", "--enable-multi-layer-eagle",
        "--decoupled-spec-role", "--grpc-mode", "--smg-grpc-mode", "--use-ray", "--enable-return-aux-hidden-states", "--cuda-graph-backend-prefill",
        "--cuda-graph-bs-prefill", "--cuda-graph-config", "--speculative-draft-model", "--speculative-draft-model-path",
        "--data-parallel-size", "--pipeline-parallel-size", "--attention-context-parallel-size", "--attention-data-parallel-size",
        "--decode-context-parallel-size", "--moe-data-parallel-size",
    }  # fmt: skip
    fields = {flag.removeprefix("--").replace("-", "_") for flag in set(REFUSED) - by_flag_only - ELSEWHERE}
    assert fields == set(RESOLVED) - {"disable_radix_cache"}


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_the_beginning_of_a_refused_flag_is_refused_too(flag: str) -> None:
    for name in (flag, flag[:-1], flag[: len(flag) * 2 // 3]):
        if name == "--":
            continue
        for form in ([name, "2"], [f"{name}=2"], [name.replace("-", "_").replace("__", "--", 1)]):
            with pytest.raises(EngineError) as e:
                check_flags(["--mem-fraction-static", "0.8", *form])
            assert e.value.code == "flag_refused" and (name != flag or flag in e.value.message)


def test_flags_that_do_no_harm_pass() -> None:
    check_flags(
        ["--enable-mixed-chunk", "--disable-overlap-schedule", "--chunked-prefill-size=64", "--attention-backend", "fa3", "--", "-h", ""]
    )


@pytest.mark.parametrize("value", ["1", "true", "YES", "y"])
@pytest.mark.parametrize("name", sorted(REFUSED_ENVIRONMENT))
def test_an_environment_switch_is_refused_in_every_spelling_that_sglang_takes(name: str, value: str) -> None:
    with pytest.raises(EngineError, match=name):
        check_environment({name: value})
    check_environment({name: "0"})


GOOD = SimpleNamespace(**{name: allowed[-1] for name, (allowed, _) in RESOLVED.items()}, disable_cuda_graph=True)


def changed(**fields: Any) -> Any:
    return SimpleNamespace(**{**vars(GOOD), **fields})


@pytest.fixture(autouse=True)
def without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)  # as in versions whose ServerArgs holds the resolved values


@pytest.mark.parametrize("name", sorted(RESOLVED))
def test_a_mode_that_something_else_switched_on_is_refused_with_the_reason(name: str) -> None:
    allowed, why = RESOLVED[name]
    bad = next(v for v in (True, 2, "prefill") if v not in allowed) if True not in allowed else False
    if allowed == (None, 1):
        bad = 2
    with pytest.raises(EngineError) as e:
        check_modes(changed(**{name: bad}))
    assert e.value.code == "flag_refused" and f"{name} = {bad!r}" in e.value.message and why in e.value.message


def test_capture_works_in_the_modes_that_are_left_and_fields_of_other_versions_are_passed_over() -> None:
    check_modes(GOOD)
    check_modes(SimpleNamespace(disable_radix_cache=True, disable_cuda_graph=True))


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="disabled"))}, False),
        ({"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="breakable")), "disable_cuda_graph": False}, True),
        ({"cuda_graph_config": {"prefill": {"backend": "full"}}}, True),
        ({"disable_cuda_graph": False, "enable_piecewise_cuda_graph": True}, True),
        ({"disable_cuda_graph": False, "enable_piecewise_cuda_graph": False}, False),
    ],
)
def test_prefill_graphs_are_refused_in_both_spellings(fields: dict[str, Any], refused: bool) -> None:
    if refused:
        with pytest.raises(EngineError, match="prefill graph"):
            check_modes(changed(**fields))
    else:
        check_modes(changed(**fields))
