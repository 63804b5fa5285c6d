"""The bytes of a sample file from a row's captured states, block by block, for the formats that are not the tap's bytes as they lie there.

Invariant: what is given out, one piece after the other, is the file; nothing of it is changed later, so it can be hashed and written as it comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..contracts.sample_format import Encoding, SampleFormat
from ..contracts.tensors import AUX
from .check import Bytes, StateBlock, words_of
from .fp8 import quantise
from .positions import Indices

Pieces = Iterator[Any]
"""Objects with the buffer protocol."""

ZSTD_LEVEL = 1  # higher ones gain nothing on float bits and cost much (docs/adr/0016)


class Encoder(Protocol):
    """Of one row: :meth:`head`, then :meth:`block` for each block of the states in file order, then :meth:`tail`."""

    def head(self) -> Pieces: ...

    def block(self, block: StateBlock, data: Bytes) -> Pieces: ...

    def tail(self) -> Pieces: ...


def encoder(format: SampleFormat, header: bytes, ids: Bytes, mask: Bytes, positions: Indices | None) -> Encoder:
    """``ids`` and ``mask`` as bytes; ``positions`` that are kept, None for all."""
    kind = {Encoding.RAW: _Raw, Encoding.FP8: _Fp8, Encoding.ZSTD: _Zstd}[Encoding(format.encoding)]
    return kind(format, header, ids, mask, positions)


class _Raw:
    def __init__(self, format: SampleFormat, header: bytes, ids: Bytes, mask: Bytes, positions: Indices | None) -> None:
        self._format, self._header, self._positions = format, header, positions
        self._small: list[npt.NDArray[Any]] = [ids, mask] if positions is None else [positions, ids, mask]
        self._columns = None if format.kept.boundaries == format.captured.boundaries else format.columns

    def head(self) -> Pieces:
        yield self._header

    def block(self, block: StateBlock, data: Bytes) -> Pieces:
        if len(kept := self._kept(block, data)):
            yield kept.reshape(-1)

    def tail(self) -> Pieces:
        yield from self._small

    def _kept(self, block: StateBlock, data: Bytes) -> Bytes:
        """[tokens, planes, bytes of a plane] of the positions and planes that are kept; of the block there may be none."""
        planes = data.reshape(-1, block.width, self._format.kept.hidden * self._format.item_size)
        if self._positions is not None:
            first, stop = np.searchsorted(self._positions, [block.token, block.token + len(planes)])
            planes = planes[self._positions[first:stop] - block.token]
        return planes if block.name != AUX or self._columns is None else planes[:, self._columns]


class _Fp8(_Raw):
    """Values first; the scales of all tensors behind them."""

    def __init__(self, format: SampleFormat, header: bytes, ids: Bytes, mask: Bytes, positions: Indices | None) -> None:
        super().__init__(format, header, ids, mask, positions)
        self._scales: list[Any] = []

    def block(self, block: StateBlock, data: Bytes) -> Pieces:
        dtype = self._format.captured.dtype
        if not len(kept := self._kept(block, data)):
            return
        values, scales = quantise(words_of(kept.reshape(-1), dtype).reshape(-1, self._format.kept.hidden), dtype)
        self._scales.append(scales)
        yield values.reshape(-1)

    def tail(self) -> Pieces:
        yield from self._scales
        yield from super().tail()


class _Zstd(_Raw):
    """One frame for header, positions, ids and mask, and one for each chunk of a tensor, with its bytes sorted by significance: exponents compress."""

    def __init__(self, format: SampleFormat, header: bytes, ids: Bytes, mask: Bytes, positions: Indices | None) -> None:
        super().__init__(format, header, ids, mask, positions)
        self._codec = pa.Codec("zstd", compression_level=ZSTD_LEVEL)
        self._name, self._pending, self._tokens = "", list[Bytes](), 0

    def head(self) -> Pieces:
        yield self._codec.compress(b"".join([self._header, *(x.tobytes() for x in self._small)]))

    def block(self, block: StateBlock, data: Bytes) -> Pieces:
        if block.name != self._name:
            yield from self.tail()
            self._name = block.name
        kept = self._kept(block, data)
        step = self._format.chunk_tokens(kept.shape[1])
        while len(kept):
            part, kept = kept[: step - self._tokens], kept[step - self._tokens :]
            self._pending.append(part)
            self._tokens += len(part)
            if self._tokens == step:
                yield self._chunk()
        if self._pending:  # the caller's buffer is used again for the next block
            self._pending[-1] = self._pending[-1].copy()

    def tail(self) -> Pieces:
        if self._pending:
            yield self._chunk()

    def _chunk(self) -> Any:
        data = np.concatenate(self._pending) if len(self._pending) > 1 else self._pending[0]
        self._pending, self._tokens = [], 0
        return self._codec.compress(by_significance(data.reshape(-1), self._format.item_size))


def by_significance(data: Bytes, item_size: int) -> Bytes:
    """The bytes of values of ``item_size`` bytes, all low ones first, the high ones last. Inverse: :func:`by_value`."""
    return np.ascontiguousarray(data.reshape(-1, item_size).T).reshape(-1)


def by_value(data: Bytes, item_size: int) -> Bytes:
    """Inverse of :func:`by_significance`."""
    return np.ascontiguousarray(data.reshape(item_size, -1).T).reshape(-1)
