"""Streams a multipart upload to a file of the store; form fields are kept in memory, the file never is.

Invariant: what is returned is whole and fsynced; whatever goes wrong (client gone, disk full, malformed body), the file under
``.incoming`` is removed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from ..contracts.errors import ErrorCode, RequestError, StoreError
from ..contracts.layout import DATASETS
from ..store.fs import free_bytes, make_dirs, remove, store_error, write_all

INCOMING = ".incoming"
BLOCK = 1 << 20  # bytes gathered for one write
MAX_FIELD = 64 << 10
MAX_PARTS = 32
ORPHAN_AFTER_S = 86_400


@dataclass(frozen=True, kw_only=True)
class Upload:
    """``path`` lies under ``.incoming``; whoever takes it moves it away."""

    path: Path
    filename: str
    size: int
    sha256: str
    fields: dict[str, str]


class _Form:
    """Callbacks of the parser: gathers fields, and the bytes of the part ``file`` until somebody writes them."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.ready = bytearray()  # of the file, not yet written
        self.ended = False
        self._header = bytearray(), bytearray()
        self._disposition = b""
        self._name = ""
        self._is_file = False
        self._value = bytearray()
        self._parts = 0

    def on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"the form has more than {MAX_PARTS} parts")
        self._disposition = b""
        self._value = bytearray()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])

    def on_header_end(self) -> None:
        if bytes(self._header[0]).lower() == b"content-disposition":
            self._disposition = bytes(self._header[1])
        self._header = bytearray(), bytearray()

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if not self._name:
            raise RequestError(ErrorCode.INVALID_REQUEST, "a part of the form has no name")
        if self._is_file:
            if self.filename is not None:
                raise RequestError(ErrorCode.INVALID_REQUEST, "file: the form has two", field="file")
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")
        elif self._name in self.fields:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"{self._name}: the form has two", field=self._name)

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.ready += data[start:end]
        else:
            self._value += data[start:end]
            if len(self._value) > MAX_FIELD:
                raise RequestError(ErrorCode.INVALID_REQUEST, f"{self._name}: longer than {MAX_FIELD} bytes", field=self._name)

    def on_part_end(self) -> None:
        if not self._is_file:
            try:
                self.fields[self._name] = self._value.decode()
            except UnicodeDecodeError:
                raise RequestError(ErrorCode.INVALID_REQUEST, f"{self._name}: not UTF-8", field=self._name) from None

    def on_end(self) -> None:
        self.ended = True


async def receive(request: Request, store: Path, max_bytes: int) -> Upload:
    """Take the request's body; ``max_bytes``: of the file, 0: what the store has free.

    Raises RequestError (``invalid_request``, ``too_large``), StoreError (``store_full``, ``store_io``).
    """
    _, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if not boundary:
        raise RequestError(ErrorCode.INVALID_REQUEST, "content-type: multipart/form-data needs a boundary")
    folder = store / DATASETS / INCOMING
    await anyio.to_thread.run_sync(_prepare, folder, int(request.headers.get("content-length") or 0), max_bytes)
    form = _Form()
    callbacks = {name: getattr(form, name) for name in dir(form) if name.startswith("on_")}
    path = folder / secrets.token_hex(16)
    sink = _Sink(path, max_bytes)
    try:
        parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]
        async for chunk in request.stream():
            parser.write(chunk)
            if len(form.ready) >= BLOCK:
                block, form.ready = form.ready, bytearray()
                await anyio.to_thread.run_sync(sink.write, block)
        parser.finalize()
        if not form.ended:
            raise RequestError(ErrorCode.INVALID_REQUEST, "the form ends before its last boundary")
        if form.filename is None:
            raise RequestError(ErrorCode.INVALID_REQUEST, "file: the form has no such part", field="file")
        size, sha256 = await anyio.to_thread.run_sync(sink.finish, form.ready)
        return Upload(path=path, filename=form.filename, size=size, sha256=sha256, fields=form.fields)
    except FormParserError as e:
        sink.discard()
        raise RequestError(ErrorCode.INVALID_REQUEST, f"the form does not parse: {e}") from e
    except ClientDisconnect as e:
        sink.discard()
        raise RequestError(ErrorCode.INVALID_REQUEST, "the client went away in the middle of the upload") from e
    except OSError as e:
        sink.discard()
        raise store_error(e, "keep the upload") from e
    except BaseException:
        sink.discard()
        raise


def sweep(store: Path) -> int:
    """Remove uploads that a crash left behind, resumable ones aside; their number. At start only."""
    folder = store / DATASETS / INCOMING
    old = [p for p in folder.glob("*") if not p.name.startswith("up-") and time.time() - p.stat().st_mtime > ORPHAN_AFTER_S]
    for path in old:
        remove(path)
    return len(old)


def check_size(folder: Path, size: int, max_bytes: int) -> None:
    """Refuse what can never be kept. Raises RequestError ``too_large``, StoreError ``store_full``, OSError."""
    if max_bytes and size > max_bytes:
        message = f"the upload has {size:,} bytes; STATETAP_MAX_UPLOAD_BYTES allows {max_bytes:,}"
        raise RequestError(ErrorCode.TOO_LARGE, message, numbers={"needed": size, "allowed": max_bytes})
    free = free_bytes(folder)
    if size > free:
        message = f"the upload has {size:,} bytes and the store {free:,} free"
        raise StoreError(ErrorCode.STORE_FULL, message, numbers={"needed": size, "free": free})


def _prepare(folder: Path, length: int, max_bytes: int) -> None:
    try:
        make_dirs(folder)
        # The limit is on the file, without the form around it: what is let through here is checked while it is written.
        check_size(folder, length - (MAX_PARTS * MAX_FIELD if max_bytes else 0), max_bytes)
    except OSError as e:
        raise store_error(e, "keep the upload") from e


class _Sink:
    """Writes and hashes; runs in threads, one call at a time."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, block: bytearray) -> None:
        if self._max_bytes and self._size + len(block) > self._max_bytes:
            message = f"the file is longer than the {self._max_bytes:,} bytes that STATETAP_MAX_UPLOAD_BYTES allows"
            raise RequestError(ErrorCode.TOO_LARGE, message, numbers={"allowed": self._max_bytes})
        self._digest.update(block)
        write_all(self._fd, memoryview(block))
        self._size += len(block)

    def finish(self, block: bytearray) -> tuple[int, str]:
        self.write(block)
        os.fsync(self._fd)
        self._close()
        return self._size, self._digest.hexdigest()

    def discard(self) -> None:
        self._close()
        remove(self._path)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
