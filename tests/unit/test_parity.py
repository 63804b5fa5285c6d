"""Parity on made models: right files pass, each mistake is called by its name, and the head's check tells right from wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from statetap.contracts.errors import ErrorCode, RequestError
from statetap.contracts.profile import CaptureProfile, NormSpec
from statetap.contracts.tensors import AUX, FINAL_POST, FINAL_PRE, INPUT_IDS
from statetap.engine import lmhead
from statetap.engine.lmhead import Head, compare_head
from statetap.engine.parity import Parity, Reference, States, compare_files
from tests.support.models import make_model

BOUNDARIES = (2, 0, 6)
IDS = [5, 17, 300, 41, 9, 77, 512, 8, 8, 640]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(str(model))


@pytest.fixture(scope="module")
def states(reference: Reference) -> States:
    return reference.states(IDS, detail=True)


def profile_of(**changes: object) -> CaptureProfile:
    fields = {
        "model": "m", "revision": "r", "quantization": "none", "boundaries": BOUNDARIES, "final": "both", "dtype": "F32", "hidden": 64,
        "num_layers": 6, "vocab_size": 1000, "max_length": 100, "norm": NormSpec(variant="rmsnorm", eps=1e-6),
    }  # fmt: skip
    return CaptureProfile(**{**fields, **changes})  # type: ignore[arg-type]


def compare(tmp_path: Path, reference: Reference, planes: dict[str, torch.Tensor], **changes: object) -> Parity:
    """A file with these planes (by the names in the result), compared."""
    tensors = {INPUT_IDS: torch.tensor(IDS, dtype=torch.int32), AUX: torch.cat([planes[str(b)] for b in BOUNDARIES], -1).contiguous()}
    tensors |= {FINAL_PRE: planes["final_pre"].contiguous(), FINAL_POST: planes["final_post"].contiguous()}
    save_file(tensors, tmp_path / "row.safetensors")
    return compare_files([tmp_path / "row.safetensors"], profile_of(**changes), reference)


def right(states: States) -> dict[str, torch.Tensor]:
    return {str(b): states.boundary[b].clone() for b in BOUNDARIES} | {
        "final_pre": states.boundary[6].clone(),
        "final_post": states.post.clone(),
    }


@pytest.mark.parametrize("name", ["llama", "gemma3"])  # Gemma scales its embeddings: boundary 0 is what comes after that
def test_the_references_boundaries_are_transformers_hidden_states(name: str, tmp_path: Path) -> None:
    reference = Reference(str(make_model(name, tmp_path / name)))
    found = reference.states(IDS)
    with torch.no_grad():
        theirs = reference.model(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    L = len(theirs) - 1
    assert sorted(found.boundary) == list(range(L + 1))
    assert all(torch.equal(found.boundary[b], theirs[b][0]) for b in range(L))
    assert torch.equal(found.post, theirs[L][0]) and not torch.equal(found.boundary[L], theirs[L][0])  # HF's last is after the norm


def test_right_states_are_equal_and_their_neighbours_are_not(tmp_path: Path, reference: Reference, states: States) -> None:
    parity = compare(tmp_path, reference, right(states))
    assert parity.ok and parity.worst == 0.0 and not parity.mistakes and parity.shifted > 0.1


Planes = Callable[[States], torch.Tensor]


@pytest.mark.parametrize(
    ("plane", "wrong", "words"),
    [
        ("2", lambda s: s.boundary[1], "HF's hidden_states[1]: shifted by one layer (too early)"),
        ("2", lambda s: s.boundary[3], "HF's hidden_states[3]: shifted by one layer (too late)"),
        ("0", lambda s: s.boundary[4], "shifted by 4 layers (too late)"),
        ("6", lambda s: s.boundary[5], "shifted by one layer (too early)"),
        ("2", lambda s: s.boundary[6], "the last residual before the final norm: shifted by 4 layers"),
        ("6", lambda s: s.post, "post for pre"),
        ("final_pre", lambda s: s.post, "post for pre"),
        ("final_post", lambda s: s.boundary[6], "pre for post"),
        ("final_post", lambda s: s.boundary[5], "HF's hidden_states[5]"),
        ("2", lambda s: s.normed[2], "what the attention of layer 2 gets"),
        ("2", lambda s: s.unadded[2], "block 1 without the residual"),
        ("0", lambda s: s.boundary[0] * 8, "the reference times 8"),
        ("2", lambda s: s.boundary[2].bfloat16().float(), "values of bfloat16"),
        ("final_post", lambda s: s.post.half().float(), "values of float16"),
    ],
)
def test_a_mistake_is_called_by_its_name(
    tmp_path: Path, reference: Reference, states: States, plane: str, wrong: Planes, words: str
) -> None:
    parity = compare(tmp_path, reference, {**right(states), plane: wrong(states)})
    assert not parity.ok
    assert list(parity.mistakes) == [plane] and words in parity.mistakes[plane], parity.mistakes


def test_states_that_are_nothing_known_get_no_name(tmp_path: Path, reference: Reference, states: States) -> None:
    parity = compare(tmp_path, reference, {**right(states), "2": states.boundary[2].flip(0)})
    assert not parity.ok and not parity.mistakes
    short = {k: v[:-1] for k, v in right(states).items()}
    assert "shape" in compare(tmp_path, reference, short).mistakes["2"]


def test_the_tolerance_is_that_of_the_states_dtype(tmp_path: Path, reference: Reference, states: States) -> None:
    rounded = {k: v.bfloat16() for k, v in right(states).items()}
    assert compare(tmp_path, reference, rounded, dtype="BF16").ok
    assert not compare(tmp_path, reference, rounded).ok


# ---------------------------------------------------------------- the head's check
@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, reference: Reference) -> None:
    """transformers in the engine's place."""

    def answer(url: str, ids: list[int], **_: object) -> tuple[list[float], int, float]:
        with torch.no_grad():
            p = reference.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        best = int(p[-1].argmax())
        return [float(p[t, i]) for t, i in enumerate(ids[1:])], best, float(p[-1, best])

    monkeypatch.setattr(lmhead, "ask_engine", answer)
    monkeypatch.setattr(lmhead, "ROWS", 300)  # four blocks, the last one short


