"""What a reader gave, written down for the test to compare: called by the other files here, in the trainers' own environments."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import save_file


class Dump:
    """Tensors under ``<group>/<file or number>/<name>``, and whatever else as JSON."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self.said: dict[str, Any] = {}

    def add(self, place: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                self._tensors[f"{place}/{name}"] = value.detach().clone().contiguous()
            else:
                self.said[f"{place}/{name}"] = value

    def write(self, path: str) -> None:
        save_file(self._tensors, path, metadata={"said": json.dumps(self.said)})
