"""Idempotency-Key: a request that is sent again makes nothing twice (IETF draft-ietf-httpapi-idempotency-key-header).

One record a key and endpoint lies on the store, so that a restarted coordinator and a second one know it too. Invariant: the record
names the resource, durably, before the resource is made; whether it was made is the store's to say. So a crash anywhere leaves either
nothing that was acknowledged, or a resource that the repeat finds. While a request is at work it holds a flock on the record, which
goes with the process: a record never blocks for ever. Failures are not recorded.

A record is lines of JSON, appended: ``{fingerprint, resource_id, at}``, then ``{status}`` when it was answered. A torn last line counts
as not written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.to_thread
from fastapi import Header

from ..contracts.errors import ErrorCode, RequestError
from ..contracts.layout import IDEMPOTENCY
from ..store.fs import fsync_dir, make_dirs, remove, store_error, write_all

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 3600.0
REPLAYED = "Idempotency-Replayed"

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="1-255 visible ASCII characters, best a UUID. The same key with the same request answers with what the first one made "
        "(header `Idempotency-Replayed: true`); with another request it is refused (422 `idempotency_mismatch`).",
        examples=["7f3c2f9e-6a0e-4a55-9d7a-3f6f0b2f4c11"],
    ),
]


def fingerprint(request: dict[str, Any]) -> str:
    """Over what a request asks for, whatever the order of its fields."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, default=str).encode()).hexdigest()


Exists = Callable[[str], bool]  # whether the resource of this id is on the store


class Claim:
    """One request at work under its key; without a key nothing is recorded. Methods block; call them in a thread.

    ``made``: an earlier request with this key made ``resource_id``; it answered ``status`` (0: it was cut off before that).
    """

    def __init__(self, path: Path | None = None, fd: int = -1, wanted: str = "") -> None:
        self._path = path
        self._fd = fd
        self._wanted = wanted
        self.resource_id = ""
        self.status = 0
        self.made = False

    def name(self, resource_id: str) -> None:
        """Record what is about to be made; durable when it returns. Raises StoreError."""
        if self._path is None or resource_id == self.resource_id:
            return
        try:
            os.ftruncate(self._fd, 0)
            self._append({"fingerprint": self._wanted, "resource_id": resource_id, "at": time.time()})
            fsync_dir(self._path.parent)
        except OSError as e:
            raise store_error(e, "write the idempotency record") from e
        self.resource_id = resource_id

    def finish(self, status: int) -> None:
        """Record the answer. From here on the resource is not made again, not even when it was deleted."""
        if self._path is None or self.status:
            return
        try:
            self._append({"status": status})
        except OSError as e:
            # The resource is made and named: the repeat finds it. Not a reason to refuse this request.
            log.warning("%s", store_error(e, "finish the idempotency record"))
        self.status = status

    def close(self, exists: Exists) -> None:
        """Let go. The record of a request that made nothing is removed, so that the key can be used again."""
        if self._path is None:
            return
        try:
            if not self.status and not (self.resource_id and exists(self.resource_id)):
                remove(self._path)  # still under the lock: who waits for it sees that the file is another
        finally:
            os.close(self._fd)

    def _append(self, line: dict[str, Any]) -> None:
        os.lseek(self._fd, 0, os.SEEK_END)
        write_all(self._fd, json.dumps(line).encode() + b"\n")
        os.fsync(self._fd)


class Idempotency:
    """The records of one store. Thread-safe: nothing is held between calls but files."""

    def __init__(self, store: Path, ttl_s: float) -> None:
        self._folder = store / IDEMPOTENCY
        self._ttl_s = ttl_s
        self._swept_at = time.monotonic()

    def claim(self, key: str | None, endpoint: str, wanted: str, exists: Exists) -> Claim:
        """Begin a request. ``wanted`` is its fingerprint. The claim has to be closed.

        Raises:
            RequestError: ``idempotency_mismatch``, ``idempotency_in_flight``.
            StoreError: the record cannot be kept.
        """
        if key is None:
            return Claim()
        if time.monotonic() - self._swept_at > SWEEP_EVERY_S:
            self.sweep()
        path = self._folder / (hashlib.sha256(f"{endpoint}\n{key}".encode()).hexdigest() + ".json")
        try:
            fd = self._lock(path)
        except OSError as e:
            raise store_error(e, "open the idempotency record") from e
        try:
            if fd < 0:
                raise RequestError(ErrorCode.IDEMPOTENCY_IN_FLIGHT, "a request with this Idempotency-Key is being served")
            named, status = _read(fd)
            if named is None or time.time() - named["at"] > self._ttl_s:
                return Claim(path, fd, wanted)
            if named["fingerprint"] != wanted:
                raise RequestError(ErrorCode.IDEMPOTENCY_MISMATCH, "this Idempotency-Key was used for another request")
            claim = Claim(path, fd, wanted)
            claim.resource_id, claim.status = named["resource_id"], status
            claim.made = bool(status) or exists(claim.resource_id)
            return claim
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise

    def sweep(self) -> int:
        """Remove records that expired; their number. One that is locked is in use and stays."""
        self._swept_at = time.monotonic()
        removed = 0
        try:
            for entry in os.scandir(self._folder):
                if time.time() - entry.stat().st_mtime <= self._ttl_s:
                    continue
                fd = _open(Path(entry.path), 0)
                if fd >= 0:
                    remove(entry.path)
                    os.close(fd)
                    removed += 1
        except FileNotFoundError:
            pass
        except OSError as e:
            log.warning("%s", store_error(e, "sweep idempotency records"))
        return removed

    def _lock(self, path: Path) -> int:
        """The locked record, made if need be; -1 when somebody else is at it."""
        while True:
            try:
                fd = _open(path, os.O_CREAT)
            except FileNotFoundError:
                make_dirs(self._folder)
                continue
            if fd < 0:
                return -1
            # Whoever had the lock may have removed the file in between: then it is no longer the record.
            try:
                if os.fstat(fd).st_ino == os.stat(path).st_ino:
                    return fd
            except FileNotFoundError:
                pass
            os.close(fd)


@asynccontextmanager
async def claimed(store: Idempotency, key: str | None, endpoint: str, wanted: str, exists: Exists) -> AsyncIterator[Claim]:
    """A claim that is closed whatever happens. Raises as :meth:`Idempotency.claim`."""
    claim = await anyio.to_thread.run_sync(store.claim, key, endpoint, wanted, exists)
    try:
        yield claim
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(claim.close, exists)


def _open(path: Path, flags: int) -> int:
    """Open and lock without waiting; -1 when it is locked."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return -1
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read(fd: int) -> tuple[dict[str, Any] | None, int]:
    """(what was named, the status it was answered with or 0). Raises OSError."""
    lines = []
    for line in os.pread(fd, 1 << 16, 0).splitlines(keepends=True):
        try:
            data = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            data = None
        if not isinstance(data, dict):
            break
        lines.append(data)
    if not lines or not {"fingerprint", "resource_id", "at"} <= lines[0].keys():
        return None, 0
    return lines[0], next((int(d["status"]) for d in lines[1:] if "status" in d), 0)
