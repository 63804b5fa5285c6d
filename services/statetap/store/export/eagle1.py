"""EAGLE-1 (SafeAILab/EAGLE, ge_data): ``ge_data/data_17.ckpt``.

Read by ``list_files`` and ``CustomDataset`` of eagle/train/main.py, which takes *every* file below the folder for a row: so the rows have a folder
of their own, and nothing else ever lies in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...contracts.tensors import FINAL_POST, INPUT_IDS, LOSS_MASK
from .base import Final, Item
from .checkpoint import CheckpointFormat


class Eagle1(CheckpointFormat):
    """``input_ids`` [T] and ``loss_mask`` [T] int64, ``hidden_state`` [T, H] post-norm. There is no place for aux states."""

    name = "eagle1"
    title = "EAGLE-1"
    finals = ("post",)
    has_aux = False
    data = "ge_data"

    def path(self, item: Item) -> str:
        return f"{self.data}/data_{item.row}.ckpt"

    def content(self, item: Item, sample: Mapping[str, Any], final: Final) -> dict[str, Any]:
        return {"input_ids": sample[INPUT_IDS], "hidden_state": sample[FINAL_POST], "loss_mask": sample[LOSS_MASK]}
