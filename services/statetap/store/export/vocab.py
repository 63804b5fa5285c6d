"""How often tokens are supervised, and the draft vocabulary made from it: ``{d2t, t2d}`` as SpecForge and AngelSlim build theirs.

Source: ``process_token_dict_to_mappings`` of both. Where they break ties by chance, the lower id wins here.
"""

from __future__ import annotations

import io
from collections import Counter

import numpy as np
import numpy.typing as npt

from .base import Finish
from .files import write_file


class Counts:
    """Bounded by the vocabulary, whatever the number of rows."""

    def __init__(self) -> None:
        self._of: Counter[int] = Counter()

    def add(self, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> None:
        tokens, counts = np.unique(ids[mask.astype(bool)], return_counts=True)
        self._of.update(dict(zip(tokens.tolist(), counts.tolist(), strict=True)))

    @property
    def by_token(self) -> dict[int, int]:
        return dict(sorted(self._of.items()))


def draft_tokens(counts: dict[int, int], draft_vocab: int, vocab_size: int) -> list[int]:
    """The ``draft_vocab`` most frequent tokens, in the order of their ids; filled up with the lowest ids that were not seen."""
    seen = sorted(counts, key=lambda token: (-counts[token], token))[:draft_vocab]
    unseen = (token for token in range(vocab_size) if token not in counts)
    return sorted([*seen, *(token for token, _ in zip(unseen, range(draft_vocab - len(seen)), strict=False))])


def write_mapping(finish: Finish, path: str) -> None:
    """``d2t`` [draft_vocab] int64: target id minus draft id. ``t2d`` [vocab_size] bool: whether the draft has this token."""
    import torch

    counts = Counts()
    for _, ids, mask in finish.tokens():
        counts.add(ids, mask)
    tokens = torch.tensor(draft_tokens(counts.by_token, finish.draft_vocab, finish.vocab_size), dtype=torch.int64)
    t2d = torch.zeros(finish.vocab_size, dtype=torch.bool)
    t2d[tokens] = True
    file = io.BytesIO()
    torch.save({"d2t": tokens - torch.arange(len(tokens)), "t2d": t2d}, file)
    write_file(finish.out, path, file.getvalue())
