"""The check that an engine passes before it is READY: each boundary against what that layer's attention received in the same forward,
the final state against the norm's output, each with shifted controls that must differ.

Invariant: the values compared come by different code: ours from a hook before the layer, the others from the attention's own
argument and the stack's output; the norm between them is a formula. SGLang's own capture (``layers_to_capture``) confirms a boundary
whose attention cannot be read, and is never believed against an attention that agrees with the tap: that of Gemma 3 leaves out the
residual (0.5.23).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..contracts.tensors import AUX, FINAL_PRE
from .attention import AttentionInputs, norm_of
from .norms import normed
from .taps import ForwardPlan, Taps

logger = logging.getLogger(__name__)

DISTINCT = 3.0  # a shifted control must be so many times farther away than what it controls
TOLERANCE = {"F32": 1e-5, "BF16": 2e-2, "F16": 5e-3}

ATTENTION, OWN, NOTHING = "attention_input", "layers_to_capture", "none"


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b|| in fp32; 0 for equal tensors, inf where only b is zero."""
    a, b = a.float(), b.float()
    difference, norm = float((a - b).norm()), float(b.norm())
    return 0.0 if difference == 0.0 else difference / norm if norm else float("inf")


class SelfCheck:
    """Arms the taps for one probe forward; :attr:`result` is there after it."""

    def __init__(self, taps: Taps, *, allow_unchecked: bool) -> None:
        self._taps, self._allow_unchecked = taps, allow_unchecked
        self.result: dict[str, Any] | None = None
        self._notes: list[str] = []
        self._inputs: AttentionInputs | None = None
        # Before 0.5.22 there is no residual to add before layer 0, and SGLang's own capture of it raises.
        first = 1 if "residual" in inspect.signature(taps.stack.layers[0].forward).parameters else 0
        self._own_below = [b for b in taps.profile.boundaries if first <= b < taps.num_layers]

    def arm(self) -> None:
        stack = self._taps.stack
        self._inputs = AttentionInputs(stack.layers, self._taps.hidden, lambda: self._taps.capturing)
        if self._own_below and hasattr(stack, "layers_to_capture"):
            setter = getattr(stack, "set_eagle3_layers_to_capture", None)  # some stacks mark their layers in it
            if setter is not None:
                setter(list(self._own_below))
            else:
                stack.layers_to_capture = list(self._own_below)
            if sorted(stack.layers_to_capture) != sorted(self._own_below):
                self._notes.append(f"SGLang's own capture: {self._own_below} was set, {stack.layers_to_capture} reads back; not used")
                self._own_below = []
        self._taps.observe = self._compare

    def _disarm(self) -> None:
        self._taps.observe = None
        if self._inputs is not None:
            self._inputs.remove()
        stack = self._taps.stack
        if hasattr(stack, "layers_to_capture"):
            stack.layers_to_capture = []
            for layer in stack.layers:
                layer.__dict__.pop("_is_layer_to_capture", None)

    def _compare(self, buffers: dict[str, torch.Tensor], plan: ForwardPlan) -> None:
        taps, n, H = self._taps, plan.rows, self._taps.hidden
        output = taps.last_output
        self._disarm()
        planes = {b: buffers[AUX][:, k * H : (k + 1) * H] for k, b in enumerate(taps.profile.boundaries)}
        planes[taps.num_layers] = buffers[FINAL_PRE]
        seen = self._inputs.seen if self._inputs is not None else {}
        result = judge(
            planes=planes,
            # Fewer rows than the forward has are those of one rank, or an adapter's: nothing can be compared with them.
            inputs={i: x[:n] for i, x in seen.items() if x.shape[0] >= n},
            post=(output[0] if isinstance(output, tuple) else output).reshape(-1, H)[:n],
            norms=[*(norm_of(layer) for layer in taps.stack.layers), taps.norm],
            own=self._own(output, n),
            tolerance=TOLERANCE[taps.profile.dtype],
        )
        result["tokens"] = n
        result["notes"] = [*self._notes, *result["notes"]]
        if result["indistinct"] and not self._allow_unchecked:
            result["problems"] += [*result["indistinct"], "STATETAP_ENGINE_ALLOW_UNCHECKED=1 serves it all the same"]
        result["ok"] = not result["problems"]
        self.result = result
        logger.info("statetap: self-check %s: %s", "passed" if result["ok"] else "FAILED", result)

    def _own(self, output: Any, n: int) -> dict[int, torch.Tensor]:
        """SGLang's own capture, boundary -> [n, H]; empty where there is none."""
        if not (self._own_below and isinstance(output, tuple) and len(output) > 1 and len(output[1])):
            return {}
        H, states = self._taps.hidden, output[1]
        parts = list(states.split(H, -1)) if isinstance(states, torch.Tensor) else [x.reshape(-1, H) for x in states]
        if len(parts) != len(self._own_below):
            self._notes.append(f"SGLang's own capture gave {len(parts)} states for {len(self._own_below)} boundaries; not used")
            return {}
        return {b: part[:n] for b, part in zip(sorted(self._own_below), parts, strict=True) if part.shape[0] >= n}


