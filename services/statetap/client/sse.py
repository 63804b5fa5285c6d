"""Server-sent events, incrementally, from bytes. Pure.

Lines end at LF, CRLF or CR only (httpx's own line splitter also cuts at U+2028, which JSON may hold).
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_EVENT = 16 << 20  # bytes; an answer that has no line ends is not an event stream


@dataclass(frozen=True, kw_only=True)
class Event:
    """``comment`` is true for a heartbeat, which carries nothing."""

    name: str = "message"
    data: str = ""
    id: str = ""
    comment: bool = False


class Decoder:
    """Feed it bytes as they come. ``retry_s`` is what the server last asked for, in seconds."""

    def __init__(self) -> None:
        self.retry_s: float | None = None
        self._rest = b""
        self._name = ""
        self._data: list[str] = []
        self._id = ""

    def feed(self, chunk: bytes) -> list[Event]:
        """Whole events and comments. Raises ValueError when an event exceeds MAX_EVENT bytes."""
        text = self._rest + chunk
        # A CR at the very end may be the first half of a CRLF: it waits for the next chunk.
        held = text[-1:] if text.endswith(b"\r") else b""
        lines = text[: len(text) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + held
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT:
            raise ValueError("the event stream has an event without an end")
        return [event for line in lines if (event := self._line(line.decode(errors="replace"))) is not None]

    def _line(self, line: str) -> Event | None:
        if not line:
            event = Event(name=self._name or "message", data="\n".join(self._data), id=self._id) if self._data else None
            self._name, self._data = "", []
            return event
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not name:
            return Event(comment=True)
        if name == "event":
            self._name = value
        elif name == "data":
            self._data.append(value)
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "retry" and value.isascii() and value.isdigit():
            self.retry_s = int(value) / 1000
        return None
