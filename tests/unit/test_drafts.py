"""Boundaries from a drafter's config: translated where the config tells its convention, refused where it does not, before any start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from statetap.contracts.drafts import IDS, draft_boundaries
from statetap.contracts.errors import ErrorCode, RequestError
from statetap.engine.draft import resolve_boundaries
from statetap.engine.failure import FAILED_FILE

SPECULATORS = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_config": {"algorithm": "eagle3"}}
SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}


def eagle(ids: list[int] | None, **more: Any) -> dict[str, Any]:
    return {**SPECFORGE, "eagle_config": {IDS: ids, "use_aux_hidden_state": True, **more}}


@pytest.mark.parametrize(
    ("config", "target", "boundaries"),
    [
        (eagle([1, 17, 32]), "gpt_oss", (2, 18, 33)),  # SpecForge and ModelOpt: block outputs
        (eagle([24, 30, 36]), "gpt_oss", (24, 30, 36)),  # an id L is no block: SGLang's gpt-oss takes them as they are
        (eagle([0, 5, 35]), "llama", (1, 6, 36)),
        (eagle([1, 28, 32]), "deepseek_v3", (2, 29, 33)),  # a leading 1: block outputs there too
        (eagle([]), "llama", (2, 18, 33)),
        (eagle(None), "qwen3", (2, 18, 33)),
        (SPECFORGE, "llama", (2, 18, 33)),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "deepseek_v3", (2, 18, 33)),
        (SPECULATORS, "llama", (2, 18, 33)),
        (SPECULATORS | {IDS: [2, 18, 33, 36]}, "qwen3", (2, 18, 33, 36)),  # boundaries; the last is L
        (SPECULATORS | {IDS: [3, 31, 34]}, "deepseek_v3", (3, 31, 34)),
    ],
)
def test_ids_are_translated_by_the_configs_own_convention(config: dict[str, Any], target: str, boundaries: tuple[int, ...]) -> None:
    assert draft_boundaries(config, 36, target=target) == boundaries


@pytest.mark.parametrize(
    ("config", "target", "words"),
    [
        (eagle([2, 30, 33]), "kimi_k2", "boundaries [2, 30, 33], trainers as block outputs, [3, 31, 34]"),
        (eagle([2, 30, 33]), "deepseek_v3", "SGLang takes them as boundaries"),
        (eagle([24, 30, 36]), "llama", "no block 36"),
        (eagle([1, 17, 40]), "llama", "outside [0, 36]"),
        (eagle([1, 1, 17]), "llama", "names one twice"),
        (eagle(["1", 2]), "llama", "not a list of integers"),  # type: ignore[list-item]
        (eagle([1, 17, 32], use_aux_hidden_state=False), "llama", "takes no states"),
        (SPECFORGE | {IDS: [2, 18, 33]}, "llama", "without speculators_config"),
        (SPECULATORS | {IDS: [1, 17, 32]}, "qwen3_moe", "copied by a converter"),
        (SPECULATORS | {IDS: [2, 18, 37]}, "llama", "outside [0, 36]"),
        (SPECULATORS | eagle([1, 17, 32]) | {IDS: [2, 18, 33]}, "llama", "two conventions"),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}, "llama", "no EAGLE-3 drafter"),
        ({}, "", "no EAGLE-3 drafter"),
    ],
)
def test_what_cannot_be_told_is_refused_with_the_readings(config: dict[str, Any], target: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        draft_boundaries(config, 36, target=target)
    assert caught.value.code is ErrorCode.INVALID_REQUEST and words in caught.value.message, caught.value.message


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A vision model's folder: the blocks are those of the text part."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "some_vl",
        "vision_config": {"num_hidden_layers": 9},
        "text_config": {"model_type": "llama", "num_hidden_layers": 36},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_boundaries_are_resolved_against_the_models_own_config(model: Path, tmp_path: Path) -> None:
    draft = write(tmp_path / "draft.json", eagle([1, 17, 32]))
    assert resolve_boundaries("default", draft, str(model)) == "2,18,33"
    assert resolve_boundaries("36,0", None, str(model)) == "36,0"
    assert resolve_boundaries("default", None, str(model)) == "default"
    assert resolve_boundaries("1,2", None, "org/some-model") == "1,2"  # a hub id: checked when it is loaded
    (model / "config.json").write_text('{"n_layer": 12}')
    assert resolve_boundaries("5", None, str(model)) == "5"


@pytest.mark.parametrize(
    ("boundaries", "draft", "words"),
    [
        ("1,2", eagle([1, 17, 32]), "both given"),
        ("default", "not there", "is not there"),
        ("default", "[1]", "no JSON object"),
        ("default", "{", "Expecting"),
        ("37", None, "outside [0, 36]"),
        ("5,5", None, "names one twice"),
        ("one", None, "not a list of integers"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(model: Path, tmp_path: Path, boundaries: str, draft: Any, words: str) -> None:
    path = None if draft is None else tmp_path / "draft.json"
    if path is not None and draft != "not there":
        write(path, draft)
    with pytest.raises(RequestError, match=words.replace("[", r"\[")):
        resolve_boundaries(boundaries, path, str(model))


def test_a_config_without_a_number_of_layers_needs_boundaries(model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text('{"n_layer": 12}')
    with pytest.raises(RequestError, match="num_hidden_layers") as caught:
        resolve_boundaries("default", write(tmp_path / "draft.json", SPECFORGE), str(model))
    assert "--boundaries" in caught.value.next_step


def test_the_launcher_starts_nothing_for_a_config_that_it_cannot_read(model: Path, tmp_path: Path) -> None:
    draft = write(tmp_path / "draft.json", SPECFORGE | {IDS: [2, 18, 33]})
    command = [sys.executable, "-m", "statetap.engine", "--model", str(model), "--tap", str(tmp_path / "tap"), "--draft-config", str(draft)]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "--boundaries" in done.stderr
    failure = json.loads((tmp_path / "tap" / FAILED_FILE).read_text())
    assert failure["code"] == "invalid_request" and "speculators means" in failure["message"]
    assert [p.name for p in (tmp_path / "tap").iterdir()] == [FAILED_FILE]  # not even a temp folder's name


def test_the_stack_starts_nothing_either(model: Path, tmp_path: Path) -> None:
    draft = write(tmp_path / "draft.json", SPECFORGE | {IDS: [2, 18, 33]})
    store = tmp_path / "store"
    command = [sys.executable, "-m", "statetap.cli", "up", "--model", str(model), "--store", str(store), "--draft-config", str(draft)]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode not in (0, 3) and "--boundaries" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not store.exists()
