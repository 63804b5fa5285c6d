"""The self-check's judgement on made states: right taps pass, every mistake is named, and nothing is served that nothing confirms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from statetap.contracts.errors import EngineError, ErrorCode
from statetap.engine.attention import AttentionInputs, attention_of, norm_of
from statetap.engine.model import decoder_stack, final_norm, final_norm_spec
from statetap.engine.norms import normed, spec_of, variant_of
from statetap.engine.selfcheck import ATTENTION, NOTHING, OWN, judge

T, H, L = 12, 16, 5
TOLERANCE = 1e-5


class RMSNorm(nn.Module):
    """By the name of SGLang's class, with its attributes; ``shift``: what is added to the weight."""

    shift = 0.0

    def __init__(self, hidden: int = H, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden) * 0.2 + 1.0 - self.shift)
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x64 = x.double()
        y = x64 / (x64.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).sqrt()
        return (y * (self.weight.double() + self.shift)).float()


class GemmaRMSNorm(RMSNorm):
    shift = 1.0


class OddNorm(RMSNorm):
    """No class that the formulas know."""


class OddName(nn.Module):  # whose name says nothing
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(H)), 1e-6


class Attention(nn.Module):
    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden_states.roll(1, -1))


class Layer(nn.Module):
    def __init__(self, norm: type[nn.Module] | None) -> None:
        super().__init__()
        self.self_attn = Attention()
        if norm is not None:
            self.input_layernorm = norm()

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.input_layernorm(hidden_states) if hasattr(self, "input_layernorm") else hidden_states
        return hidden_states + self.self_attn(positions, hidden_states=x)


class Stack(nn.Module):
    def __init__(self, norm: type[nn.Module] | None = RMSNorm, final: type[nn.Module] = RMSNorm) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer(norm) for _ in range(L))
        self.norm = final()

    @torch.no_grad()
    def run(self) -> dict[str, Any]:
        """The arguments of :func:`judge` for taps that are right, every boundary held."""
        inputs = AttentionInputs(self.layers, H, lambda: True)
        x, positions, planes = torch.randn(T, H), torch.arange(T), {}
        for b, layer in enumerate(self.layers):
            planes[b] = x.clone()
            x = layer(positions, x)
        planes[L] = x.clone()
        inputs.remove()
        assert not any(layer.self_attn._forward_pre_hooks for layer in self.layers)
        norms = [*(norm_of(layer) for layer in self.layers), self.norm]
        return {"planes": planes, "inputs": inputs.seen, "post": self.norm(x), "norms": norms, "own": {}, "tolerance": TOLERANCE}


@pytest.mark.parametrize("norm", [RMSNorm, GemmaRMSNorm, nn.LayerNorm, None])
def test_right_taps_pass_by_what_the_attention_received_alone(norm: type[nn.Module] | None) -> None:
    made = (lambda: nn.LayerNorm(H)) if norm is nn.LayerNorm else norm
    result = judge(**Stack(made, made or RMSNorm).run())  # type: ignore[arg-type]
    assert not result["problems"] and not result["indistinct"] and not result["notes"]
    assert result["checked_by"] == ATTENTION and set(result["boundaries"]) == {str(b) for b in range(L)}
    assert all(c["error"] <= TOLERANCE < 0.01 < c["shifted"] for c in [*result["boundaries"].values(), result["final"]])


@pytest.mark.parametrize(("off", "found"), [(1, 3), (-1, 1)])
def test_a_tap_one_layer_off_is_named(off: int, found: int) -> None:
    case = Stack().run()
    case["planes"] = {2: case["planes"][2 + off], L: case["planes"][L]}
    (problem,) = judge(**case)["problems"]
    assert "boundary 2 differs" in problem and f"it holds boundary {found}" in problem


def test_all_boundaries_one_layer_off_are_found_even_when_they_agree_with_each_other() -> None:
    case = Stack().run()
    right = case["planes"]
    case["planes"] = {b: right[min(b + 1, L)] for b in range(L)} | {L: right[L]}
    assert len(judge(**case)["problems"]) == L


def test_the_state_after_the_norm_in_place_of_before_is_named() -> None:
    case = Stack().run()
    case["planes"][2] = case["inputs"][2]
    case["planes"][L] = case["post"]
    early, last = judge(**case)["problems"]
    assert early.startswith("boundary 2 ") and "after the norm" in early
    assert last.startswith("the final state ") and "after the norm" in last


def test_a_residual_that_is_left_out_is_found_though_sglangs_own_capture_leaves_it_out_too() -> None:
    case = Stack(GemmaRMSNorm).run()
    without = case["planes"][3] - case["planes"][2]
    case["planes"][3], case["own"] = without, {3: without}
    (problem,) = judge(**case)["problems"]
    assert problem.startswith("boundary 3 differs")


