"""The capture profile: what an engine captures, fixed when it starts.

Invariant: two engines with one ``profile_id`` give files of equal layout and meaning, so any worker beside either may do
any batch of a job of that profile. Versions are provenance and not part of the id: an engine that is upgraded goes on
with running jobs (docs/adr/0003).
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from . import PROTOCOL
from .errors import ErrorCode, RequestError

ITEM_SIZES = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes of a value by safetensors dtype name."""

FINAL_KINDS = ("pre", "post", "both", "none")


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """The final norm, so that readers derive post from pre: ``post = normalise(pre, eps) * (weight [+ 1])``.

    ``other`` (LayerNorm, say) cannot be derived: an engine with it captures post, both or none.
    """

    variant: str  # "rmsnorm" | "gemma_rmsnorm" | "other"
    eps: float


@dataclass(frozen=True, kw_only=True)
class CaptureProfile:
    """Model, boundaries and layout. ``hidden`` = H, ``num_layers`` = L, K = ``len(boundaries)``."""

    model: str
    revision: str
    quantization: str
    boundaries: tuple[int, ...]
    final: str
    dtype: str
    hidden: int
    num_layers: int
    vocab_size: int
    max_length: int
    norm: NormSpec
    sglang_version: str = ""
    plugin_version: str = ""
    protocol: int = PROTOCOL

    @functools.cached_property
    def profile_id(self) -> str:
        """16 hex digits over everything that changes what the files hold or mean."""
        identity = self.to_dict()
        for provenance in ("sglang_version", "plugin_version"):
            identity.pop(provenance)
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def num_planes(self) -> int:
        """Hidden-sized planes a token has: K aux planes and 0, 1 or 2 final ones."""
        return len(self.boundaries) + {"pre": 1, "post": 1, "both": 2, "none": 0}[self.final]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of states a token, without ids and mask."""
        return self.num_planes * self.hidden * ITEM_SIZES[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["boundaries"] = list(self.boundaries)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CaptureProfile:
        """Inverse of :meth:`to_dict`; unknown keys are ignored. Raises ``invalid_request`` where one is missing."""
        known = {f.name for f in fields(cls)}
        kept = {k: v for k, v in data.items() if k in known}
        try:
            kept["boundaries"] = tuple(kept["boundaries"])
            kept["norm"] = NormSpec(**kept["norm"])
            return cls(**kept)
        except (KeyError, TypeError) as e:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"capture profile: {e}") from e
