"""EXPORT.jsonl: what an export holds, one line a row in their order, after a line that says of what job and how.

Invariant: a line is written only when the file that it names is on disk under its name, so what a crash leaves is right as far as it goes;
a torn last line is ignored. An export that is taken up again writes the list anew beside the old one and takes its place when it has
reached the old one's end. Reading and writing hold one line, whatever the number of rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from ...contracts.errors import ErrorCode, RequestError, StoreError
from ..fs import fsync_dir, remove, write_all
from .files import TEMP_LIST, is_temp

LIST = "EXPORT.jsonl"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One row's file, or why there is none: then ``path`` is "" and ``code`` is set."""

    row: int
    path: str = ""
    bytes: int = 0
    xxh3: str = ""
    code: str = ""
    message: str = ""


def _encode(line: Line) -> bytes:
    return json.dumps({k: v for k, v in asdict(line).items() if v or k == "row"}, separators=(",", ":")).encode() + b"\n"


def check_folder(out: Path, head: dict[str, Any]) -> None:
    """Raises RequestError ``conflict`` where the folder holds another export than ``head`` says, or something else; OSError."""
    old = _read_head(out / LIST)
    if old is None and any(not is_temp(name) for name in os.listdir(out)):
        raise RequestError(
            ErrorCode.CONFLICT,
            f"{out} is not empty and holds no export: trainers would read what else is there",
            next_step="Give a new folder.",
        )
    if old is not None and old != head:
        other = [f"{k}: {old.get(k)!r}, not {head.get(k)!r}" for k in sorted({*old, *head}) if old.get(k) != head.get(k)]
        raise RequestError(
            ErrorCode.CONFLICT,
            f"{out} holds another export ({'; '.join(other)})",
            next_step="Give a new folder, or delete that one.",
        )


class Listing:
    """The list of a folder that :func:`check_folder` has looked at. Raises OSError."""

    def __init__(self, out: Path, head: dict[str, Any]) -> None:
        self._out = out
        self._path = out / LIST
        self._temp: Path | None = out / TEMP_LIST  # until it has the list's name
        self._digest = xxhash.xxh3_64()
        self._fd = os.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._write(json.dumps(head, sort_keys=True).encode() + b"\n")

    def known(self) -> Iterator[Line]:
        """The lines that an earlier run has written."""
        try:
            with open(self._path, "rb") as f:
                f.readline()
                for text in f:
                    try:
                        line = Line(**json.loads(text)) if text.endswith(b"\n") else None
                    except (ValueError, TypeError):
                        line = None
                    if line is None:
                        return
                    yield line
        except FileNotFoundError:
            return

    def add(self, lines: Iterable[Line]) -> None:
        """Durably, when :meth:`settle` was called."""
        self._write(b"".join(map(_encode, lines)))
        if self._temp is None:
            os.fdatasync(self._fd)

    def settle(self) -> None:
        """Take the old list's place: all that it said has been said again. Idempotent."""
        if self._temp is not None:
            os.fsync(self._fd)
            os.replace(self._temp, self._path)
            fsync_dir(self._out)
            self._temp = None

    @property
    def xxh3(self) -> str:
        """xxh3-64 of the list."""
        return self._digest.hexdigest()

    def close(self) -> None:
        os.close(self._fd)
        if self._temp is not None:
            remove(self._temp)

    def _write(self, data: bytes) -> None:
        write_all(self._fd, data)
        self._digest.update(data)


def _read_head(path: Path) -> dict[str, Any] | None:
    """The first line; None where there is no list, or one of which not even that was written."""
    try:
        with open(path, "rb") as f:
            text = f.readline()
    except FileNotFoundError:
        return None
    try:
        head = json.loads(text)
    except ValueError as e:
        raise StoreError(ErrorCode.STORE_IO, f"{path} is not an export's list: {e}") from e
    if not isinstance(head, dict):
        raise StoreError(ErrorCode.STORE_IO, f"{path} is not an export's list")
    return head
