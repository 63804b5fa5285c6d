"""Uploads in pieces, by offset: the bytes lie in one file of the store that only grows, so its length is the offset.

Invariant: an offset that was answered is on disk (fsync first), and one writer at a time appends: it holds a flock on the file, across
threads and coordinators, which goes with the process. A cut in the middle of a piece keeps what arrived. Only a block is in memory.

``.incoming/<upload id>.part`` holds the bytes, ``<upload id>.json`` what was announced; once a dataset was made of it, the record says
which content it was, so that a repeat of that request finds its dataset.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from starlette.requests import ClientDisconnect

from ..contracts.errors import ErrorCode, RequestError
from ..contracts.layout import DATASETS
from ..store.fs import create_file, make_dirs, read_json, remove, replace_file, store_error, to_json, write_all
from .uploads import BLOCK, INCOMING, Upload, check_size

log = logging.getLogger(__name__)

DIGESTS_KEPT = 64  # uploads whose sha256 is kept up while they grow; others are read once more at the end
SWEEP_EVERY_S = 3600.0
_ID = re.compile(r"up-[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class UploadState:
    """How an upload stands. ``expires_at`` is Unix time; progress moves it."""

    upload_id: str
    filename: str
    size: int
    offset: int
    expires_at: float


class _Piece:
    """The open end of an upload, locked. Methods block, one call at a time."""

    def __init__(self, uploads: Resumable, upload_id: str, fd: int, offset: int, size: int) -> None:
        self.offset = offset
        self._uploads = uploads
        self._upload_id = upload_id
        self._fd = fd
        self._size = size
        self._digest = uploads.digest(upload_id, offset)

    def write(self, block: bytes | bytearray) -> None:
        """Append. Raises RequestError ``too_large`` past the announced size, OSError."""
        if self.offset + len(block) > self._size:
            raise _past_the_end(self.offset, self._size)
        try:
            write_all(self._fd, memoryview(block))
        except OSError:
            self._digest = None  # part of the block may be there: the file's length is the truth
            raise
        self.offset += len(block)
        if self._digest is not None:
            self._digest.update(block)

    def finish(self, rest: bytes | bytearray) -> None:
        """Append the rest, make all durable and let go."""
        try:
            if rest:
                self.write(rest)
        finally:
            try:
                os.fsync(self._fd)
                self._uploads.keep_digest(self._upload_id, self.offset, self._digest)
            finally:
                os.close(self._fd)


class Resumable:
    """The uploads of one store. Methods block unless they are coroutines; every one may be called from any thread."""

    def __init__(self, store: Path, *, ttl_s: float, max_bytes: int) -> None:
        self._folder = store / DATASETS / INCOMING
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._digests: OrderedDict[str, tuple[int, Any]] = OrderedDict()  # upload -> (bytes, sha256 of them)
        self._swept_at = time.monotonic()

    def create(self, filename: str, size: int) -> UploadState:
        """Raises RequestError ``too_large``, StoreError (``store_full``, ``store_io``)."""
        if time.monotonic() - self._swept_at > SWEEP_EVERY_S:
            self.sweep()
        upload_id = "up-" + secrets.token_hex(16)
        try:
            make_dirs(self._folder)
            check_size(self._folder, size, self._max_bytes)
            os.close(os.open(self._part(upload_id), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
            create_file(self._record(upload_id), to_json({"filename": filename, "size": size, "created_at": time.time()}))
        except OSError as e:
            raise store_error(e, "begin an upload") from e
        self.keep_digest(upload_id, 0, hashlib.sha256())
        return self.state(upload_id)

    def state(self, upload_id: str) -> UploadState:
        """Raises RequestError ``not_found``, StoreError."""
        record = self._load(upload_id)
        try:
            found = os.stat(self._part(upload_id))
        except FileNotFoundError:
            raise _no_upload(upload_id) from None
        except OSError as e:
            raise store_error(e, "look at an upload") from e
        return UploadState(
            upload_id=upload_id,
            filename=str(record["filename"]),
            size=int(record["size"]),
            offset=found.st_size,
            expires_at=found.st_mtime + self._ttl_s,
        )

    async def append(self, upload_id: str, offset: int, length: int | None, stream: AsyncIterator[bytes]) -> int:
        """Take the bytes from ``offset`` on; the new offset. ``length`` is that of the piece, where it is known.

        Raises:
            RequestError: ``not_found``; ``conflict`` with the present offset where ``offset`` is another, or while another piece is
                written; ``too_large`` past the announced size.
            StoreError: the store is full, or fails.
        """
        piece = await anyio.to_thread.run_sync(self._begin, upload_id, offset, length)
        block = bytearray()
        try:
            try:
                async for chunk in stream:
                    block += chunk
                    if len(block) >= BLOCK:
                        full, block = block, bytearray()
                        await anyio.to_thread.run_sync(piece.write, full)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(piece.finish, block)
        except ClientDisconnect as e:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"the client went away; the upload stands at {piece.offset}") from e
        except OSError as e:
            raise store_error(e, "keep the upload") from e
        return piece.offset

    def _begin(self, upload_id: str, offset: int, length: int | None) -> _Piece:
        state = self.state(upload_id)
        fd = self._lock(upload_id)
        try:
            present = os.fstat(fd).st_size
            if present != offset:
                raise RequestError(ErrorCode.CONFLICT, f"the upload stands at {present}, not at {offset}", numbers={"offset": present})
            if length is not None and offset + length > state.size:
                raise _past_the_end(offset, state.size)
            return _Piece(self, upload_id, fd, present, state.size)
        except BaseException:
            os.close(fd)
            raise

    @contextmanager
    def take(self, upload_id: str) -> Iterator[Upload]:
        """A whole upload, for a dataset to be made of; removed when the block ends without an error.

        Of one that was taken before, the content's hash is still known, but there is no file any more.

        Raises:
            RequestError: ``not_found``; ``conflict`` with the offset while bytes are missing, or while it is written or taken.
        """
        record = self._load(upload_id)
        filename, size = str(record["filename"]), int(record["size"])
        path = self._part(upload_id)
        fd = -1
        if "sha256" not in record:
            try:
                fd = self._lock(upload_id)
            except RequestError as e:
                record = self._load(upload_id)  # a moment ago another request may have taken it
                if e.code is not ErrorCode.NOT_FOUND or "sha256" not in record:
                    raise
        if fd < 0:
            yield Upload(path=path, filename=filename, size=size, sha256=str(record["sha256"]), fields={})
            return
        try:
            present = os.fstat(fd).st_size
            if present != size:
                message = f"the upload stands at {present} of {size} bytes"
                raise RequestError(ErrorCode.CONFLICT, message, numbers={"offset": present, "size": size}, field="upload_id")
            digest = self.digest(upload_id, size) or _read_digest(fd)
            upload = Upload(path=path, filename=filename, size=size, sha256=digest.hexdigest(), fields={})
            yield upload
            replace_file(self._record(upload_id), to_json(record | {"sha256": upload.sha256}))
            remove(path)
            self._digests.pop(upload_id, None)
        except OSError as e:
            raise store_error(e, "take the upload") from e
        finally:
            os.close(fd)

    def delete(self, upload_id: str) -> None:
        """Raises RequestError: ``not_found``, ``conflict`` while it is written."""
        self.state(upload_id)
        fd = self._lock(upload_id)
        try:
            # The record first: bytes without one are nobody's and are swept.
            remove(self._record(upload_id))
            remove(self._part(upload_id))
            self._digests.pop(upload_id, None)
        finally:
            os.close(fd)

    def sweep(self) -> int:
        """Remove uploads without progress for longer than allowed; their number. One that is being written stays."""
        self._swept_at = time.monotonic()
        removed = 0
        for path in self._folder.glob("up-*"):
            try:
                if time.time() - path.stat().st_mtime <= self._ttl_s or (path.suffix == ".json" and path.with_suffix(".part").exists()):
                    continue
                fd = _try_lock(path)
                if fd < 0:
                    continue
                remove(path.with_suffix(".json"))
                remove(path)
                os.close(fd)
                removed += path.suffix == ".part"
            except FileNotFoundError:
                continue
            except OSError as e:
                log.warning("%s", store_error(e, "sweep uploads"))
        return removed

    # The digest of an upload's bytes so far, while this process has seen all of them.

    def digest(self, upload_id: str, size: int) -> Any:
        held = self._digests.get(upload_id)
        return held[1] if held is not None and held[0] == size else None

    def keep_digest(self, upload_id: str, size: int, digest: Any) -> None:
        self._digests.pop(upload_id, None)
        if digest is not None:
            self._digests[upload_id] = size, digest
            while len(self._digests) > DIGESTS_KEPT:
                self._digests.popitem(last=False)

    def _part(self, upload_id: str) -> Path:
        return self._folder / f"{upload_id}.part"

    def _record(self, upload_id: str) -> Path:
        return self._folder / f"{upload_id}.json"

    def _load(self, upload_id: str) -> dict[str, Any]:
        record = read_json(self._record(upload_id)) if _ID.fullmatch(upload_id) else None
        if record is None:
            raise _no_upload(upload_id)
        return record

    def _lock(self, upload_id: str) -> int:
        try:
            fd = _try_lock(self._part(upload_id))
        except FileNotFoundError:
            raise _no_upload(upload_id) from None
        except OSError as e:
            raise store_error(e, "open the upload") from e
        if fd < 0:
            raise RequestError(ErrorCode.CONFLICT, "another request is writing or taking this upload")
        try:
            if os.fstat(fd).st_ino == os.stat(self._part(upload_id)).st_ino:
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)  # removed or taken between opening and locking
        raise _no_upload(upload_id)


def _try_lock(path: Path) -> int:
    """Open and lock without waiting; -1 when it is locked."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as e:
        os.close(fd)
        if isinstance(e, BlockingIOError):
            return -1
        raise
    return fd


def _read_digest(fd: int) -> Any:
    digest = hashlib.sha256()
    at = 0
    while block := os.pread(fd, BLOCK, at):
        digest.update(block)
        at += len(block)
    return digest


def _no_upload(upload_id: str) -> RequestError:
    return RequestError(ErrorCode.NOT_FOUND, f"no upload {upload_id!r}")


def _past_the_end(offset: int, size: int) -> RequestError:
    message = f"the piece goes past the {size:,} bytes that were announced"
    return RequestError(ErrorCode.TOO_LARGE, message, numbers={"offset": offset, "size": size})
