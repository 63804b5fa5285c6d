"""What a plane of states holds in place of what it should: the mistakes that are made with hidden states, each told by its tensor.

Invariant: a mistake is named only where the plane *equals* what that mistake would give; a plane that equals nothing has no name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .selfcheck import relative

if TYPE_CHECKING:
    from .parity import States

ROUNDED = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def name_mistake(have: torch.Tensor, states: States, b: int | None, *, tolerance: float) -> str | None:
    """What ``have`` [T, H] is, given that it is not boundary ``b`` (None: the final state after the norm); None for nothing known."""
    L = max(states.boundary)
    wanted = states.post if b is None else states.boundary[b]
    equal = [(d, text) for text, x in _candidates(states, b, L) if x.shape == have.shape and (d := relative(have, x)) <= tolerance]
    if equal:
        return min(equal)[1]
    x, y = have.float(), wanted.float()
    scale = float((x * y).sum() / y.pow(2).sum())
    if scale and relative(x, scale * y) <= tolerance:
        return f"is the reference times {scale:.4g}: a scaling (of embeddings, or muP) is applied twice or left out"
    for name, dtype in ROUNDED.items():
        rounding = relative(y.to(dtype), y)
        if torch.equal(x.to(dtype).float(), x) and relative(x, y) <= 30 * rounding:
            return f"holds values of {name} (rounding alone makes {rounding:.1g}): computed in {name}, or cast; compare at its tolerance"
    return None


def _candidates(states: States, b: int | None, L: int) -> list[tuple[str, torch.Tensor]]:
    found = [(_shift(j, b, L), x) for j, x in states.boundary.items() if j != b]
    if b is not None:
        found.append(("holds the final state after the norm (post for pre)", states.post))
        if b in states.unadded:
            found.append((f"holds the output of block {b - 1} without the residual", states.unadded[b]))
    found += [(f"holds what the attention of layer {j} gets: the state after its norm", x) for j, x in states.normed.items()]
    return found


def _shift(j: int, b: int | None, L: int) -> str:
    # HF's own hidden_states[L] is after the norm, so the last residual has no index there.
    what = f"HF's hidden_states[{j}]" if j < L else "the last residual before the final norm"
    if b is None:
        return f"holds {what}" + (" (pre for post)" if j == L else "")
    off = j - b
    by = "one layer" if abs(off) == 1 else f"{abs(off)} layers"
    return f"holds {what}: shifted by {by} ({'too late' if off > 0 else 'too early'})"
