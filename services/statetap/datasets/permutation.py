"""A permutation of [0, n) that is computed, not stored: a Feistel network with cycle walking, keyed by a seed.

Invariant: for every n and seed it is a bijection, the same on every machine and in every version: only integer arithmetic modulo 2^64 and
BLAKE2b are in it. Memory does not depend on n.

A Feistel network of any round function is a bijection of [0, 2^2k); one that leads out of [0, n) is walked on until it is back inside
(Black & Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002), on average less than four times. The round function is
the finaliser of SplitMix64 (Steele et al., OOPSLA 2014): good for shuffling, not meant to hide anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

ROUNDS = 8
_U = np.uint64
_Words = npt.NDArray[np.uint64]
_MIX_1, _MIX_2 = _U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB)


class Permutation:
    """Of ``n`` >= 1 things, by ``seed`` (any non-negative integer)."""

    def __init__(self, n: int, seed: int) -> None:
        self.n = n
        half = max(1, ((n - 1).bit_length() + 1) // 2)
        self._half, self._mask, self._drop = _U(half), _U((1 << half) - 1), _U(64 - half)
        key = hashlib.blake2b(f"statetap shuffle 1 {seed} {n}".encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(key, "<u8").astype(_U)

    def forward(self, index: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Where each of ``index`` (of any shape, each in [0, n)) leads to."""
        return self._walk(index, self._encrypt)

    def backward(self, index: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Where each of ``index`` comes from: ``backward(forward(i)) == i``."""
        return self._walk(index, self._decrypt)

    def _walk(self, index: npt.ArrayLike, step: Callable[[_Words], _Words]) -> npt.NDArray[np.int64]:
        given = np.asarray(index, np.int64)
        if given.size and not (int(given.min()) >= 0 and int(given.max()) < self.n):
            raise IndexError(f"outside [0, {self.n})")
        x = step(given.reshape(-1).astype(_U))
        while (out := np.flatnonzero(x >= _U(self.n))).size:
            x[out] = step(x[out])
        return np.asarray(x.astype(np.int64).reshape(given.shape))

    def _encrypt(self, x: _Words) -> _Words:
        left, right = x >> self._half, x & self._mask
        for key in self._keys:
            left, right = right, left ^ self._round(right, key)
        return (left << self._half) | right

    def _decrypt(self, x: _Words) -> _Words:
        left, right = x >> self._half, x & self._mask
        for key in self._keys[::-1]:
            left, right = right ^ self._round(left, key), left
        return (left << self._half) | right

    def _round(self, x: _Words, key: np.uint64) -> _Words:
        x = x + key  # modulo 2^64, as all of it
        x = (x ^ (x >> _U(30))) * _MIX_1
        x = (x ^ (x >> _U(27))) * _MIX_2
        return (x ^ (x >> _U(31))) >> self._drop