def test_sglangs_own_capture_is_not_believed_against_an_attention_that_agrees_with_the_tap() -> None:
    case = Stack().run()
    case["own"] = {2: case["planes"][2].clone(), 3: case["planes"][3] - case["planes"][2]}
    result = judge(**case)
    assert not result["problems"] and result["checked_by"] == ATTENTION
    (note,) = result["notes"]
    assert "boundary 3" in note and "wrong" in note
    assert result["own_capture"]["2"] == 0.0 < 0.1 < result["own_capture"]["3"]


def test_where_the_attention_cannot_be_read_sglangs_own_capture_confirms_or_contradicts() -> None:
    case = Stack().run()
    case["inputs"] = {}
    case["own"] = {b: case["planes"][b].clone() for b in (1, 3)}
    case["planes"] = {b: case["planes"][b] for b in (1, 3, L)}
    result = judge(**case)
    assert not result["problems"] and not result["indistinct"] and result["checked_by"] == OWN
    case["planes"][3] = case["planes"][1]
    assert "SGLang's own read" in judge(**case)["problems"][0]


@pytest.mark.parametrize("unreadable", ["no attention", "unknown norm", "post-norm by another name"])
def test_a_boundary_that_nothing_confirms_is_said_so(unreadable: str) -> None:
    case = Stack().run()
    if unreadable == "no attention":
        del case["inputs"][2]
    elif unreadable == "unknown norm":
        case["norms"][2] = OddName()
    else:  # it was normed, by a norm that norm_of does not find
        case["norms"] = [*([None] * L), case["norms"][L]]
    result = judge(**case)
    assert not result["problems"]
    assert any("nothing can confirm boundary 2" in text for text in result["indistinct"])
    assert result["boundaries"]["2"]["by"] == NOTHING


def test_layers_that_change_nothing_are_indistinct() -> None:
    case = Stack().run()
    for b in case["planes"]:
        case["planes"][b] = case["planes"][0]
    stack_norms = case["norms"]
    for norm in stack_norms:
        norm.weight.data.fill_(1.0)
    same = normed(stack_norms[0], case["planes"][0])
    case["inputs"], case["post"] = dict.fromkeys(range(L), same), same
    result = judge(**case)
    assert not result["problems"] and len(result["indistinct"]) == L + 1


def test_a_forward_that_nobody_asked_for_is_not_copied() -> None:
    stack, asked = Stack(), False
    inputs = AttentionInputs(stack.layers, H, lambda: asked)
    stack.layers[0](torch.arange(T), torch.randn(T, H))
    assert not inputs.seen
    asked = True
    stack.layers[0](torch.arange(T), torch.randn(T, H))
    assert set(inputs.seen) == {0}


def test_norms_by_class() -> None:
    gemma4 = RMSNorm()
    gemma4.scale_shift = 1.0
    assert [variant_of(n) for n in (RMSNorm(), GemmaRMSNorm(), gemma4, nn.LayerNorm(H), OddName())] == [
        "rmsnorm", "gemma_rmsnorm", "gemma_rmsnorm", "layernorm", "other",
    ]  # fmt: skip
    x = torch.randn(T, H)
    layer = nn.LayerNorm(H)
    with torch.no_grad():
        layer.weight.normal_()
        layer.bias.normal_()
    for norm in (RMSNorm(), GemmaRMSNorm(), layer):
        torch.testing.assert_close(normed(norm, x), norm(x), atol=1e-5, rtol=1e-5)
    assert normed(OddName(), x) is None


def test_a_final_norm_that_readers_cannot_apply_is_refused_for_pre_only() -> None:
    with pytest.raises(EngineError, match="LayerNorm") as caught:
        final_norm_spec(nn.LayerNorm(H), "pre")
    assert caught.value.code is ErrorCode.INVALID_REQUEST and "--final post" in caught.value.next_step
    for kind in ("post", "both", "none"):
        assert final_norm_spec(nn.LayerNorm(H), kind).variant == "other"
    assert spec_of(RMSNorm(eps=1e-3)).eps == 1e-3
    assert final_norm_spec(RMSNorm(), "pre").variant == "rmsnorm"


def test_the_decoder_stack_is_the_text_parts() -> None:
    model = nn.Module()
    model.vision_tower, model.language_model = nn.Module(), nn.Module()
    model.vision_tower.encoder, model.language_model.model = Stack(), Stack()
    assert decoder_stack(model, L) is model.language_model.model
    assert final_norm(model.language_model.model) is model.language_model.model.norm
    assert isinstance(attention_of(model.language_model.model.layers[0]), Attention)
    model.draft = Stack()
    with pytest.raises(EngineError, match="2 decoder stacks of 5 blocks"):
        decoder_stack(model, L)
    with pytest.raises(EngineError, match="0 decoder stacks of 4 blocks"):
        decoder_stack(model, 4)
