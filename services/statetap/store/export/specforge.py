"""SpecForge, EAGLE-3 offline: ``rows_0-2000/data_17.ckpt`` (or ``.ckpt.gz``), as its scripts/prepare_hidden_states.py writes them.

Read by ``OfflineManifestReader`` and ``OfflineEagle3Dataset`` of specforge 0.2.0: every file below the folder that ends in .ckpt or .ckpt.gz, in the
order of the sorted paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...contracts.tensors import AUX, FINAL_POST, INPUT_IDS, LOSS_MASK
from .base import Final, Item, rows_folder
from .checkpoint import CheckpointFormat

ROWS_PER_FOLDER = 2000


class SpecForge(CheckpointFormat):
    """``input_ids`` [T] and ``loss_mask`` [T] int64, ``hidden_state`` [1, T, H] post-norm, ``aux_hidden_state`` [1, T, K*H]."""

    name = "specforge"
    title = "SpecForge"
    finals = ("post",)
    can_gzip = True
    mapping = "vocab_mapping/vocab_mapping.pt"

    def path(self, item: Item) -> str:
        return f"{rows_folder(item.row, ROWS_PER_FOLDER)}/data_{item.row}.ckpt"

    def content(self, item: Item, sample: Mapping[str, Any], final: Final) -> dict[str, Any]:
        return {
            "input_ids": sample[INPUT_IDS],
            "loss_mask": sample[LOSS_MASK],
            "hidden_state": sample[FINAL_POST].unsqueeze(0),
            "aux_hidden_state": sample[AUX].unsqueeze(0),
        }
