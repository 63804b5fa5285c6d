"""Norms as the readers and the self-check compute them: by a formula from weight and eps, never by calling the model's own module.

Invariant: a module whose class is not known by name has no formula here (None), and nothing is concluded from it.
"""

from __future__ import annotations

from typing import Any

import torch

from ..contracts.profile import NormSpec

RMSNORM, GEMMA_RMSNORM, LAYERNORM, OTHER = "rmsnorm", "gemma_rmsnorm", "layernorm", "other"
_GEMMA = ("GemmaRMSNorm", "Gemma3RMSNorm")  # their weight is an offset from one


def variant_of(norm: Any) -> str:
    """Which formula a norm module has, by its class; ``other`` for one that is not known."""
    kind = type(norm).__name__
    if not isinstance(getattr(norm, "weight", None), torch.Tensor) or eps_of(norm) is None:
        return OTHER
    if getattr(norm, "zero_centered_gamma", False):  # a centre of its own in each layer (Muse Spark)
        return OTHER
    if kind.endswith("RMSNorm"):
        # Gemma 4 has one class for both, told apart by an attribute (sglang layers/layernorm.py).
        return GEMMA_RMSNORM if kind in _GEMMA or getattr(norm, "scale_shift", 0.0) == 1.0 else RMSNORM
    return LAYERNORM if kind == "LayerNorm" else OTHER


def eps_of(norm: Any) -> float | None:
    """The epsilon, or None where the module names none."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return None if eps is None else float(eps)


def spec_of(norm: Any) -> NormSpec:
    """What readers need to derive post from pre; variant ``other`` where they cannot."""
    variant = variant_of(norm)
    return NormSpec(variant=variant if variant in (RMSNORM, GEMMA_RMSNORM) else OTHER, eps=eps_of(norm) or 0.0)


def normed(norm: Any, x: torch.Tensor) -> torch.Tensor | None:
    """The norm of ``x`` [T, H] in fp32, or None where there is no formula. Without a norm (``norm`` None) that is ``x`` itself."""
    if norm is None:
        return x.float()
    variant, eps = variant_of(norm), eps_of(norm)
    if variant == OTHER or eps is None:
        return None
    weight = norm.weight.data
    if variant != LAYERNORM:
        return rms_normed(x, weight, eps, offset=variant == GEMMA_RMSNORM)
    y = x.float()
    y, bias = rms_normed(y - y.mean(-1, keepdim=True), weight, eps), getattr(norm, "bias", None)
    return y if bias is None else y + bias.data.float()


def rms_normed(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: bool = False) -> torch.Tensor:
    """RMSNorm of ``x`` [T, H] by ``weight`` [H] in fp32; ``offset``: the weight is one from one (Gemma)."""
    y, w = x.float(), weight.float()
    return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + w if offset else w)
