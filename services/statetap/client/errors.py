"""Errors of the client: what the coordinator answered, with its code and next step, or that it did not answer.

Tree::

    StatetapError
    └── ApiError          the coordinator refused; status, field, errors, numbers and start_command are its own
        ├── UnreachableError   no coordinator answers
        └── WaitTimeoutError   a wait took longer than it may (a TimeoutError too)

Invariant: neither the API key nor any other header ever stands in a message.
"""

from __future__ import annotations

from typing import Any

import httpx

from ..contracts.errors import SPECS, ErrorCode, StatetapError


class ApiError(StatetapError):
    """``code`` is ``internal`` when this client is too old to know the coordinator's code; ``code_name`` is the code as it came."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        status: int = 0,
        code_name: str = "",
        next_step: str = "",
        retryable: bool | None = None,
        field: str | None = None,
        errors: list[dict[str, Any]] | None = None,
        numbers: dict[str, int] | None = None,
        start_command: str | None = None,
    ) -> None:
        super().__init__(code, message, next_step=next_step)
        self.status = status
        self.code_name = code_name or code.value
        self.field = field
        self.errors = errors or []
        self.numbers = numbers or {}
        self.start_command = start_command
        self._retryable = SPECS[code].retryable if retryable is None else retryable

    @property
    def retryable(self) -> bool:
        return self._retryable

    def __str__(self) -> str:
        return f"{self.code_name}: {self.message}"


class UnreachableError(ApiError):
    """No coordinator answers at the URL."""


class WaitTimeoutError(ApiError, TimeoutError):
    """What was waited for goes on; only the wait ended."""


def unreachable(url: str, e: httpx.TransportError) -> UnreachableError:
    return UnreachableError(ErrorCode.COORDINATOR_UNREACHABLE, f"no coordinator answers at {url} ({str(e) or type(e).__name__})")


def problem_of(response: httpx.Response) -> ApiError:
    """The error of an answer that is not a success (RFC 9457, or whatever a proxy in between says)."""
    try:
        data: Any = response.json()
    except ValueError:
        data = None
    if not isinstance(data, dict) or "code" not in data:
        text = " ".join(response.text[:300].split()) or response.reason_phrase
        return ApiError(ErrorCode.INTERNAL, f"HTTP {response.status_code}: {text}", status=response.status_code)
    name = str(data["code"])
    known = name in ErrorCode.__members__.values()
    return ApiError(
        ErrorCode(name) if known else ErrorCode.INTERNAL,
        str(data.get("detail") or response.reason_phrase),
        status=response.status_code,
        code_name=name,
        next_step=str(data.get("next_step") or ""),
        retryable=data.get("retryable"),
        field=data.get("field"),
        errors=data.get("errors"),
        numbers=data.get("numbers"),
        start_command=data.get("start_command"),
    )
