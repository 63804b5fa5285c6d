"""What a command prints.

Invariant: with ``--json`` stdout holds JSON and nothing else, and everything for people goes to stderr; a line is flushed when it is
printed; no control character is written to anything but a terminal.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from typing import Any, TextIO

from ..client import ApiError
from ..contracts.errors import StatetapError


class Out:
    """The output of one command."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    @property
    def people(self) -> TextIO:
        """Where lines for people go."""
        return sys.stderr if self.as_json else sys.stdout

    def say(self, text: str) -> None:
        """An event, with the time."""
        write(self.people, f"{time.strftime('%H:%M:%S')} {text}")

    def item(self, data: dict[str, Any], text: str, *, one_line: bool = False) -> None:
        """One of a list: a line of JSON, or text (cut at the terminal's width when ``one_line``, else wrapped)."""
        if self.as_json:
            print(json.dumps(data), flush=True)
        else:
            write(sys.stdout, text, cut=one_line)

    def document(self, data: Any, *lines: str) -> None:
        """The whole answer of a command."""
        if self.as_json:
            print(json.dumps(data, indent=1), flush=True)
        else:
            for text in lines:
                write(sys.stdout, text)


def write(stream: TextIO, text: str, *, cut: bool = False) -> None:
    """A line; on a terminal cut at its width or wrapped between words (never inside one, so that a path can be copied)."""
    text = printable(text)
    if stream.isatty():
        width = shutil.get_terminal_size().columns
        if cut:
            text = text if len(text) <= width else text[: max(1, width - 1)] + "…"
        else:
            wrap = textwrap.TextWrapper(width=width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
            text = "\n".join(part for line in text.split("\n") for part in (wrap.wrap(line) or [""]))
    print(text, file=stream, flush=True)


def printable(text: str) -> str:
    """Names and messages come from users' data: control characters but the line feed are shown, not sent to the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def error_lines(e: StatetapError) -> list[str]:
    """For people: code, sentence and next step."""
    return [f"error: {e}", f"  next: {e.next_step}"]


def error_document(e: StatetapError) -> dict[str, Any]:
    """For programs."""
    data: dict[str, Any] = {"code": e.code.value, "message": e.message, "next_step": e.next_step, "retryable": e.retryable}
    if isinstance(e, ApiError):
        data["code"] = e.code_name
        more = {"status": e.status, "field": e.field, "errors": e.errors, "numbers": e.numbers, "start_command": e.start_command}
        data |= {k: v for k, v in more.items() if v}
    return {"error": data}
