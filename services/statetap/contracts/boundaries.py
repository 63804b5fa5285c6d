"""Boundary b = the residual stream after b blocks: 0 = embeddings, L = after the last block, before the final norm.

It is HF's ``hidden_states[b]`` for b < L. Everything in Statetap speaks of boundaries only.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import ErrorCode, RequestError


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's public default [2, L//2, L-3] (SpecForge, vLLM and SGLang all mean these tensors).

    Raises:
        RequestError: ``invalid_request`` for models too small to have three different ones.
    """
    bs = (2, num_layers // 2, num_layers - 3)
    if len(set(bs)) != 3 or min(bs) < 0:
        # A 6-layer toy has 2, 3, 3: take the nearest that are different rather than refuse a demo.
        bs = (1, num_layers // 2, num_layers - 1)
    return validate_boundaries(bs, num_layers)


def parse_boundaries(text: str, num_layers: int) -> tuple[int, ...]:
    """``"2,16,29"`` or ``"default"`` -> boundaries, in the order given (the order of the columns)."""
    if text.strip() in ("", "default"):
        return default_boundaries(num_layers)
    try:
        bs = split_boundaries(text)
    except ValueError as e:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"boundaries: {e}") from None
    return validate_boundaries(bs, num_layers)


def split_boundaries(text: str) -> tuple[int, ...]:
    """``"2,16,29"`` -> integers, of whatever model. Raises ValueError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of integers such as 2,16,29") from None


def validate_boundaries(bs: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Raises ``invalid_request`` unless all are different and within [0, L]."""
    wrong = [b for b in bs if not 0 <= b <= num_layers]
    if wrong:
        raise RequestError(
            ErrorCode.INVALID_REQUEST, f"boundaries: {wrong} are outside [0, {num_layers}] of a model with {num_layers} blocks"
        )
    if not bs:
        raise RequestError(ErrorCode.INVALID_REQUEST, "boundaries: at least one is needed")
    if len(set(bs)) != len(bs):
        raise RequestError(ErrorCode.INVALID_REQUEST, f"boundaries: {list(bs)} names one twice")
    return tuple(bs)
