"""The largest body that an operation reads into memory.

Invariant: JSON never grows the process: a body beyond STATETAP_MAX_JSON_BYTES is refused with 413 before it is held, whether its length was
declared or not. Uploads are no JSON; they stream to the store and have limits of their own (uploads.py, resumable.py).
"""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..contracts.errors import ErrorCode
from .problems import problem

_STREAMED = (b"multipart/form-data", b"application/offset+octet-stream")


class BodyLimit:
    """Pure ASGI. ``limit`` in bytes."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _streamed(scope):
            await self._app(scope, receive, send)
            return
        declared = next((v for k, v in scope["headers"] if k == b"content-length"), b"")
        if declared.isdigit() and int(declared) > self._limit:
            await problem(ErrorCode.TOO_LARGE, self._message())(scope, receive, send)
            return
        got = 0

        async def counted() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > self._limit:
                raise HTTPException(413, self._message())  # the one exception that FastAPI passes on while it reads a body
            return message

        await self._app(scope, counted, send)

    def _message(self) -> str:
        return f"the body is longer than {self._limit} bytes (STATETAP_MAX_JSON_BYTES); files are uploaded"


def _streamed(scope: Scope) -> bool:
    kind = next((v for k, v in scope["headers"] if k == b"content-type"), b"")
    return bytes(kind.partition(b";")[0].strip().lower()) in _STREAMED
