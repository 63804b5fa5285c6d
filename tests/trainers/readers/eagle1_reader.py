"""EAGLE-1's dataset. Its train/main.py cannot be imported (it parses arguments and logs in to wandb), so ``list_files`` and ``CustomDataset`` stand
here to the letter, without the noise.

Source: https://github.com/SafeAILab/EAGLE at cb7e0841, eagle/train/main.py, Apache-2.0, Copyright 2025 SafeAI Lab (SAIL).
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from dump import Dump
from torch.utils.data import Dataset

train_config = {"max_len": 2048}


def list_files(path: str) -> list[str]:
    datapath = []
    for root, _directories, files in os.walk(path):
        for file in files:
            file_path = os.path.join(root, file)
            datapath.append(file_path)
    return datapath


class CustomDataset(Dataset):  # type: ignore[type-arg]
    def __init__(self, datapath: list[str]) -> None:
        self.data = datapath

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        data = torch.load(self.data[index])
        new_data: dict[str, Any] = {}
        hidden_state = data["hidden_state"][: train_config["max_len"]][None, :]
        input_ids = data["input_ids"][: train_config["max_len"]][None, :]
        loss_mask = data["loss_mask"][: train_config["max_len"]][None, :]

        length = hidden_state.shape[1]
        attention_mask = [1] * length
        loss_mask = loss_mask[0].tolist()
        loss_mask[-1] = 0

        input_ids_target = input_ids[:, 1:]
        zeropadding = torch.tensor([[0]])
        input_ids_target = torch.cat((input_ids_target, zeropadding), dim=1)

        target = hidden_state[:, 1:, :]
        zeropadding = torch.zeros(1, 1, target.shape[2])
        target = torch.cat((target, zeropadding), dim=1)
        loss_mask[-1] = 0
        new_data["attention_mask"] = attention_mask
        new_data["loss_mask"] = loss_mask
        new_data["target"] = target
        new_data["hidden_state_big"] = hidden_state
        new_data["input_ids"] = input_ids_target
        return new_data


for folder, out in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    dump = Dump()
    files = sorted(list_files(folder))
    dump.said["files"] = files
    data = CustomDataset(files)
    for i in range(len(data)):
        dump.add(f"dataset/{i}", data[i])
    dump.write(out)
