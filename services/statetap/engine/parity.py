"""Compares files of a job with transformers' forward on the same weights, boundary by boundary, with shifted controls.

Invariant: the reference shares no code with the capture: transformers' own model, one row at a time, states read by hooks on its
layers. A control (the neighbouring boundary) that does *not* differ fails the comparison too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..contracts.profile import CaptureProfile
from ..contracts.tensors import AUX, FINAL_POST, FINAL_PRE, INPUT_IDS
from .selfcheck import relative


@dataclass(kw_only=True)
class Parity:
    """Worst relative errors over the rows compared; ``shifted`` is the smallest distance to a neighbouring boundary."""

    rows: int = 0
    tokens: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    shifted: float = float("inf")

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=float("inf"))


class Reference:
    """transformers' model of a folder, in fp32 unless told otherwise, on the CPU."""

    def __init__(self, model: str, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as hf_logging

        hf_logging.disable_progress_bar()
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, trust_remote_code=trust_remote_code).eval()
        base = self.model.model
        self.base: Any = getattr(base, "language_model", base)

    def states(self, input_ids: list[int]) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """Boundary -> [T, H] for all b in [0, L], and the final state after the norm [T, H]."""
        base, got, handles = self.base, {}, []
        for b, layer in enumerate(base.layers):

            def keep(module: Any, args: Any, kwargs: Any, b: int = b) -> None:
                got[b] = (args[0] if args else kwargs["hidden_states"])[0].detach().clone()

            handles.append(layer.register_forward_pre_hook(keep, with_kwargs=True))

        def keep_final(module: Any, args: Any) -> None:
            got[len(base.layers)] = args[0][0].detach().clone()

        handles.append(base.norm.register_forward_pre_hook(keep_final))
        try:
            with torch.no_grad():
                post = base(torch.tensor([input_ids], device=self.model.device)).last_hidden_state[0]
        finally:
            for h in handles:
                h.remove()
        return got, post


def compare_files(files: Iterable[Path], profile: CaptureProfile, reference: Reference) -> Parity:
    """Compare sample files (or tap files) of ``profile`` with the reference."""
    result, H = Parity(), profile.hidden
    for path in files:
        with safe_open(str(path), "pt") as f:
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118  (not a dict)
        ids = tensors[INPUT_IDS].tolist()
        want, post = reference.states(ids)
        for k, b in enumerate(profile.boundaries):
            _take(result, str(b), tensors[AUX][:, k * H : (k + 1) * H], want, b)
        if FINAL_PRE in tensors:
            _take(result, "final_pre", tensors[FINAL_PRE], want, profile.num_layers)
        if FINAL_POST in tensors:
            error = relative(tensors[FINAL_POST], post)
            result.errors["final_post"] = max(result.errors.get("final_post", 0.0), error)
        result.rows += 1
        result.tokens += len(ids)
    return result


def _take(result: Parity, name: str, have: torch.Tensor, want: dict[int, torch.Tensor], b: int) -> None:
    error = relative(have, want[b]) if have.shape == want[b].shape else float("inf")
    result.errors[name] = max(result.errors.get(name, 0.0), error)
    if have.shape == want[b].shape:
        result.shifted = min(result.shifted, *(relative(have, want[n]) for n in (b - 1, b + 1) if n in want))
