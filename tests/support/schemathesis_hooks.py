"""What schemathesis has to be told about this API; named by ``SCHEMATHESIS_HOOKS``."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.serializer("application/offset+octet-stream")
def piece(_: schemathesis.SerializationContext, value: Any) -> bytes:
    """A piece of an upload: bytes as they are."""
    if isinstance(value, bytes):
        return value
    return bytes(getattr(value, "data", None) or str(value).encode())
