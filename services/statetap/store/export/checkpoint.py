"""Formats whose files are ``torch.save``d dicts.

Invariant: a file holds tensors, numbers, text and nothing else, so ``torch.load(weights_only=True)`` reads it; and each tensor brings its own
bytes only, not the storage that it is a view of.
"""

from __future__ import annotations

from typing import Any, BinaryIO

import torch

from .base import Format


class CheckpointFormat(Format):
    def save(self, content: dict[str, Any], file: BinaryIO) -> None:
        torch.save({name: own(value) if isinstance(value, torch.Tensor) else value for name, value in content.items()}, file)


def own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and alone in its storage: torch.save writes whole storages."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