def write(tmp_path: Path, states: States, **planes: torch.Tensor) -> list[Path]:
    tensors = {INPUT_IDS: torch.tensor(IDS, dtype=torch.int32), FINAL_PRE: states.boundary[6], FINAL_POST: states.post} | planes
    save_file({k: v.clone().contiguous() for k, v in tensors.items()}, tmp_path / "row.safetensors")
    return [tmp_path / "row.safetensors"]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("final", ["pre", "post", "both"])
def test_right_final_states_give_the_engines_log_probabilities(tmp_path: Path, model: Path, states: States, final: str) -> None:
    result = compare_head(write(tmp_path, states), profile_of(final=final), model, "http://engine")
    assert result.ok and result.error < 1e-5 and result.agree == result.rows == 1 and result.tokens == len(IDS)
    assert result.shifted > 0.5


@pytest.mark.usefixtures("engine")
def test_wrong_final_states_do_not(tmp_path: Path, model: Path, states: States) -> None:
    for wrong in (states.boundary[5], states.post, states.boundary[6].roll(1, 0)):
        result = compare_head(write(tmp_path, states, **{FINAL_PRE: wrong}), profile_of(final="pre"), model, "http://engine")
        assert not result.ok and result.error > 0.01
    same = states.boundary[6][:1].expand(len(IDS), -1)  # states that do not differ by position: the control must fail it
    assert not compare_head(write(tmp_path, states, **{FINAL_PRE: same}), profile_of(final="pre"), model, "http://engine").ok


def test_the_head_is_found_in_shards_by_name(tmp_path: Path) -> None:
    names = {
        "language_model.model.embed_tokens.weight": "a", "language_model.lm_head.weight": "b", "language_model.model.norm.weight": "a",
        "vision_tower.norm.weight": "a", "language_model.model.layers.0.input_layernorm.weight": "a", "mtp.lm_head.weight": "a",
    }  # fmt: skip
    for shard in ("a", "b"):
        tensors = {n: torch.full((4, 2) if "norm" not in n else (2,), float(i)) for i, n in enumerate(names) if names[n] == shard}
        save_file(tensors, tmp_path / f"{shard}.safetensors")
    index = {"weight_map": {n: f"{shard}.safetensors" for n, shard in names.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    head = Head(tmp_path)
    assert head.norm_weight().tolist() == [2.0, 2.0]
    chosen, best = head.log_probabilities(torch.ones(1, 2), [3])
    assert math.isclose(float(chosen[0]), -math.log(4), rel_tol=1e-6) and int(best[0]) == 0
    (tmp_path / "config.json").write_text('{"text_config": {"final_logit_softcapping": 1.5, "logits_scaling": 2.0}}')
    assert torch.allclose(Head(tmp_path)._scaled(torch.tensor([4.0])), 1.5 * torch.tanh(torch.tensor([4.0]) / 2.0 / 1.5))


def test_what_cannot_be_compared_is_refused(tmp_path: Path, states: States) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RequestError) as caught:
        Head(tmp_path)
    assert caught.value.code is ErrorCode.NOT_FOUND
    with pytest.raises(RequestError, match="hold no final state"):
        compare_head(write(tmp_path, states), profile_of(final="none"), tmp_path, "http://engine")
