"""The worker's side of the engine: one prefill by HTTP, and what each kind of answer means for the row.

Invariant: a row is only charged for what the engine said about it. That the engine cannot be reached, or is busy, is never held
against a row while the engine does not answer its health check either.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from ..contracts import PROTOCOL
from ..contracts.capture import STATUS_OK, CaptureReply
from ..contracts.errors import SPECS, ErrorCode

# Of SGLang's 400s (shared by 0.5.12 to 0.5.23): the prompt itself is too long for this engine.
_TOO_LONG = (
    "longer than the model's context length",
    "exceeds the model's maximum context length",
    "exceeds the maximum allowed length",
    "exceeds the KV memory budget",
)
_MESSAGE = 500  # characters of the engine's message that a record keeps


class PrefillError(Exception):
    """A prefill that gave no tap file.

    ``again``: another try can help. ``busy``: the engine only asks to come back later. ``unreachable``: nobody answered.
    """

    def __init__(self, code: ErrorCode, message: str, *, again: bool, busy: bool = False, unreachable: bool = False) -> None:
        super().__init__(f"{code.value}: {message}")
        self.code = code
        self.message = message
        self.again = again
        self.busy = busy
        self.unreachable = unreachable


class EngineClient:
    """One aiohttp session. Use within one event loop."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=timeout_s), raise_for_status=False
        )

    async def close(self) -> None:
        await self._session.close()

    async def prefill(self, rid: str, ids_json: str) -> CaptureReply:
        """Prefill one prompt; ``ids_json`` is the JSON array of its token ids.

        Raises:
            PrefillError: in every other case than a captured prompt.
        """
        body = f'{{"rid":"{rid}","input_ids":{ids_json},"sampling_params":{{"max_new_tokens":0,"temperature":0}}}}'
        try:
            async with self._session.post(
                f"{self._url}/generate", data=body.encode(), headers={"Content-Type": "application/json"}
            ) as response:
                data = await response.read()
                status = response.status
        except TimeoutError:
            await self.abort(rid)
            raise PrefillError(ErrorCode.ENGINE_TIMEOUT, f"no answer within {self._timeout_s:g} s", again=True) from None
        except aiohttp.ClientError as e:
            raise PrefillError(ErrorCode.ENGINE_UNREACHABLE, f"{type(e).__name__}: {e}"[:_MESSAGE], again=True, unreachable=True) from e
        if status != 200:
            raise _refusal(status, data)
        return _capture(data)

    async def abort(self, rid: str) -> None:
        """Ask the engine to drop a request. It may be gone already, or the engine itself: both are fine."""
        try:
            async with self._session.post(
                f"{self._url}/abort_request", json={"rid": rid}, timeout=aiohttp.ClientTimeout(total=2)
            ) as response:
                await response.read()
        except (TimeoutError, aiohttp.ClientError):
            return

    async def healthy(self, timeout_s: float = 2.0) -> bool:
        try:
            async with self._session.get(f"{self._url}/health", timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
                await response.read()
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError):
            return False


def _refusal(status: int, data: bytes) -> PrefillError:
    message = _message_of(data)
    text = f"HTTP {status}: {message}"[:_MESSAGE]
    if status in (429, 503):
        return PrefillError(ErrorCode.ENGINE_TIMEOUT, f"the engine is busy: {text}", again=True, busy=True)
    if status == 400 and any(part in message for part in _TOO_LONG):
        return PrefillError(ErrorCode.PROMPT_TOO_LONG, text, again=False)
    if status == 400 and message.startswith("capture: "):
        # The plugin refused before the prefill: the lease folder was swept, or a rid was used again. A fresh rid can do it.
        return PrefillError(ErrorCode.CAPTURE_INCOMPLETE, text, again=True)
    return PrefillError(ErrorCode.ENGINE_REJECTED, text, again=status >= 500)


def _message_of(data: bytes) -> str:
    """The message of an error body ``{"error": {"message": ...}}`` or ``{"message": ...}``, else its text."""
    try:
        body: Any = json.loads(data)
        error = body.get("error", body)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return data.decode(errors="replace").strip()


def _capture(data: bytes) -> CaptureReply:
    try:
        capture = json.loads(data)["meta_info"]["capture"]
        reply = CaptureReply.from_dict(capture)
    except (ValueError, KeyError, TypeError) as e:
        raise PrefillError(ErrorCode.PROTOCOL_MISMATCH, f"the reply has no meta_info.capture ({type(e).__name__}: {e})", again=False) from e
    if reply.protocol != PROTOCOL:
        raise PrefillError(ErrorCode.PROTOCOL_MISMATCH, f"the reply is of protocol {reply.protocol}, not {PROTOCOL}", again=False)
    if reply.status != STATUS_OK:
        try:
            code = ErrorCode(reply.code)
        except ValueError:
            code = ErrorCode.ENGINE_REJECTED
        raise PrefillError(code, reply.message[:_MESSAGE], again=SPECS[code].retryable)
    return reply
