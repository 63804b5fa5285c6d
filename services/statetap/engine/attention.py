"""What each layer's attention really received in one forward: the self-check's own way to read the residual stream.

In a pre-norm decoder that is the layer's norm of the stream at its boundary, whoever added the residual and in whichever kernel; in a
post-norm one (OLMo 2) the stream itself. It is read at another module, from another argument and by other code than the taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_ATTENTION = ("self_attn", "attention", "attn", "self_attention", "linear_attn", "mixer")
_NORM = ("input_layernorm", "attention_norm", "ln_1", "norm1", "attn_norm", "pre_attn_norm")


def attention_of(layer: Any) -> Any:
    """A layer's attention module, or None."""
    return _module(layer, _ATTENTION)


def norm_of(layer: Any) -> Any:
    """The norm before a layer's attention, or None where there is none (post-norm layers)."""
    return _module(layer, _NORM)


def _module(layer: Any, names: tuple[str, ...]) -> Any:
    found = (getattr(layer, name, None) for name in names)
    return next((m for m in found if isinstance(m, torch.nn.Module) and not isinstance(m, torch.nn.ModuleList)), None)


class AttentionInputs:
    """Hooks on the attention of all layers. ``seen``: layer -> a copy of what came in, [rows, H]; a layer whose input cannot be
    read (quantised by the norm's kernel, scattered over ranks) is not there. Nothing here communicates.

    ``wanted`` tells in which forward to look: copies of every layer's input in a warm-up of SGLang's own could fill a GPU.
    """

    def __init__(self, layers: Sequence[Any], hidden: int, wanted: Callable[[], bool]) -> None:
        self._hidden, self._wanted = hidden, wanted
        self.seen: dict[int, torch.Tensor] = {}
        self._handles = [
            module.register_forward_pre_hook(self._hook(i), with_kwargs=True)
            for i, layer in enumerate(layers)
            if (module := attention_of(layer)) is not None
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, i: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            if not self._wanted():
                return
            # By name where it is named; else the first tensor of hidden size (positions and ids are not floating).
            for value in (kwargs.get("hidden_states"), *args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[-1] == self._hidden:
                    self.seen[i] = value.detach().reshape(-1, self._hidden).clone()
                    return

        return hook
