"""Compares files of a job with transformers' forward on the same weights, boundary by boundary, with shifted controls, and names the
mistake where there is one.

Invariant: the reference shares no code with the capture: transformers' own model, one row at a time, states read by hooks on its
layers. A control (the neighbouring boundary) that does *not* differ fails the comparison too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..contracts.profile import CaptureProfile
from ..contracts.tensors import AUX, FINAL_POST, FINAL_PRE, INPUT_IDS, POSITIONS
from .mistakes import name_mistake
from .selfcheck import relative

TOLERANCE = {"F32": 1e-5, "BF16": 5e-2, "F16": 1e-2}
"""Largest relative error by the dtype of the states: of whole models against a reference in fp32, and not of one norm as in the
self-check (bf16 rounds in every block)."""


@dataclass(kw_only=True)
class Parity:
    """Worst relative errors over the rows compared; ``shifted`` is the smallest distance to a neighbouring boundary; ``mistakes`` says
    of each plane that is off what it holds instead, where that has a name."""

    tolerance: float
    rows: int = 0
    tokens: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    shifted: float = float("inf")
    mistakes: dict[str, str] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=float("inf"))

    @property
    def ok(self) -> bool:
        return self.rows > 0 and self.worst <= self.tolerance < self.shifted


@dataclass(kw_only=True)
class States:
    """What transformers computes for one row of T tokens, each [T, H]. L = ``max(boundary)``."""

    boundary: dict[int, torch.Tensor]
    post: torch.Tensor
    # what mistakes are told by, where it was asked for
    normed: dict[int, torch.Tensor]  # layer -> what its attention gets
    unadded: dict[int, torch.Tensor]  # boundary -> the last block's output without the residual

    def at(self, positions: torch.Tensor) -> States:
        """Of these positions [n], each [n, H]."""
        index = positions.long()
        some = ({b: x[index] for b, x in held.items()} for held in (self.boundary, self.normed, self.unadded))
        boundary, normed, unadded = some
        return States(boundary=boundary, post=self.post[index], normed=normed, unadded=unadded)


_FEED_FORWARD = ("post_feedforward_layernorm", "mlp", "block_sparse_moe", "feed_forward")  # the last one before the residual is added
_NORMS = ("norm", "final_layernorm", "ln_f")


def _first(module: Any, names: tuple[str, ...]) -> Any:
    return next((getattr(module, n) for n in names if hasattr(module, n)), None)


class Reference:
    """transformers' model of a folder, in fp32 unless told otherwise, on the CPU."""

    def __init__(self, model: str, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> None:
        import transformers
        from transformers.utils import logging as hf_logging

        hf_logging.disable_progress_bar()
        config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        # A vision model is not among the auto class's causal ones.
        named = getattr(transformers, (config.architectures or [""])[0], None)
        cls = named or transformers.AutoModelForCausalLM
        remote = {} if named else {"trust_remote_code": trust_remote_code}
        self.model: Any = cls.from_pretrained(model, dtype=dtype, **remote).eval()
        base = self.model
        while not hasattr(base, "layers"):  # Model -> its text part -> that one's stack
            base = getattr(base, "language_model", None) or base.model
        self.base: Any = base

    def states(self, input_ids: list[int], *, at: torch.Tensor | None = None, detail: bool = False) -> States:
        """One forward over ``input_ids``; ``at``: these positions [n] only; ``detail``: with what only mistakes are told by."""
        base, L = self.base, len(self.base.layers)
        found = States(boundary={}, post=torch.empty(0), normed={}, unadded={})
        handles = []

        def before(module: Any, into: dict[int, torch.Tensor], key: int) -> None:
            def keep(module: Any, args: Any, kwargs: Any) -> None:
                into[key] = (args[0] if args else kwargs["hidden_states"])[0].detach().clone()

            handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))

        def after(module: Any, into: dict[int, torch.Tensor], key: int) -> None:
            def keep(module: Any, args: Any, output: Any) -> None:
                x = output[0] if isinstance(output, tuple) else output
                into[key] = x.detach().reshape(-1, x.shape[-1]).clone()

            handles.append(module.register_forward_hook(keep))

        for b, layer in enumerate(base.layers):
            before(layer, found.boundary, b)
            if not detail:
                continue
            if hasattr(layer, "input_layernorm"):
                after(layer.input_layernorm, found.normed, b)
            if (last := _first(layer, _FEED_FORWARD)) is not None:
                after(last, found.unadded, b + 1)
        before(_first(base, _NORMS), found.boundary, L)
        try:
            with torch.no_grad():
                found.post = base(torch.tensor([input_ids], device=self.model.device)).last_hidden_state[0]
        finally:
            for h in handles:
                h.remove()
        return found if at is None else found.at(at)


Tensors = dict[str, torch.Tensor]


def compare_files(
    files: Iterable[Path],
    profile: CaptureProfile,
    reference: Reference,
    *,
    tolerance: float | None = None,
    load: Callable[[Path], Tensors] = load_file,
) -> Parity:
    """Compare sample files (or tap files) of ``profile`` with the reference; the default tolerance is that of the states' dtype. ``load``: how
    a file's tensors are read, by the names and shapes of a raw one."""
    result, H, L = Parity(tolerance=tolerance or TOLERANCE[profile.dtype]), profile.hidden, profile.num_layers
    for path in files:
        tensors = load(path)
        ids = tensors[INPUT_IDS].tolist()
        at = tensors.get(POSITIONS)
        states = reference.states(ids, at=at)
        planes: list[tuple[str, torch.Tensor, int | None]] = [
            (str(b), tensors[AUX][:, k * H : (k + 1) * H], b) for k, b in enumerate(profile.boundaries)
        ]
        planes += [
            (name, tensors[key], b) for name, key, b in (("final_pre", FINAL_PRE, L), ("final_post", FINAL_POST, None)) if key in tensors
        ]
        wrong = [(name, have, b) for name, have, b in planes if not _equal(result, name, have, states, b) and name not in result.mistakes]
        if wrong:
            states = reference.states(ids, at=at, detail=True)
        for name, have, b in wrong:
            mistake = name_mistake(have, states, b, tolerance=result.tolerance)
            if mistake is not None:
                result.mistakes[name] = mistake
        result.rows += 1
        result.tokens += len(ids)
    return result


def _equal(result: Parity, name: str, have: torch.Tensor, states: States, b: int | None) -> bool:
    """Take one plane of one row into ``result``; ``b`` None is the state after the final norm."""
    want = states.post if b is None else states.boundary[b]
    if have.shape != want.shape:
        result.errors[name] = float("inf")
        result.mistakes[name] = f"has the shape {list(have.shape)}, the reference {list(want.shape)}"
        return False
    error = relative(have, want)
    result.errors[name] = max(result.errors.get(name, 0.0), error)
    if b is not None:
        result.shifted = min(result.shifted, *(relative(have, states.boundary[n]) for n in (b - 1, b + 1) if n in states.boundary))
    return error <= result.tolerance
