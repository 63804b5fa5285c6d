"""float8_e4m3fn with one scale a row: half the bytes of BF16. numpy alone, so that a worker needs no torch; a test holds it equal to torch's cast.

Format: 1 sign, 4 exponent (bias 7), 3 mantissa bits, no infinity, largest 448 (https://arxiv.org/abs/2209.05433). A scale a token and plane, as
speculators' FP8 connector has it: states have a few coordinates that are hundreds of times the others, and each token its own.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

MAX = 448.0
_MAX_WORD = 0x43E0  # of BF16
_TINY = np.float32(np.finfo(np.float32).tiny)  # a smaller scale has no inverse in float32
_MAGNITUDE = {"BF16": 0x7FFF, "F16": 0x7FFF, "F32": 0x7FFFFFFF}


def quantise(rows: npt.NDArray[Any], dtype: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """(values [n, H], scales [n]) of finite rows [n, H], given as unsigned words of ``dtype``: row = value * scale, rounded to nearest even."""
    largest = _to_float32((rows & rows.dtype.type(_MAGNITUDE[dtype])).max(axis=1), dtype)
    scales = np.where(largest > 0, np.maximum(largest / np.float32(MAX), _TINY), np.float32(1))
    scaled = _to_float32(rows, dtype)
    scaled *= (np.float32(1) / scales)[:, None]
    words = scaled.view(np.uint32)
    # The upper half, and its last bit set where the lower half has any: of so many bits more than the result has, a second rounding is exact.
    upper = (words >> 16).astype(np.uint16)
    upper |= words.astype(np.uint16) != 0
    return np.take(_table(), upper, mode="clip"), scales  # clip: nothing is out of range, and the check costs as much as the rest


def _to_float32(words: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """A new array."""
    if dtype == "BF16":
        wide = words.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return words.view({"F16": np.float16, "F32": np.float32}[dtype]).astype(np.float32)


@functools.cache
def _table() -> npt.NDArray[np.uint8]:
    """e4m3 bits of each BF16 value [65536], rounded to nearest even, at most the largest; a NaN's entry is never looked at."""
    words = np.minimum(np.arange(1 << 15, dtype=np.uint32), _MAX_WORD)
    magnitude = (words << 16).view(np.float32).astype(np.float64)
    exponent = np.where(magnitude < 2.0**-6, -6, np.frexp(magnitude)[1] - 1)  # below 2**-6 the steps stay as they are
    steps = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int64)  # [8, 16] of a normal number; 16 is the next exponent's first
    code = ((exponent + 6) * 8 + steps).astype(np.uint8)
    return np.concatenate([code, code | np.uint8(0x80)])
