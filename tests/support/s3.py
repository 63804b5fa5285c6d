"""An S3-compatible server (moto's, a process) behind a proxy that counts, and that makes the faults which such services have.

The server's sockets are on loopback; it holds objects in its memory and honours ``If-None-Match: *``.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from aiohttp import ClientSession, web
from botocore.config import Config

from statetap.store.bucket import BucketSamples
from tests.support.redis import RedisServer, free_port
from tests.support.service import Service
from tests.support.workers import eventually

BUCKET = "drafts"
_HOP = {"transfer-encoding", "connection", "keep-alive", "content-encoding", "content-length", "server", "date"}


class S3:
    """``url`` of a bucket that is there. Faults: see the attributes. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.url = f"s3://{BUCKET}/train"
        self.puts: Counter[str] = Counter()  # answered by the server, by key
        self.taken: Counter[str] = Counter()  # of them: refused, since an object was there
        self.requests: Counter[str] = Counter()  # by method
        self.gets: Counter[str] = Counter()  # of objects, by key
        self.ranges: Counter[str] = Counter()  # bytes of them that were asked for in part, by key; not in gets
        self.away = False  # True: nothing is answered but 403
        self.cut_gets = 0  # so many objects are sent by half before the connection ends
        self.honest = True  # False: the condition of a PUT is not passed on
        self.lose_replies = 0  # to so many PUTs that the server did
        self.deny = ""  # an error code in answer to every PUT
        self.slow_s = 0.0  # before each PUT; less of it lets go those that wait
        self.held = 0  # PUTs that wait for that
        self.away_until = 0.0  # time.monotonic: until then no request is answered
        self.up_bytes_per_s = 0  # so fast are bodies taken; 0: as they come
        self._folder = folder
        self._server_port = free_port()
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="s3-proxy", daemon=True)

    @property
    def env(self) -> dict[str, str]:
        """For processes that use the bucket."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "statetap",
            "AWS_SECRET_ACCESS_KEY": "not-a-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """Past the proxy."""
        endpoint = f"http://127.0.0.1:{self._server_port}"
        keys = {"aws_access_key_id": "statetap", "aws_secret_access_key": "not-a-secret", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=endpoint, config=Config(s3={"addressing_style": "path"}), **keys)

    def keys(self, prefix: str = "") -> dict[str, int]:
        """Key -> bytes."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {o["Key"]: o["Size"] for page in pages for o in page.get("Contents", [])}

    def __enter__(self) -> S3:
        with open(self._folder / "s3.log", "ab") as log:
            main = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{self._server_port}'])"
            self._server = subprocess.Popen([sys.executable, "-c", main], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            eventually("the S3 server answers", self._answers, 60)
            self.client().create_bucket(Bucket=BUCKET)
            self._thread.start()
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        except BaseException:
            self._server.kill()
            self._server.wait()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._server.kill()
        self._server.wait()

    def _answers(self) -> bool:
        assert self._server.poll() is None, (self._folder / "s3.log").read_text()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self._server_port}/", timeout=2):
            return True
        return False

    async def _start(self) -> None:
        self._session = ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # what is not taken stays with the sender
        listener.bind(("127.0.0.1", 0))
        await web.SockSite(self._runner, listener).start()
        self._port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _body(self, request: web.Request) -> io.BytesIO:
        taken = bytearray()
        while block := await request.content.readany():
            taken += block
            if self.up_bytes_per_s:
                await asyncio.sleep(len(block) / self.up_bytes_per_s)
        return io.BytesIO(taken)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if self.away:
            text = "<Error><Code>AccessDenied</Code><Message>away</Message></Error>"
            return web.Response(status=403, text=text, content_type="application/xml")
        if time.monotonic() < self.away_until:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        put = request.method == "PUT"
        headers = {k: v for k, v in request.headers.items() if k.lower() != "host"}
        data = await self._body(request)
        if put:
            self.held += 1
            arrived = time.monotonic()
            while (left := arrived + self.slow_s - time.monotonic()) > 0:  # noqa: ASYNC110 - a test sets it in another thread
                await asyncio.sleep(min(left, 0.1))
            self.held -= 1
            if self.deny:
                text = f"<Error><Code>{self.deny}</Code><Message>refused by a test</Message></Error>"
                return web.Response(status=507 if self.deny == "QuotaExceeded" else 403, text=text, content_type="application/xml")
            if not self.honest:
                headers = {k: v for k, v in headers.items() if k.lower() != "if-none-match"}
        url = f"http://127.0.0.1:{self._server_port}{request.raw_path}"
        async with self._session.request(request.method, url, data=data, headers=headers, skip_auto_headers=("Content-Type",)) as reply:
            body = await reply.read()
            self.requests[request.method] += 1
            key = request.path.removeprefix(f"/{BUCKET}/")
            if request.method == "GET" and "Range" in request.headers:
                self.ranges[key] += len(body) if reply.status == 206 else 0
            elif request.method == "GET" and not request.query_string:
                self.gets[key] += 1
                if self.cut_gets:
                    self.cut_gets -= 1
                    return await _cut(request, body)
            if put:
                self.puts[key] += 1
                self.taken[key] += reply.status == 412
                if self.lose_replies and reply.status == 200:
                    self.lose_replies -= 1
                    assert request.transport is not None
                    request.transport.close()
            kept = {k: v for k, v in reply.headers.items() if k.lower() not in _HOP}
            if request.method == "HEAD":
                kept["Content-Length"] = reply.headers.get("Content-Length", "0")
            return web.Response(status=reply.status, body=body, headers=kept)


async def _cut(request: web.Request, body: bytes) -> web.StreamResponse:
    cut = web.StreamResponse(headers={"Content-Length": str(len(body))})
    await cut.prepare(request)
    await cut.write(body[: len(body) // 2])
    assert request.transport is not None
    request.transport.close()
    return cut


def reads_in_parts(bucket: BucketSamples) -> None:
    """Of an object, and its end; one that is not there, and an empty one."""
    bucket.put("a/b", bytes(range(100)))
    with bucket.open("a/b") as f:
        assert f.read(10) == bytes(range(10)) and f.read(5) == bytes(range(10, 15))
        f.seek(95)
        assert f.read(50) == bytes(range(95, 100)) and f.read(1) == b"" and f.size() == 100
    with bucket.open("a/b") as f:
        assert f.size() == 100, "though nothing was read"
        f.seek(97)
        assert f.read() == bytes(range(97, 100))
    bucket.put("a/empty", b"")
    with bucket.open("a/empty") as f:
        assert f.read(10) == b"" and f.size() == 0
    with bucket.open("a/none") as f, pytest.raises(FileNotFoundError):
        f.read(10)


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """Its variables are set in this process too, and in those that it starts."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    with S3(tmp_path) as made:
        for name, value in made.env.items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture(name="service")
def bucket_service(tmp_path: Path, redis_server: RedisServer, s3: S3) -> Iterator[Service]:
    """Samples of its jobs stand in the bucket."""
    with Service(tmp_path, redis_server.url, settings={"PORT": str(free_port()), "SAMPLES": s3.url}) as made:
        yield made
