"""vLLM's hidden-states connector: ``{req_id}.safetensors``, with the row as the request id.

Read by ``FileTransfer`` of hs-connectors 0.9.0. The format has no place for a loss mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import torch
from safetensors.torch import save

from ...contracts.tensors import AUX, FINAL_POST, INPUT_IDS
from .base import Final, Format, Item


class VllmFormat(Format):
    """``hidden_states`` [T, K+1, H], aux states first and the pre-norm final one last, and ``token_ids`` [T] int64."""

    finals = ("pre",)

    def content(self, item: Item, sample: Mapping[str, Any], final: Final) -> dict[str, Any]:
        last = sample[FINAL_POST]  # the loader's one name for the final state that it was asked for
        T, H = last.shape
        return {"hidden_states": torch.cat([sample[AUX].view(T, -1, H), last.unsqueeze(1)], dim=1), "token_ids": sample[INPUT_IDS]}

    def save(self, content: dict[str, Any], file: BinaryIO) -> None:
        file.write(save(content))

    def layer_ids(self, boundaries: Sequence[int], num_layers: int) -> list[int | None]:
        """vLLM's ids are boundaries; the last plane is that of id L, before the norm."""
        return [*boundaries, num_layers]


class Vllm(VllmFormat):
    name = "vllm"
    title = "vLLM"
    three = False

    def path(self, item: Item) -> str:
        return f"{item.row}.safetensors"

    def notes(self, draft_vocab: int) -> list[str]:
        return ["vLLM's files have no loss mask: it stays with the job"]
