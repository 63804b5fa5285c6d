"""The check that an engine passes before it is READY: each boundary against SGLang's own capture of the same forward, the final
state against the norm's output, each with a shifted control that must differ.

Invariant: the tap's values and the values they are compared with come by different code: ours from a hook before the layer,
SGLang's from inside its stages; the norm is computed by the formula that readers will use.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

from ..contracts.errors import EngineError, ErrorCode
from ..contracts.profile import CaptureProfile
from ..contracts.tensors import AUX, FINAL_PRE
from .taps import ForwardPlan, Taps

logger = logging.getLogger(__name__)

DISTINCT = 3.0  # a shifted control must be so many times farther away than what it controls
TOLERANCE = {"F32": 1e-5, "BF16": 2e-2, "F16": 5e-3}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b|| in fp32; 0 for equal tensors, inf where only b is zero."""
    a, b = a.float(), b.float()
    difference, norm = float((a - b).norm()), float(b.norm())
    return 0.0 if difference == 0.0 else difference / norm if norm else float("inf")


def apply_norm(x: torch.Tensor, weight: torch.Tensor, profile: CaptureProfile) -> torch.Tensor:
    """post from pre by the readers' formula: [T, H] -> [T, H] in fp32."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + profile.norm.eps)
    w = weight.float()
    return y * (1.0 + w if profile.norm.variant == "gemma_rmsnorm" else w)


class SelfCheck:
    """Arms the taps for one probe forward; :attr:`result` is there after it."""

    def __init__(self, taps: Taps, *, allow_unchecked: bool) -> None:
        self._taps, self._allow_unchecked = taps, allow_unchecked
        self.result: dict[str, Any] | None = None
        self._below = [b for b in taps.profile.boundaries if b < taps.num_layers]
        # Before 0.5.22 there is no residual to add before layer 0, and SGLang's own capture of it raises: the embedding's output it is.
        self._own_below = [b for b in self._below if b > 0 or "residual" not in inspect.signature(taps.stack.layers[0].forward).parameters]
        self._embedded: torch.Tensor | None = None
        self._handle: Any = None

    def arm(self) -> None:
        stack = self._taps.stack
        if self._own_below and hasattr(stack, "layers_to_capture"):
            setter = getattr(stack, "set_eagle3_layers_to_capture", None)  # some stacks mark their layers in it
            if setter is not None:
                setter(list(self._own_below))
            else:
                stack.layers_to_capture = list(self._own_below)
            if sorted(stack.layers_to_capture) != sorted(self._own_below):
                raise EngineError(
                    ErrorCode.SELF_CHECK_FAILED, f"layers_to_capture reads back as {stack.layers_to_capture}, {self._own_below} was set"
                )
        if self._own_below != self._below and hasattr(stack, "embed_tokens"):
            self._handle = stack.embed_tokens.register_forward_hook(self._keep_embedded)
        self._taps.observe = self._compare

    def _keep_embedded(self, module: Any, args: Any, output: Any) -> None:
        self._embedded = output.detach().clone()

    def _disarm(self) -> None:
        self._taps.observe = None
        if self._handle is not None:
            self._handle.remove()
        stack = self._taps.stack
        if hasattr(stack, "layers_to_capture"):
            stack.layers_to_capture = []
            for layer in stack.layers:
                layer.__dict__.pop("_is_layer_to_capture", None)

    def _compare(self, buffers: dict[str, torch.Tensor], plan: ForwardPlan) -> None:
        output, profile, H = self._taps.last_output, self._taps.profile, self._taps.hidden
        self._disarm()
        n = plan.rows
        tolerance = TOLERANCE[profile.dtype]
        result: dict[str, Any] = {"tokens": n, "tolerance": tolerance, "boundaries": {}}
        problems, indistinct = [], []
        planes = {b: buffers[AUX][:, k * H : (k + 1) * H] for k, b in enumerate(profile.boundaries)}
        planes[profile.num_layers] = buffers[FINAL_PRE]
        order = sorted(planes)
        own = self._own(output, n)
        if own is None and self._below:
            indistinct.append(f"{type(self._taps.stack).__name__} offers no second way to read its states")
        for b, theirs in (own or {}).items():
            error = relative(planes[b], theirs)
            # The nearest other boundary that we hold: one layer off is the mistake that is made.
            control = relative(planes[order[order.index(b) + 1]], theirs)
            result["boundaries"][str(b)] = {"error": error, "shifted": control}
            if error > tolerance:
                problems.append(f"boundary {b} differs from SGLang's own read by {error:.2g} (relative)")
            if control <= DISTINCT * error or control == 0.0:
                indistinct.append(f"the shifted control of boundary {b} differs by {control:.2g} only (the boundary by {error:.2g})")
        hidden = output[0] if isinstance(output, tuple) else output
        post = hidden.reshape(-1, H)[:n]
        error = relative(apply_norm(buffers[FINAL_PRE], self._taps.norm.weight.data, profile), post)
        # What would be read one or more blocks too early; where no other boundary is held, pre taken for post.
        early = apply_norm(planes[order[-2]], self._taps.norm.weight.data, profile) if len(order) > 1 else buffers[FINAL_PRE]
        control = relative(early, post)
        result["final"] = {"error": error, "shifted": control}
        if error > tolerance:
            problems.append(f"the final state, normed, differs from the model's output by {error:.2g} (relative)")
        if control <= DISTINCT * error or control == 0.0:
            indistinct.append(f"the shifted control of the final state differs by {control:.2g} only (the state by {error:.2g})")
        result["checked_by"] = "layers_to_capture" if own else "none"
        if indistinct and not self._allow_unchecked:
            problems += [*indistinct, "STATETAP_ENGINE_ALLOW_UNCHECKED=1 serves it all the same"]
        result["indistinct"] = indistinct
        result["problems"] = problems
        result["ok"] = not problems
        self.result = result
        logger.info("statetap: self-check %s: %s", "passed" if not problems else "FAILED", result)

    def _own(self, output: Any, n: int) -> dict[int, torch.Tensor] | None:
        """Reads by other code than ours, boundary -> [n, H], or None where there are none."""
        H, own = self._taps.hidden, {}
        if self._embedded is not None:
            own[0] = self._embedded.reshape(-1, H)[:n]
        if isinstance(output, tuple) and len(output) > 1 and len(output[1]):
            states = output[1]
            parts = list(states.split(H, -1)) if isinstance(states, torch.Tensor) else [x.reshape(-1, H) for x in states]
            own |= {b: part[:n] for b, part in zip(sorted(self._own_below), parts, strict=True)}
        return own if len(own) == len(self._below) else None
