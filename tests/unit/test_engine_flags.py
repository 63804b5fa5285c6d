"""Modes that break capture: refused by flag (whole, abbreviated, with =), and again by what SGLang resolved its settings to."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from statetap.contracts.errors import EngineError
from statetap.engine.flags import OURS, REFUSED, REFUSED_ENVIRONMENT, check_environment, check_flags
from statetap.engine.modes import RESOLVED, check_modes

# Of other versions than the tests' SGLang: aliases and flags that came or went.
ELSEWHERE = {"--dp", "--pp", "--tp", "--enable-piecewise-cuda-graph"}

ASK_SGLANG = """
from statetap.engine.cpu import boot; boot.install()
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(); ServerArgs.add_cli_args(parser)
print("\\n" + json.dumps([sorted(parser._option_string_actions), sorted(ServerArgs.__struct_fields__)]))
"""


@pytest.fixture(scope="module")
def sglang() -> tuple[set[str], set[str]]:
    """Options and fields of the installed SGLang, asked in a process of its own."""
    out = subprocess.run([sys.executable, "-c", ASK_SGLANG], capture_output=True, text=True, timeout=100, check=True).stdout
    options, fields = json.loads(out.splitlines()[-1])
    return set(options), set(fields)


def test_every_flag_and_field_that_is_refused_is_one_of_sglangs(sglang: tuple[set[str], set[str]]) -> None:
    """A flag that was renamed would be refused in name only."""
    options, fields = sglang
    assert {*REFUSED, *OURS} - options == ELSEWHERE
    assert not set(RESOLVED) - fields


def test_no_whole_flag_of_sglang_is_taken_for_the_beginning_of_a_refused_one(sglang: tuple[set[str], set[str]]) -> None:
    for option in sglang[0] - {*REFUSED, *OURS}:
        check_flags([option])


def test_every_mode_that_is_refused_by_flag_is_refused_when_resolved(sglang: tuple[set[str], set[str]]) -> None:
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
