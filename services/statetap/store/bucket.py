"""Sample files as objects of an S3-compatible store, by boto3: credentials, region and endpoint are those of its usual chain (``AWS_*``).

Invariant: an object is put under its name once, whole, by a PUT with ``If-None-Match: *``: the first of two wins, and none is ever seen
in part (Amazon S3 User Guide, "conditional writes"). What the service answers becomes an OSError, so that callers need not know it.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import io
import logging
import os
import re
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import boto3
import numpy as np
import pyarrow as pa
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as NetworkError

from ..contracts.errors import ErrorCode, RequestError, StoreError
from .check import Bytes
from .samples import Entry, SizeOf

_URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>[^?#]*))?")
_GONE = ("NoSuchKey", "NotFound", "404")
_FULL = ("QuotaExceeded", "InsufficientCapacity", "XMinioStorageFull", "507")
_TAKEN = "PreconditionFailed"
_AT_ONCE = "ConditionalRequestConflict"  # two at once, and neither has won: S3 asks to try again
_TRIES = 6
_PAGE = 1_000  # names in a request to delete
_CONNECT_S = 5.0  # also for each block of a body to go out
_AWAY_S = 15.0  # the library's own tries are over after a second or half a minute, by its version
_NO_ANSWER = (NetworkError, HTTPClientError, IncompleteReadError)

NEXT_STEP = "Look at the bucket, its endpoint, and the keys and their rights (docs/howto/s3.md), then start again."
NEXT_STEP_OTHER = (
    "Use an object store that honours If-None-Match on PUT, or leave STATETAP_SAMPLES unset: samples stand in the store's folder then."
)

T = TypeVar("T")
_clients: dict[tuple[int, str], Any] = {}  # by process, since sockets do not outlive a fork, and by endpoint
_lock = threading.Lock()


def _in_child() -> None:
    """A thread of the parent may have held the lock at the fork, and is not here to let go."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def _client() -> Any:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    key = os.getpid(), endpoint
    with _lock:
        found = _clients.get(key)
        if found is None:
            _clients.clear()
            config = Config(
                retries={"mode": "standard", "total_max_attempts": 6},
                connect_timeout=_CONNECT_S,
                read_timeout=60,
                max_pool_connections=32,
                # Our own sum goes along with each PUT; what the library would add by itself, older servers do not take.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                # Servers other than Amazon's rarely have a name for each bucket.
                s3={"addressing_style": "path" if endpoint else "auto"},
            )
            logging.getLogger("botocore").setLevel(logging.WARNING)  # each horse would say where its credentials come from
            try:
                found = _clients[key] = boto3.session.Session().client("s3", config=config)
            except ValueError as e:  # an endpoint that is no URL
                raise OSError(errno.EINVAL, str(e)) from e
        return found


def parse_url(url: str) -> tuple[str, str]:
    """(bucket, prefix without slashes at its ends). Raises RequestError."""
    match = _URL.fullmatch(url)
    if match is None:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"samples: {url!r} is not s3://bucket or s3://bucket/prefix")
    return match["bucket"], (match["prefix"] or "").strip("/")


class _AwayError(OSError):
    """No answer, or one of a service that is not up: to ask again may help."""


class _PastEndError(OSError):
    """A range that begins behind an object's last byte."""


class _Ranged(io.RawIOBase):
    """An object as a file: what is read is fetched, each piece by a request of its own."""

    def __init__(self, samples: BucketSamples, name: str) -> None:
        self._samples, self._name = samples, name
        self._at, self._size = 0, -1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END and self._size < 0:
            self._size = self._samples.size(self._name)
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        if not size:
            return b""
        try:
            data, self._size = self._samples.part(self._name, self._at, self._at + size if size > 0 else 1 << 62)
        except _PastEndError:
            return b""
        self._at += len(data)
        return data


