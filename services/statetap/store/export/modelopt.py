"""NVIDIA ModelOpt: ``{conversation_id}.pt``, as its compute_hidden_states_hf.py writes them.

Read by ``OfflineSupervisedDataset`` of nvidia-modelopt 0.47.0 (weights only; the trainer takes every ``*.pt`` below the folder). Ids of a source need
not be unique nor fit into a file name, so a name is the id as far as it can be, and the row; the whole id stands in the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...contracts.tensors import AUX, FINAL_POST, INPUT_IDS, LOSS_MASK
from .base import Final, Item
from .checkpoint import CheckpointFormat

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST = 100


class ModelOpt(CheckpointFormat):
    """``input_ids`` [T] and ``loss_mask`` [T] int64, ``hidden_states`` [T, H], ``aux_hidden_states`` [T, K*H], ``conversation_id``, and
    ``hidden_states_prenorm``: True where the trainer has to apply the final norm itself."""

    name = "modelopt"
    title = "ModelOpt"
    finals = ("post", "pre")

    def path(self, item: Item) -> str:
        stem = _UNSAFE.sub("_", item.source_id)[:_LONGEST].strip("._-")
        return f"{stem}-{item.row}.pt" if stem else f"{item.row}.pt"

    def content(self, item: Item, sample: Mapping[str, Any], final: Final) -> dict[str, Any]:
        return {
            "input_ids": sample[INPUT_IDS],
            "hidden_states": sample[FINAL_POST],
            "aux_hidden_states": sample[AUX],
            "loss_mask": sample[LOSS_MASK],
            "conversation_id": item.source_id,
            "hidden_states_prenorm": final == "pre",
        }