def judge(
    *,
    planes: Mapping[int, torch.Tensor],
    inputs: Mapping[int, torch.Tensor],
    post: torch.Tensor,
    norms: Sequence[Any],
    own: Mapping[int, torch.Tensor],
    tolerance: float,
) -> dict[str, Any]:
    """What one forward says of the taps. T tokens, hidden size H, L layers.

    Args:
        planes: boundary -> what the tap holds, [T, H]; boundary L is always there.
        inputs: layer -> what its attention received, [T, H], where that can be read.
        post: what the stack gave back, after the final norm, [T, H].
        norms: the norm before each layer's attention (None: there is none), and the final norm: L + 1.
        own: SGLang's own capture, boundary -> [T, H], where there is one.

    Returns ``boundaries`` (error, shifted and by of each), ``final``, ``own_capture``, ``checked_by``, ``notes``, ``indistinct`` (what
    nothing could confirm) and ``problems`` (what is wrong).
    """
    L = len(norms) - 1
    reads = {**inputs, L: post}
    problems: list[str] = []
    indistinct: list[str] = []
    notes: list[str] = []
    checks: dict[str, dict[str, Any]] = {}

    def distance(plane: torch.Tensor, b: int) -> float | None:
        """How far ``plane`` is from being boundary ``b``, by what was read there; None where that cannot be told."""
        expected = normed(norms[b], plane) if b in reads else None
        return None if expected is None else relative(expected, reads[b])

    for b in sorted(planes):
        name, plane = ("the final state" if b == L else f"boundary {b}"), planes[b]
        error, by = distance(plane, b), ATTENTION
        others = {j: d for j in reads if j != b and (d := distance(plane, j)) is not None}
        if b < L and norms[b] is None and error is not None and min([error, *others.values()]) > tolerance:
            error = None  # no norm by a name that we know: that the input is the stream itself was only a guess
        if error is None and b in own:
            error, by = relative(plane, own[b]), OWN
            others = {j: relative(plane, own[j]) for j in own if j != b}
        if error is None:
            what = f"final norm {type(norms[b]).__name__}" if b == L else "layer's attention or norm"
            indistinct.append(f"nothing can confirm {name}: its {what} is not one that the self-check can read")
            checks[str(b)] = {"error": None, "shifted": None, "by": NOTHING}
            continue
        matches = {j: d for j, d in others.items() if d <= tolerance}
        if not others:  # this is the only place that was read: the other planes here, or the plane without the norm
            others = {j: relative(planes[j], own[b]) if by == OWN else distance(planes[j], b) or 0.0 for j in planes if j != b}
            others = others or {b: relative(plane, reads[b])}
        # One layer off is the mistake that is made: the neighbours are the controls, the nearest that can be read.
        near = sorted(others, key=lambda j: abs(j - b))[:2]
        shifted = min((others[j] for j in near), default=0.0)
        checks[str(b)] = {"error": error, "shifted": shifted, "by": by}
        if error > tolerance:
            problems.append(
                f"{name} differs from {_WHAT[by] if b < L else 'the output of the norm'} by {error:.2g} (relative)"
                + _mistake(plane, reads.get(b), matches, L)
            )
        elif shifted <= DISTINCT * error or shifted == 0.0:
            indistinct.append(f"the shifted control of {name} differs by {shifted:.2g} only (the state by {error:.2g})")
    own_errors = {b: relative(planes[b], own[b]) for b in sorted(own)}
    for b, error in own_errors.items():
        check = checks[str(b)]
        if error > tolerance and check["by"] == ATTENTION and check["error"] <= tolerance:
            notes.append(
                f"SGLang's own capture of boundary {b} differs by {error:.2g} and is wrong: what the attention got agrees with the tap"
            )
    below = {c["by"] for b, c in checks.items() if b != str(L)}
    return {
        "tolerance": tolerance,
        "checked_by": "+".join(sorted(below)) or "final_norm",
        "final": checks.pop(str(L)),
        "boundaries": checks,
        "own_capture": {str(b): error for b, error in own_errors.items()},
        "notes": notes,
        "indistinct": indistinct,
        "problems": problems,
    }


_WHAT = {ATTENTION: "what its layer's attention received", OWN: "SGLang's own read"}


def _mistake(plane: torch.Tensor, read: torch.Tensor | None, matches: Mapping[int, float], L: int) -> str:
    """The mistake's name, where it has one."""
    if matches:
        j = min(matches, key=lambda j: matches[j])
        return f": it holds boundary {j}" + (" (the last)" if j == L else "")
    if read is not None and relative(plane, read) <= 1e-5:
        return ": it holds the state after the norm"
    return ""
