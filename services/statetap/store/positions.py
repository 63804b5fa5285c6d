"""Which positions of a row are kept (contracts/positions.py), of one row and counted over many."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..contracts.positions import ALL, Positions

Indices = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]


def kept_positions(positions: Positions, mask: npt.NDArray[np.uint8]) -> Indices | None:
    """Of a row with the loss mask [T], ascending, [n] int32; None for all."""
    if positions.kind == ALL:
        return None
    if positions.last:
        return np.arange(max(len(mask) - positions.last, 0), len(mask), dtype=np.int32)
    return np.flatnonzero(_wanted(mask, np.zeros(min(len(mask), 1), np.int64))).astype(np.int32)


def count_kept(positions: Positions, masks: npt.NDArray[np.uint8], offsets: Counts) -> Counts:
    """Of rows whose masks lie behind one another, row i at [offsets[i], offsets[i + 1])."""
    lengths = np.diff(offsets)
    if positions.kind == ALL:
        return lengths
    if positions.last:
        return np.minimum(lengths, positions.last)
    # A row of no tokens has no first one: its offset is the next row's.
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(_wanted(masks, offsets[:-1][lengths > 0]), dtype=np.int64)])
    return sums[offsets[1:]] - sums[offsets[:-1]]


def _wanted(masks: npt.NDArray[np.uint8], starts: Counts) -> npt.NDArray[np.bool_]:
    """mask[t] or mask[t-1], where t-1 is in the same row."""
    wanted = masks != 0
    before = np.zeros_like(wanted)
    before[1:] = wanted[:-1]
    before[starts] = False
    return wanted | before
