"""Where the coordinator is and how we say who we are: URL, key, timeouts.

Invariant: the key goes into one header and nowhere else; a URL that carries a password is refused, since URLs end up in messages.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx

from .. import __version__
from ..contracts.errors import ErrorCode, RequestError
from .calls import Call
from .flows import STREAM_READ_S, Policy

DEFAULT_URL = "http://127.0.0.1:8700"
URL_VARIABLE = "STATETAP_URL"
KEY_VARIABLE = "STATETAP_API_KEY"
CONNECT_S = 5.0
PIECE = 256 << 10  # bytes


def policy_of(url: str | None, patience_s: float) -> Policy:
    """Raises RequestError ``invalid_request``."""
    text = (url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/")
    try:
        parsed = httpx.URL(text)
    except httpx.InvalidURL as e:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"url: {text!r}: {e}") from None
    if parsed.userinfo:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"url: holds a password; give the key as {KEY_VARIABLE}")
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"url: {text!r} is not the root of an API such as {DEFAULT_URL}")
    return Policy(url=text, patience_s=patience_s)


def settings(policy: Policy, api_key: str | None) -> dict[str, Any]:
    """Arguments of httpx.Client and httpx.AsyncClient. Raises RequestError ``invalid_request``."""
    key = (api_key if api_key is not None else os.environ.get(KEY_VARIABLE, "")).strip()
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise RequestError(ErrorCode.INVALID_REQUEST, f"the API key ({KEY_VARIABLE}) has characters that a key cannot have")
    headers = {"User-Agent": f"statetap/{__version__}", "Accept": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    # A proxy of the environment is for other hosts than this one.
    return {"base_url": policy.url, "headers": headers, "trust_env": not _is_loopback(httpx.URL(policy.url).host)}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def pieces(block: bytes) -> Iterator[bytes]:
    """A body that lets go of its bytes once they are sent: httpx's requests lie in reference cycles, and would keep blocks for long."""
    view = memoryview(block)
    for start in range(0, len(block), PIECE):
        yield bytes(view[start : start + PIECE])


async def async_pieces(block: bytes) -> AsyncIterator[bytes]:
    """As :func:`pieces`."""
    for piece in pieces(block):
        yield piece


def arguments(call: Call[Any], body: Callable[[bytes], Any] = pieces, *, stream: bool = False) -> dict[str, Any]:
    """Arguments of ``build_request`` of both clients; ``body`` makes what httpx iterates over."""
    read_s = STREAM_READ_S if stream else call.timeout_s
    made: dict[str, Any] = {
        "method": call.method,
        "url": call.path,
        "params": {k: _text(v) for k, v in call.params.items()} or None,
        "headers": dict(call.headers),
        "timeout": httpx.Timeout(read_s, connect=CONNECT_S),
    }
    if call.json is not None:
        made["json"] = dict(call.json)
    if call.content is not None:
        made["content"] = body(call.content)
        made["headers"]["Content-Length"] = str(len(call.content))
    if call.file is not None:
        name, data = call.file
        made |= {"data": dict(call.form or {}), "files": {"file": (name, data, "application/octet-stream")}}
    return made


def _text(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return [str(v) for v in value] if isinstance(value, list | tuple | set | frozenset) else str(value)
