"""One line of the doctor."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Finding:
    """``todo`` says what to do; empty when all is well."""

    level: Literal["ok", "warn", "FAIL"]
    subject: str
    text: str
    todo: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fine(subject: str, text: str) -> Finding:
    return Finding(level="ok", subject=subject, text=text)


def warned(subject: str, text: str, todo: str) -> Finding:
    return Finding(level="warn", subject=subject, text=text, todo=todo)


def failed(subject: str, text: str, todo: str) -> Finding:
    return Finding(level="FAIL", subject=subject, text=text, todo=todo)
