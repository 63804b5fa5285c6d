"""Headers of tap files and sample files, both plain safetensors, and the names and order of the tensors in a tap file.

Invariant: the header fills exactly one 4 KiB block and the states come first, so the payload of a tap file is the payload of
a raw sample file byte for byte, at the same offset: the worker writes a header of its own and then the tap's bytes as they are.
(What a job keeps of them, and how, says sample_format.py.)
Format: https://github.com/huggingface/safetensors (8-byte little-endian length, JSON, data).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .errors import ErrorCode, StatetapError
from .profile import ITEM_SIZES, CaptureProfile

BLOCK = 4096

AUX = "aux_hidden_states"  # [T, K*H], boundaries side by side in the profile's order
FINAL_PRE = "final_hidden_states_prenorm"  # [T, H], boundary L
FINAL_POST = "final_hidden_states"  # [T, H], after the final norm
INPUT_IDS = "input_ids"  # [T] int32
LOSS_MASK = "loss_mask"  # [T] uint8, sample files only
POSITIONS = "positions"  # [n] int32, only where not the states of all positions are kept: theirs, ascending

SIZES = {**ITEM_SIZES, "I32": 4, "U8": 1, "F8_E4M3": 1}
"""Bytes of a value by safetensors dtype name."""


@dataclass(frozen=True, kw_only=True)
class Plane:
    """A tensor to be laid out: so many columns a token (0: one value a token, [T]); ``flat``: [bytes] instead of [T, columns]; ``thinned``: only
    for the positions that are kept."""

    name: str
    dtype: str
    columns: int = 0
    flat: bool = False
    thinned: bool = False

    @property
    def token_bytes(self) -> int:
        return max(self.columns, 1) * SIZES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of a file: ``start`` and ``stop`` are byte offsets in the *file*."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """A parsed or planned header. ``size`` is the size of the whole file."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    data_start: int
    size: int

    def encode(self) -> bytes:
        """The header's bytes, padded with spaces to ``data_start``."""
        body: dict[str, Any] = {"__metadata__": self.metadata} if self.metadata else {}
        for t in self.tensors.values():
            body[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.start - self.data_start, t.stop - self.data_start]}
        text = json.dumps(body, separators=(",", ":")).encode()
        room = self.data_start - 8 - len(text)
        if room < 0:
            raise StatetapError(ErrorCode.INTERNAL, f"a header of {len(text)} bytes does not fit into {self.data_start}")
        return (self.data_start - 8).to_bytes(8, "little") + text + b" " * room


def state_planes(profile: CaptureProfile) -> list[tuple[str, int]]:
    """(tensor name, columns in units of H) of the states, in file order."""
    planes = [(AUX, len(profile.boundaries))]
    if profile.final in ("pre", "both"):
        planes.append((FINAL_PRE, 1))
    if profile.final in ("post", "both"):
        planes.append((FINAL_POST, 1))
    return planes


def header(planes: list[Plane], num_tokens: int, metadata: dict[str, str], *, kept: int = 0) -> Header:
    """A header of one block, and after it the tensors in this order; the thinned ones hold ``kept`` tokens."""
    at, tensors = BLOCK, {}
    for p in planes:
        tokens = kept if p.thinned else num_tokens
        size = tokens * p.token_bytes
        if p.flat:
            shape: tuple[int, ...] = (size,)
        else:
            shape = (tokens, p.columns) if p.columns else (tokens,)
        tensors[p.name] = Tensor(name=p.name, dtype=p.dtype, shape=shape, start=at, stop=at + size)
        at += size
    return Header(tensors=tensors, metadata=metadata, data_start=BLOCK, size=at)


def tap_header(profile: CaptureProfile, num_tokens: int) -> Header:
    """Header of ``tap/<lease>/<rid>.safetensors``: the states and the ids that the engine really ran."""
    planes = [Plane(name=name, dtype=profile.dtype, columns=width * profile.hidden) for name, width in state_planes(profile)]
    metadata = {"profile": profile.profile_id, "protocol": str(profile.protocol)}
    return header([*planes, Plane(name=INPUT_IDS, dtype="I32")], num_tokens, metadata)


def tap_bytes(profile: CaptureProfile, num_tokens: int) -> int:
    """Bytes that a row takes in the tap, rounded up to pages: what a worker reserves."""
    return -(-tap_header(profile, num_tokens).size // BLOCK) * BLOCK


def parse_header(head: bytes) -> Header:
    """Parse a header from the first bytes of a file (8 + length of it must be there).

    Raises:
        StatetapError: ``shape_mismatch`` when this is not a safetensors header.
    """
    try:
        length = int.from_bytes(head[:8], "little")
        if len(head) < 8 or not 2 <= length <= len(head) - 8:
            raise ValueError(f"length {length} in {len(head)} bytes")
        body = json.loads(head[8 : 8 + length])
        metadata = body.pop("__metadata__", {})
        base = 8 + length
        tensors = {
            name: Tensor(
                name=name, dtype=t["dtype"], shape=tuple(t["shape"]), start=base + t["data_offsets"][0], stop=base + t["data_offsets"][1]
            )
            for name, t in body.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise StatetapError(ErrorCode.SHAPE_MISMATCH, f"not a safetensors header: {e}") from e
    return Header(tensors=tensors, metadata=metadata, data_start=base, size=max((t.stop for t in tensors.values()), default=base))
