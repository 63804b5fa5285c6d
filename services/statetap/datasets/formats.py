"""Source files -> (place, raw row), streaming: JSONL or one JSON array, plain, gzip or zstd.

Invariant: every row of the source comes out once, in order, as an object or as the error that names its place; memory is
bounded by the longest row that is taken, never by the file (a compressed one is never longer in memory than its rows). What cannot be read to its end raises ``dataset_failed`` instead of
passing for a shorter file.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

from ..contracts.errors import ErrorCode, RequestError, RowError

MAX_ROW_BYTES = 64 << 20
"""A longer row is a ``bad_row`` and is skipped without being held: 64 MiB are some 10 M token ids. Parsed, JSON made to hurt takes some
twenty times its length; a host that has less than that for ingestion sets STATETAP_MAX_ROW_BYTES lower."""

_CHUNK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_OTHER_ENCODINGS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_SPACE = b" \t\r\n"


class SourceRow(NamedTuple):
    """``line`` is the 1-based line (JSONL) or element (JSON array); a RowError does not repeat it."""

    line: int
    value: dict[str, Any] | RowError


class Source:
    """An opened source file; iterate it once. ``bytes_read`` and ``bytes_total`` count the file as it lies on disk; ``unit``
    is what a row's place counts, "line" or "element"; ``max_row_bytes`` bounds a row as it is written.

    Raises RequestError ``dataset_failed`` when the file cannot be opened or is in no encoding that we read.
    """

    def __init__(self, path: Path, *, max_row_bytes: int = MAX_ROW_BYTES) -> None:
        self._path = path
        self._limit = max_row_bytes
        self.unit = "line"
        with contextlib.ExitStack() as stack:
            try:
                # A FIFO or device would block for ever or never end.
                if not stat.S_ISREG(path.stat().st_mode):
                    raise RequestError(ErrorCode.DATASET_FAILED, f"{path} is not a regular file")
                self._raw = stack.enter_context(open(path, "rb", buffering=0))
                self.bytes_total = path.stat().st_size
                self._file = stack.enter_context(self._decompressed())
            except OSError as e:
                raise RequestError(ErrorCode.DATASET_FAILED, f"cannot open {path}: {e.strerror or e}") from e
            self._stack = stack.pop_all()

    def _decompressed(self) -> io.BufferedIOBase:
        magic = self._raw.read(4)
        self._raw.seek(0)
        if magic[:2] == b"\x1f\x8b":
            return io.BufferedReader(gzip.GzipFile(fileobj=self._raw), _CHUNK)
        if magic == b"\x28\xb5\x2f\xfd":
            return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(self._raw, "r"), "zstd"), _CHUNK)
        if magic[:2] in _OTHER_ENCODINGS:
            raise RequestError(ErrorCode.DATASET_FAILED, f"{self._path} is {_OTHER_ENCODINGS[magic[:2]]}; convert it to UTF-8")
        return io.BufferedReader(self._raw, _CHUNK)

    @property
    def bytes_read(self) -> int:
        return self._raw.tell()

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[SourceRow]:
        """Raises RequestError ``dataset_failed`` where the file breaks off: the rest would be lost without a word."""
        pieces: Iterator[tuple[int, bytes | None]]
        try:
            head = self._file.read(3)
            head = b"" if head == _BOM else head
            before = 0  # line ends in front of ``head``
            while not head.strip(_SPACE) and (more := self._file.read(_CHUNK)):
                before, head = before + head.count(b"\n"), more
            if head.lstrip(_SPACE)[:1] == b"[":
                self.unit, pieces = "element", _elements(head, self._file, self._limit)
            else:
                pieces = _lines(before, head, self._file, self._limit)
            for line, data in pieces:
                yield SourceRow(line, _decode(data, self._limit))
        except (OSError, EOFError, zlib.error) as e:
            raise RequestError(ErrorCode.DATASET_FAILED, f"{self._path} cannot be read to its end: {e}") from e
        except _BrokenArrayError as e:
            raise RequestError(ErrorCode.DATASET_FAILED, f"{self._path}: {e}") from e


class _BrokenArrayError(Exception):
    """The array's own syntax is broken; the message names the element."""


