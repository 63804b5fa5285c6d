"""AngelSlim, EAGLE-3 offline: ``rows_0-5000/data_17.ckpt``, as its tools/generate_hidden_for_draft_model.py writes them.

Read by ``OfflineEagle3Dataset`` of angelslim 0.5.0: every ``*.ckpt`` below the folder, with torch.load's default (weights only). Its
tools/train_eagle3_offline.py refuses a folder without ``vocab_mapping.pt``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...contracts.tensors import AUX, FINAL_POST, INPUT_IDS, LOSS_MASK
from .base import Final, Item, rows_folder
from .checkpoint import CheckpointFormat

ROWS_PER_FOLDER = 5000


class AngelSlim(CheckpointFormat):
    """``input_ids`` [1, T] and ``loss_mask`` [1, T] int64, ``hidden_states`` [1, T, K*H], ``target_hiddens`` [1, T, H] post-norm."""

    name = "angelslim"
    title = "AngelSlim"
    finals = ("post",)
    mapping = "vocab_mapping.pt"

    def path(self, item: Item) -> str:
        return f"{rows_folder(item.row, ROWS_PER_FOLDER)}/data_{item.row}.ckpt"

    def content(self, item: Item, sample: Mapping[str, Any], final: Final) -> dict[str, Any]:
        return {
            "input_ids": sample[INPUT_IDS].unsqueeze(0),
            "loss_mask": sample[LOSS_MASK].unsqueeze(0),
            "hidden_states": sample[AUX].unsqueeze(0),
            "target_hiddens": sample[FINAL_POST].unsqueeze(0),
        }

    def notes(self, draft_vocab: int) -> list[str]:
        return [] if draft_vocab else ["AngelSlim's trainer refuses a folder without vocab_mapping.pt: --draft-vocab N writes it"]