class BucketSamples:
    """Objects below ``url``, of one job. One whole row is in memory while it is read or written."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._bucket, prefix = parse_url(url)
        self._prefix = f"{prefix}/" if prefix else ""

    def put(self, name: str, data: bytes | bytearray | memoryview) -> bool:
        """Put an object unless one is there: True when ours is the one. False also where our own first try did it and its reply was lost."""
        total = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()

        def put() -> None:
            # A file: a bytearray goes to the socket in one call, which has the time of one connect for all of it.
            body = pa.BufferReader(pa.py_buffer(data))
            _client().put_object(Bucket=self._bucket, Key=self._prefix + name, Body=body, IfNoneMatch="*", ChecksumCRC32=total)

        for left in reversed(range(_TRIES)):
            try:
                self._ask(name, put)
                return True
            except FileExistsError:
                return False
            except BlockingIOError:
                if not left:
                    raise
                time.sleep(0.1)
        raise AssertionError("unreachable")

    def map(self, name: str) -> Bytes:
        def get() -> Bytes:
            answer = _client().get_object(Bucket=self._bucket, Key=self._prefix + name)
            data = np.empty(answer["ContentLength"], np.uint8)
            at, body = 0, answer["Body"]
            while block := body.read(1 << 20):
                data[at : at + len(block)] = np.frombuffer(block, np.uint8)
                at += len(block)
            if at != len(data):
                raise OSError(errno.EIO, f"{at} of {len(data)} bytes came", self.place(name))
            return data

        return self._ask(name, get)

    def open(self, name: str) -> pa.NativeFile:
        return pa.PythonFile(_Ranged(self, name), mode="r")

    def part(self, name: str, start: int, stop: int) -> tuple[bytes, int]:
        """(bytes [start, stop) as far as there are so many, the object's size)."""

        def get() -> tuple[bytes, int]:
            answer = _client().get_object(Bucket=self._bucket, Key=self._prefix + name, Range=f"bytes={start}-{stop - 1}")
            return answer["Body"].read(), int(answer["ContentRange"].rpartition("/")[2])

        return self._ask(name, get)

    def size(self, name: str) -> int:
        return int(self._ask(name, lambda: _client().head_object(Bucket=self._bucket, Key=self._prefix + name))["ContentLength"])

    def entries(self, folder: str, keep: Callable[[str], bool]) -> Iterator[Entry]:
        for entry in self._list(f"{folder}/"):
            if keep(entry.name.rpartition("/")[2]):
                yield entry

    def _list(self, prefix: str) -> Iterator[Entry]:
        following: dict[str, str] = {}

        def page() -> dict[str, Any]:
            answer: dict[str, Any] = _client().list_objects_v2(Bucket=self._bucket, Prefix=self._prefix + prefix, **following)
            return answer

        while True:
            answer = self._ask(prefix, page)
            for found in answer.get("Contents", []):
                yield Entry(name=found["Key"].removeprefix(self._prefix), size=found["Size"])
            if not answer.get("IsTruncated"):
                return
            following["ContinuationToken"] = answer["NextContinuationToken"]

    def sizes(self) -> SizeOf:
        """A folder is listed when the first of its names is asked for; the last two are kept."""
        listed: dict[str, dict[str, int]] = {}

        def size_of(name: str) -> int | None:
            folder = name.rpartition("/")[0]
            if folder not in listed:
                while len(listed) > 1:
                    listed.pop(next(iter(listed)))
                listed[folder] = {e.name: e.size for e in self._list(f"{folder}/")}
            return listed[folder].get(name)

        return size_of

    def remove(self, name: str) -> None:
        self._ask(name, lambda: _client().delete_object(Bucket=self._bucket, Key=self._prefix + name))

    def remove_many(self, names: Iterable[str]) -> None:
        left = iter(names)
        while page := list(islice(left, _PAGE)):
            self._remove_page(page)

    def place(self, name: str) -> str:
        return f"{self.url}/{name}"

    def settle(self, folder: str) -> None:
        """A PUT that was answered is durable."""

    def all(self) -> Iterator[Entry]:
        """Whatever stands below the job's URL."""
        yield from self._list("")

    def remove_all(self) -> Iterator[Entry]:
        """Remove all of it; what goes is given out."""
        left = self.all()
        while page := list(islice(left, _PAGE)):
            self._remove_page([e.name for e in page])
            yield from page

    def _remove_page(self, names: list[str]) -> None:
        objects = [{"Key": self._prefix + name} for name in names]
        answer = self._ask("", lambda: _client().delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}))
        if errors := answer.get("Errors"):
            raise OSError(errno.EIO, f"{errors[0].get('Code')}: {errors[0].get('Message')}", f"{self.url}/{errors[0].get('Key')}")

    def _ask(self, name: str, ask: Callable[[], T]) -> T:
        """What the service answers. While it is away it is asked again, for as long as one of its processes takes to be started again."""
        until, pause = time.monotonic() + _AWAY_S, 0.1
        while True:
            try:
                with self._as_os_error(name):
                    return ask()
            except _AwayError:
                if time.monotonic() + pause > until:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 1.0)

    @contextlib.contextmanager
    def _as_os_error(self, name: str) -> Iterator[None]:
        place = self.place(name)
        try:
            yield
        except ClientError as e:
            code, status = e.response["Error"].get("Code", ""), e.response["ResponseMetadata"].get("HTTPStatusCode")
            said = f"{code or status}: {e.response['Error'].get('Message') or 'no message'}"
            if code in _GONE:
                raise FileNotFoundError(errno.ENOENT, said, place) from e
            if code == _TAKEN or status == 412:
                raise FileExistsError(errno.EEXIST, said, place) from e
            if code == _AT_ONCE:
                raise BlockingIOError(errno.EAGAIN, said, place) from e
            if status == 416:
                raise _PastEndError(errno.EINVAL, said, place) from e
            if code in _FULL or status == 507:
                raise OSError(errno.ENOSPC, said, place) from e
            raise (_AwayError if (status or 0) >= 500 else OSError)(errno.EIO, said, place) from e
        except BotoCoreError as e:
            raise (_AwayError if isinstance(e, _NO_ANSWER) else OSError)(errno.EIO, str(e), place) from e


def probe_bucket(url: str) -> None:
    """Try what the commit stands on, with a small object that is removed again.

    Raises:
        RequestError: ``invalid_request`` for no URL of a bucket.
        StoreError: ``store_unavailable`` where it cannot be written, or does not keep a promise.
    """
    bucket, name = BucketSamples(url), f".probe-{secrets.token_hex(8)}/a"
    try:
        try:
            first, second = bucket.put(name, b"first"), bucket.put(name, b"second")
            held = bucket.map(name).tobytes()
            listed = [e.name for e in bucket.entries(name.rpartition("/")[0], lambda _: True)]
        finally:
            bucket.remove(name)
    except OSError as e:
        raise StoreError(ErrorCode.STORE_UNAVAILABLE, f"the bucket of {url} cannot be used: {e.strerror}", next_step=NEXT_STEP) from e
    broken = ""
    if not first or second or held != b"first":
        broken = "a PUT with If-None-Match: * replaces an object that is there"
    elif listed != [name]:
        broken = "an object that was put is not listed"
    if broken:
        message = f"the bucket of {url} does not keep a promise of the commit: {broken}"
        raise StoreError(ErrorCode.STORE_UNAVAILABLE, message, next_step=NEXT_STEP_OTHER)
