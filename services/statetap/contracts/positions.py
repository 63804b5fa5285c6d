"""Positions whose states a job keeps: ``all``, ``loss_mask`` or ``last:N``.

``loss_mask`` keeps t where mask[t] or mask[t-1] is 1: trainers that shift the target and not the mask read the state after the last supervised
token too. Which those are of a row says store/positions.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ALL = "all"

PATTERN = r"^(all|loss_mask|last:[1-9][0-9]{0,8})$"


@dataclass(frozen=True)
class Positions:
    """``last``: the N of ``last:N``, else 0."""

    kind: str
    last: int = 0

    @classmethod
    def parse(cls, text: str) -> Positions:
        """Raises ValueError."""
        if not re.fullmatch(PATTERN, text):
            raise ValueError(f"{text!r} is not all, loss_mask, or last:N with N from 1 on, such as last:16")
        kind, _, n = text.partition(":")
        return cls(kind, int(n or 0))

    def most(self, rows: int, num_tokens: int) -> int:
        """Positions that are kept of so many rows with so many tokens together, at most."""
        return min(num_tokens, rows * self.last) if self.last else num_tokens
