"""Checks of a row's states and tokens, in one pass over cache-sized blocks. What passes here may be called done.

Invariant: every value of every plane is looked at once, and the same bytes feed the file's hash while they are in the cache.
Numpy's reductions over blocks that stay in the cache are an order of magnitude faster than torch.isfinite over the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..contracts.errors import ErrorCode, RowError, StatetapError
from ..contracts.profile import ITEM_SIZES, CaptureProfile
from ..contracts.sample_format import CHUNK
from ..contracts.tensors import AUX, BLOCK, SIZES, Header, parse_header, state_planes

Bytes = npt.NDArray[np.uint8]
Update = Callable[[Any], object]
"""``update`` of a hash: takes anything with the buffer protocol."""

# dtype -> (unsigned word, signed word, sign bit, exponent bits). A value is not finite when all its exponent bits are set.
_WORDS: dict[str, tuple[Any, Any, int, int]] = {
    "BF16": (np.uint16, np.int16, 0x8000, 0x7F80),
    "F16": (np.uint16, np.int16, 0x8000, 0x7C00),
    "F32": (np.uint32, np.int32, 0x80000000, 0x7F800000),
    "F8_E4M3": (np.uint8, np.int8, 0x80, 0x7F),  # of it only all bits set are no number
}


def words_of(data: Bytes, dtype: str) -> npt.NDArray[Any]:
    """The same bytes as unsigned words of a value each."""
    return data.view(_WORDS[dtype][0])


@dataclass(frozen=True, kw_only=True)
class StateBlock:
    """Whole tokens of one tensor: bytes [start, stop) of the file, from ``token`` on, ``width`` planes a token."""

    name: str
    width: int
    token: int
    start: int
    stop: int


class StateChecker:
    """Looks at the states of one row, block by block: give each of :meth:`blocks` to :meth:`look`, then call :meth:`finish`.

    A row may be zero at boundary 0 (a padding token's embedding); a whole plane may not. ``dtype``: of the values, where it is not the profile's.
    """

    def __init__(self, profile: CaptureProfile, num_tokens: int, *, dtype: str | None = None) -> None:
        self._profile = profile
        self._num_tokens = num_tokens
        self._dtype = dtype or profile.dtype
        self._zero_rows: dict[str, int] = {}

    def blocks(self) -> Iterator[StateBlock]:
        """All states in file order, in blocks of :data:`CHUNK` bytes, or of one token where that is more."""
        at = BLOCK
        for name, width in state_planes(self._profile):
            token_bytes = width * self._profile.hidden * SIZES[self._dtype]
            step = max(1, CHUNK // token_bytes)
            for token in range(0, self._num_tokens, step):
                size = min(step, self._num_tokens - token) * token_bytes
                yield StateBlock(name=name, width=width, token=token, start=at, stop=at + size)
                at += size

    def look(self, block: StateBlock, data: Bytes) -> None:
        """Raises RowError ``nonfinite_states`` or ``zero_states``, naming plane and token."""
        unsigned, signed, sign, exponent = _WORDS[self._dtype]
        rows = data.view(unsigned).reshape(-1, self._profile.hidden)  # [tokens * width, H]: a row a token and plane
        # Two maxima see every value without a copy: among unsigned words the largest negative value is the maximum,
        # among signed words the largest positive one.
        if rows.max() >= sign | exponent or rows.view(signed).max() >= exponent:
            bad = ((rows & exponent) == exponent).any(axis=1)
            place, token = self._place(block, int(bad.argmax()))
            raise RowError(ErrorCode.NONFINITE_STATES, f"{place}: token {token} has a value that is not finite")
        for row in _zero_rows(rows, sign - 1):
            place, token = self._place(block, row)
            if place != "boundary 0":
                raise RowError(ErrorCode.ZERO_STATES, f"{place}: all {self._profile.hidden} values of token {token} are zero")
            self._zero_rows[place] = self._zero_rows.get(place, 0) + 1

    def finish(self) -> None:
        """Raises RowError ``zero_states`` for a plane of zeros."""
        for place, count in self._zero_rows.items():
            if count == self._num_tokens:
                raise RowError(ErrorCode.ZERO_STATES, f"{place}: all {count} tokens are zero")

    def _place(self, block: StateBlock, row: int) -> tuple[str, int]:
        token, plane = divmod(row, block.width)
        return (f"boundary {self._profile.boundaries[plane]}" if block.name == AUX else block.name), block.token + token


def check_states(profile: CaptureProfile, num_tokens: int, data: Bytes, update: Update | None = None) -> None:
    """All states of a row at once; ``data`` is the whole file (or its head up to the ids). Each block is given to ``update`` first.

    Raises:
        RowError: ``nonfinite_states`` or ``zero_states``.
    """
    checker = StateChecker(profile, num_tokens)
    for block in checker.blocks():
        view = data[block.start : block.stop]
        if update is not None:
            update(view.data)
        checker.look(block, view)
    checker.finish()


def largest_block(profile: CaptureProfile) -> int:
    """Bytes of the largest block of a row of this profile."""
    return max(CHUNK, max(width for _, width in state_planes(profile)) * profile.hidden * ITEM_SIZES[profile.dtype])


def _zero_rows(block: npt.NDArray[Any], magnitude: int) -> list[int]:
    """Indices of the rows of ``block`` that are zero (either sign). A row whose first value is not zero need not be read again."""
    first = block[:, 0] & magnitude
    if first.all():
        return []
    candidates = np.flatnonzero(first == 0)
    return candidates[~(block[candidates] & magnitude).any(axis=1)].tolist()


def check_tap_header(want: Header, head: bytes, size: int) -> None:
    """``head`` is the first block of a tap file of ``size`` bytes.

    Raises:
        RowError: ``shape_mismatch``, naming what differs.
    """
    if head != want.encode():
        try:
            got = parse_header(head)
        except StatetapError as e:
            raise RowError(e.code, f"tap file: {e.message}") from e
        for name, tensor in want.tensors.items():
            other = got.tensors.get(name)
            if other != tensor:
                found = f"{other.dtype} {list(other.shape)} at byte {other.start}" if other else "nothing"
                raise RowError(
                    ErrorCode.SHAPE_MISMATCH,
                    f"tap file: {name} is {found}, not {tensor.dtype} {list(tensor.shape)} at byte {tensor.start}",
                )
        if len(got.tensors) != len(want.tensors) or got.metadata != want.metadata:
            raise RowError(ErrorCode.SHAPE_MISMATCH, f"tap file: {sorted(got.tensors)} of {got.metadata}, not {want.metadata}")
    if size != want.size:
        raise RowError(ErrorCode.SHAPE_MISMATCH, f"tap file: {size} bytes, not {want.size}")


def check_ids(ids: npt.NDArray[np.int32], raw: Bytes) -> None:
    """Raises RowError ``token_mismatch`` with the first position at which the ids in the file differ."""
    got = raw.view(np.int32)
    if not np.array_equal(got, ids):
        at = int((got != ids).argmax())
        raise RowError(ErrorCode.TOKEN_MISMATCH, f"position {at} is token {got[at]}, not {ids[at]}")
