"""The agreement between a worker and the engine's plugin: request ids, the tap folder and ``meta_info.capture``.

Invariant: a request asks for capture by the form of its rid alone, all rids have one length (SGLang's aborts match by prefix),
and a rid names the lease folder that its file goes to.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

from . import PROTOCOL

READY_FILE = "READY.json"  # tap/<this>: the engine's capture profile and facts, written after the self-check
NORM_FILE = "norm.safetensors"  # tap/<this>: the final norm's weight
LEASE_FILE = "lease.json"  # tap/<lease>/<this>: its mtime is refreshed while the lease lives
LEASE_DEAD_AFTER_S = 30.0  # the engine removes a lease folder whose LEASE_FILE is older

_RID = re.compile(r"st-(?P<lease>[0-9a-f]{16})-(?P<row>[0-9]{10})-(?P<nonce>[0-9a-f]{8})")

STATUS_OK = "ok"
STATUS_ERROR = "error"


def new_lease() -> str:
    """A fresh lease id: 16 hex digits, the name of a folder of the tap."""
    return secrets.token_hex(8)


def new_rid(lease: str, row: int) -> str:
    """A fresh rid; a rid is never used twice, so every attempt takes a new one."""
    return f"st-{lease}-{row:010d}-{secrets.token_hex(4)}"


def lease_of(rid: object) -> str | None:
    """The lease that a rid names, or None for a request that does not ask for capture (health checks, other users)."""
    match = _RID.fullmatch(rid) if isinstance(rid, str) else None
    return match["lease"] if match else None


@dataclass(frozen=True, kw_only=True)
class CaptureReply:
    """``meta_info["capture"]`` of a reply. ``path`` is relative to the tap folder: engine and worker may mount it elsewhere."""

    status: str
    protocol: int = PROTOCOL
    path: str = ""
    rows: int = 0
    held_s: float = 0.0  # seconds that the reply waited for the file after the forward was answered
    code: str = ""
    message: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if v != "" or k == "status"}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CaptureReply:
        return cls(**{k: v for k, v in data.items() if k in cls.__dataclass_fields__})
