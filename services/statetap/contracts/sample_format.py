"""What a sample file holds of what its engine captures, and how: the boundaries and positions that a job keeps, and the encoding of their states.

Invariant: the file's layout and size (an upper bound of it for ``zstd``) follow from the format and the numbers of tokens and of kept positions alone. Two jobs of
one :attr:`SampleFormat.format_id` write the same file for the same row, whatever else their engines captured.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from enum import StrEnum

from .positions import ALL, Positions
from .profile import ITEM_SIZES, CaptureProfile
from .tensors import BLOCK, INPUT_IDS, LOSS_MASK, POSITIONS, Header, Plane, header, state_planes

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
    """``boundaries``: those of the captured ones that are kept, in file order; () for all as they were captured. ``positions``: see positions.py."""

    captured: CaptureProfile
    boundaries: tuple[int, ...] = ()
    encoding: str = Encoding.RAW.value
    positions: str = ALL

    @functools.cached_property
    def kept(self) -> CaptureProfile:
        """The profile that the file shows: that of an engine which captures only what is kept."""
        return replace(self.captured, boundaries=self.boundaries) if self.boundaries else self.captured

    @functools.cached_property
    def where(self) -> Positions:
        return Positions.parse(self.positions)

    @property
    def thinned(self) -> bool:
        """Whether the file holds states of some positions only."""
        return self.positions != ALL

    @property
    def plain(self) -> bool:
        """Whether the states are the tap's bytes as they lie there."""
        return self.encoding == Encoding.RAW and self.kept.boundaries == self.captured.boundaries and not self.thinned

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
        return f"{self.kept.profile_id}-{self.encoding}" + (f"-{self.positions}" if self.thinned else "")

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

    def header(self, num_tokens: int, kept: int, *, row: int, source_id: str, ids_xxh3: str, schema_version: int) -> Header:
        """Header of the sample file; of what the file holds when it is decompressed, where it is compressed. ``kept``: positions."""
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
        if self.thinned:
            metadata["positions"] = self.positions
        return header(self._tensors(), num_tokens, metadata, kept=kept)

    def _tensors(self) -> list[Plane]:
        states, hidden, thinned = state_planes(self.kept), self.kept.hidden, self.thinned
        ids = [Plane(name=INPUT_IDS, dtype="I32"), Plane(name=LOSS_MASK, dtype="U8")]
        if thinned:
            ids.insert(0, Plane(name=POSITIONS, dtype="I32", thinned=True))  # before the mask: aligned
        if self.encoding == Encoding.FP8:
            values = [Plane(name=name, dtype="F8_E4M3", columns=width * hidden, thinned=thinned) for name, width in states]
            return [*values, *(Plane(name=name + SCALES, dtype="F32", columns=width, thinned=thinned) for name, width in states), *ids]
        if self.encoding == Encoding.ZSTD:
            # The ids come first: they are read without decompressing the states.
            size = hidden * self.item_size
            return [
                *ids,
                *(Plane(name=name + PLANES, dtype="U8", columns=width * size, flat=True, thinned=thinned) for name, width in states),
            ]
        return [*(Plane(name=name, dtype=self.kept.dtype, columns=width * hidden, thinned=thinned) for name, width in states), *ids]

    @functools.cached_property
    def costs(self) -> tuple[int, int, int]:
        """(bytes of a file without its tokens, bytes a token, and besides for each whose states are kept, where not all are): of :meth:`bytes`."""
        token = sum(p.token_bytes for p in self._tensors() if not p.thinned)
        kept = sum(p.token_bytes for p in self._tensors() if p.thinned)
        if self.exact:
            return BLOCK, token, kept
        widths = [width for _, width in state_planes(self.kept)]
        frames = sum(-(-_FRAME // self.chunk_tokens(width)) for width in widths)
        base = BLOCK + BLOCK // 256 + _FRAME * (1 + len(widths))
        if not self.thinned:
            return base, token + token // 256 + 1 + frames, 0
        return base, token + token // 256 + 1, kept + kept // 256 + 1 + frames

    def bytes(self, num_tokens: int, kept: int | None = None, rows: int = 1) -> int:
        """Bytes of the sample files of so many rows, of their tokens and kept positions together; at most so many where not :attr:`exact`.

        ``kept`` may be left out where all are kept.
        """
        base, per_token, per_kept = self.costs
        if kept is None:
            if self.thinned:
                raise ValueError(f"the number of kept positions ({self.positions}) is needed")
            kept = num_tokens
        return rows * base + num_tokens * per_token + kept * per_kept

    def most(self, num_tokens: int, rows: int = 1) -> int:
        """:meth:`bytes` at most, whatever their loss masks are."""
        return self.bytes(num_tokens, self.where.most(rows, num_tokens), rows)
