"""What a sample file holds of what its engine captures, and how: the boundaries that a job keeps, and the encoding of their states.

Invariant: the file's layout and size (an upper bound of it for ``zstd``) follow from the format and the number of tokens alone. Two jobs of
one :attr:`SampleFormat.format_id` write the same file for the same row, whatever else their engines captured.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from enum import StrEnum

from .profile import ITEM_SIZES, CaptureProfile
from .tensors import BLOCK, INPUT_IDS, LOSS_MASK, Header, Plane, header, state_planes

CHUNK = 512 * 1024  # bytes of states that are looked at, encoded and compressed at once: fits into the L2 cache

SCALES = "_scales"
"""Suffix of an FP8 tensor's scales, [T, planes] float32: state = value * scale."""
PLANES = "_byte_planes"
"""Suffix of a tensor of the zstd encoding, U8: chunk by chunk, first the low bytes of all values, then the next, up to the high ones."""

_FRAME = 64  # a zstd frame of up to CHUNK bytes is at most so much longer than its content and 1/256 of it (ZSTD_COMPRESSBOUND)


class Encoding(StrEnum):
    """How states are kept."""

    RAW = "raw"  # as captured
    FP8 = "fp8"  # float8_e4m3fn with a scale a token and plane: half of BF16, and lossy
    ZSTD = "zstd"  # as captured, compressed: the size is known afterwards only


@dataclass(frozen=True)
class SampleFormat:
    """``boundaries``: those of the captured ones that are kept, in file order; () for all as they were captured."""

    captured: CaptureProfile
    boundaries: tuple[int, ...] = ()
    encoding: str = Encoding.RAW.value

    @functools.cached_property
    def kept(self) -> CaptureProfile:
        """The profile that the file shows: that of an engine which captures only what is kept."""
        return replace(self.captured, boundaries=self.boundaries) if self.boundaries else self.captured

    @property
    def plain(self) -> bool:
        """Whether the states are the tap's bytes as they lie there."""
        return self.encoding == Encoding.RAW and self.kept.boundaries == self.captured.boundaries

    @property
    def exact(self) -> bool:
        """Whether :meth:`bytes` is the size of the file, and not an upper bound."""
        return self.encoding != Encoding.ZSTD

    @functools.cached_property
    def columns(self) -> list[int]:
        """Positions of the kept boundaries among the captured ones."""
        return [self.captured.boundaries.index(b) for b in self.kept.boundaries]

    @property
    def format_id(self) -> str:
        """Equal for jobs that can take each other's files."""
        return f"{self.kept.profile_id}-{self.encoding}"

    @property
    def suffix(self) -> str:
        return ".zst" if self.encoding == Encoding.ZSTD else ""

    @property
    def item_size(self) -> int:
        """Bytes of a captured value."""
        return ITEM_SIZES[self.captured.dtype]

    def chunk_tokens(self, width: int) -> int:
        """Tokens in a chunk of a tensor of ``width`` planes, in the file."""
        return max(1, CHUNK // (width * self.kept.hidden * self.item_size))

    def header(self, num_tokens: int, *, row: int, source_id: str, ids_xxh3: str, schema_version: int) -> Header:
        """Header of the sample file; of what the file holds when it is decompressed, where it is compressed."""
        metadata = {
            "row": str(row),
            # Bounded, so that a user's long id cannot push the header out of its block; the whole one stands in manifest.parquet.
            "source_id": source_id.encode("ascii", "backslashreplace").decode()[:512],
            "boundaries": ",".join(map(str, self.kept.boundaries)),
            "final": self.kept.final,
            "profile": self.kept.profile_id,
            "ids_xxh3": ids_xxh3,
            "schema_version": str(schema_version),
        }
        if self.encoding != Encoding.RAW:
            metadata |= {"encoding": self.encoding, "dtype": self.kept.dtype}
        return header(self._tensors(), num_tokens, metadata)

    def _tensors(self) -> list[Plane]:
        states, hidden = state_planes(self.kept), self.kept.hidden
        ids = [Plane(name=INPUT_IDS, dtype="I32"), Plane(name=LOSS_MASK, dtype="U8")]
        if self.encoding == Encoding.FP8:
            values = [Plane(name=name, dtype="F8_E4M3", columns=width * hidden) for name, width in states]
            return [*values, *(Plane(name=name + SCALES, dtype="F32", columns=width) for name, width in states), *ids]
        if self.encoding == Encoding.ZSTD:
            # The ids come first: they are read without decompressing the states.
            size = hidden * self.item_size
            return [*ids, *(Plane(name=name + PLANES, dtype="U8", columns=width * size, flat=True) for name, width in states)]
        return [*(Plane(name=name, dtype=self.kept.dtype, columns=width * hidden) for name, width in states), *ids]

    @functools.cached_property
    def costs(self) -> tuple[int, int]:
        """(bytes of a file without its tokens, bytes a token): :meth:`bytes` is linear in the tokens."""
        whole = sum(p.token_bytes for p in self._tensors())
        if self.exact:
            return BLOCK, whole
        widths = [width for _, width in state_planes(self.kept)]
        frames = sum(-(-_FRAME // self.chunk_tokens(width)) for width in widths)
        return BLOCK + BLOCK // 256 + _FRAME * (1 + len(widths)), whole + whole // 256 + 1 + frames

    def bytes(self, num_tokens: int) -> int:
        """Bytes of a sample file of so many tokens; at most so many where not :attr:`exact`."""
        base, per_token = self.costs
        return base + num_tokens * per_token