def _lines(number: int, head: bytes, file: io.BufferedIOBase, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """(line number, bytes) of the lines that are not empty; None for one over ``limit``. ``number`` lines went before."""
    *whole, rest = head.split(b"\n")
    for data in whole:
        number += 1
        if data.strip(_SPACE):
            yield number, data
    while True:
        piece = file.readline(limit)
        data, rest = rest + piece, b""
        if not data:
            return
        number += 1
        if len(data) >= limit and not data.endswith(b"\n"):
            while piece and not piece.endswith(b"\n"):
                piece = file.readline(_CHUNK)
            yield number, None
        elif data.strip(_SPACE):
            yield number, data


_IN_STRING = re.compile(rb'["\\]')
_NESTED = re.compile(rb'["\[\]{}]')  # commas are not looked at within an element: token lists are full of them
_TOP = re.compile(rb'["\[\]{},]')


def _elements(head: bytes, file: io.BufferedIOBase, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """(element number, bytes) of the elements of the array; None for one over ``limit``.

    Only strings and brackets are looked at, so a fault within an element stays that element's. Nothing is scanned twice.
    """
    buf, pos, start = head, head.index(b"[") + 1, head.index(b"[") + 1
    number, depth, in_string, too_big = 1, 0, False, False
    while True:
        found = (_IN_STRING if in_string else _NESTED if depth else _TOP).search(buf, pos)
        if found is None:
            if len(buf) - start > limit:
                too_big = True
            more = file.read(_CHUNK)
            if not more:
                raise _BrokenArrayError(f"the JSON array breaks off in or after element {number}")
            # ``pos`` can stand one past the end: the second half of an escape that the chunk cut.
            at = max(pos, len(buf))
            kept = b"" if too_big else buf[start:]
            pos, start, buf = at - len(buf) + len(kept), 0, kept + more
            continue
        char, pos = found[0], found.end()
        if in_string:
            in_string = char == b"\\"
            pos += in_string  # the character after a backslash is never the end of the string
        elif char == b'"':
            in_string = True
        elif char in b"[{":
            depth += 1
        elif depth and char in b"]}":
            depth -= 1
        elif char == b"}":
            raise _BrokenArrayError(f"a '}}' without its '{{' in or after element {number}")
        else:
            data = buf[start : pos - 1]
            if too_big or len(data) > limit:
                yield number, None
            elif data.strip(_SPACE) or char == b",":
                yield number, data
            if char == b"]":
                break
            number, start, too_big = number + 1, pos, False
    rest = buf[pos:]
    while rest or (rest := file.read(_CHUNK)):
        if rest.strip(_SPACE):
            raise _BrokenArrayError(f"text after the end of the JSON array, which has {number} elements")
        rest = b""


def _decode(data: bytes | None, limit: int) -> dict[str, Any] | RowError:
    if data is None:
        return RowError(ErrorCode.BAD_ROW, f"longer than {limit} bytes (STATETAP_MAX_ROW_BYTES)")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as e:
        value = _decode_leniently(data, e)
    if isinstance(value, (dict, RowError)):
        return value
    return RowError(ErrorCode.BAD_ROW, f"{_KINDS.get(type(value), 'a number')} where an object is wanted")


_KINDS: dict[type, str] = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


def _decode_leniently(data: bytes, why: orjson.JSONDecodeError) -> Any:
    """What orjson refuses: say where, or take it when it is only NaN or Infinity, which Python's own json module writes."""
    try:
        text = data.decode()
    except UnicodeDecodeError as e:
        return RowError(ErrorCode.BAD_ROW, f"not UTF-8 at byte {e.start + 1}")
    try:
        value = json.loads(text)
        # A lone surrogate ("\\ud800") parses, and is no text: no tokenizer takes it.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return RowError(ErrorCode.BAD_ROW, "a lone surrogate in a string")
    except (ValueError, RecursionError):
        return RowError(ErrorCode.BAD_ROW, f"not JSON: {why}")
    return value
