"""A stub engine for bench and fault tests: speaks the protocol of contracts/capture.py and writes right tap files, without a model.

States are pseudo-random, finite, without zeros, and the same for the same ids. Faults are made on purpose with ``--fault``:
``KIND@token=ID`` (every prompt that has this id), ``KIND@n=N`` (the Nth prefill, from 1) or ``KIND@all``, each with ``:TIMES`` to
end after so many. Kinds: nan, zeros, ids, shape, missing, short (a tap file that was cut), hang, slow, drip (a reply that comes byte by byte
and never ends), cut (half a reply), drop, exit, 500, 503, 400, toolong, nocapture, protocol, or ``error-CODE`` for a capture error.
STUB_ENGINE_SENT: a file that the row of every request is appended to, which outlives the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from aiohttp import web
from safetensors.numpy import save_file

from statetap.contracts.capture import NORM_FILE, READY_FILE, CaptureReply, lease_of
from statetap.contracts.profile import CaptureProfile
from statetap.contracts.tensors import tap_header
from tests.support.jobs import StateMaker, profile, ready

_FAULT = re.compile(r"(?P<kind>[\w-]+)@(?:token=(?P<token>\d+)|n=(?P<n>\d+)|all)(?::(?P<times>\d+))?")
_NOT_FINITE = {"BF16": b"\x80\x7f", "F16": b"\x00\x7c", "F32": b"\x00\x00\x80\x7f"}


@dataclass
class Fault:
    kind: str
    token: int | None
    n: int | None
    left: int

    @classmethod
    def parse(cls, text: str) -> Fault:
        match = _FAULT.fullmatch(text)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not KIND@token=ID|n=N|all[:TIMES]")
        token, n = (int(match[k]) if match[k] else None for k in ("token", "n"))
        return cls(kind=match["kind"], token=token, n=n, left=int(match["times"] or 1 << 60))

    def hits(self, count: int, ids: list[int]) -> bool:
        if self.left < 1 or (self.n is not None and self.n != count) or (self.token is not None and self.token not in ids):
            return False
        self.left -= 1
        return True


class StubEngine:
    def __init__(
        self, tap: Path, profile: CaptureProfile, faults: list[Fault], *, delay_s: float, tokens_per_s: float, held_s: float
    ) -> None:
        self._tap = tap
        self._profile = profile
        self._maker = StateMaker(profile)
        self._delay_s = delay_s
        self._tokens_per_s = tokens_per_s
        self._held_s = held_s
        self._busy_until = 0.0
        self._faults = faults
        self._count = 0
        self._first_at = self._last_at = 0.0
        self._inflight = self._most_inflight = 0
        self._rows: collections.Counter[int] = collections.Counter()
        self._aborts = 0
        sent = os.environ.get("STUB_ENGINE_SENT")
        self._sent = os.open(sent, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if sent else -1

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        rid, ids = body["rid"], body["input_ids"]
        assert set(body) == {"rid", "input_ids", "sampling_params"} and body["sampling_params"] == {"max_new_tokens": 0, "temperature": 0}
        lease = lease_of(rid)
        assert lease is not None
        self._count += 1
        number = self._count
        self._last_at = time.time()
        self._first_at = self._first_at or self._last_at
        row = int(rid.split("-")[2])
        self._rows[row] += 1
        if self._sent >= 0:
            os.write(self._sent, b"%d\n" % row)
        self._inflight += 1
        self._most_inflight = max(self._most_inflight, self._inflight)
        try:
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            if self._tokens_per_s:
                await self._compute(len(ids))
            kind = next((f.kind for f in self._faults if f.hits(number, ids)), "")
            if early := await self._fail_early(kind, request):
                return early
            path = self._tap / lease / f"{rid}.safetensors"
            if not path.parent.is_dir():
                return _error(400, f"capture: there is no lease folder {lease} in the tap")
            self._write(path, np.array(ids, np.int32), kind)
            if self._held_s:
                await asyncio.sleep(self._held_s)
            reply = CaptureReply(status="ok", path=f"{lease}/{path.name}", rows=len(ids), held_s=self._held_s).to_dict()
            if kind == "protocol":
                reply["protocol"] = 99
            meta = {"id": rid, "prompt_tokens": len(ids)}
            answer = {"text": "", "meta_info": meta if kind == "nocapture" else {**meta, "capture": reply}}
            if kind in ("drip", "cut"):
                return await self._answer_badly(kind, request, json.dumps(answer).encode())
            return web.json_response(answer)
        finally:
            self._inflight -= 1

    async def _compute(self, tokens: int) -> None:
        """One forward after the other, at a speed that is known."""
        now = asyncio.get_running_loop().time()
        self._busy_until = max(now, self._busy_until) + tokens / self._tokens_per_s
        await asyncio.sleep(self._busy_until - now)

    async def _fail_early(self, kind: str, request: web.Request) -> web.Response | None:
        if kind == "exit":
            os._exit(9)
        if kind == "hang":
            await asyncio.sleep(3600)
        if kind == "slow":
            await asyncio.sleep(2)
        if kind == "drop":
            assert request.transport is not None
            request.transport.abort()
        if kind in ("400", "500", "503"):
            return _error(int(kind), f"made to answer {kind}")
        if kind == "toolong":
            return _error(400, "The input (10 tokens) is longer than the model's context length (5 tokens).")
        if kind.startswith("error-"):
            reply = CaptureReply(status="error", code=kind.removeprefix("error-"), message="made to fail")
            return web.json_response({"text": "", "meta_info": {"capture": reply.to_dict()}})
        return None

    async def _answer_badly(self, kind: str, request: web.Request, data: bytes) -> web.StreamResponse:
        """The right headers and the beginning of the right body: a byte now and then, or half of it and no more."""
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(data))})
        await response.prepare(request)
        if kind == "drip":
            for at in range(len(data) - 1):
                await response.write(data[at : at + 1])
                await asyncio.sleep(0.2)
        await response.write(data[: len(data) // 2])
        assert request.transport is not None
        request.transport.close()
        return response

    def _write(self, path: Path, ids: np.ndarray, kind: str) -> None:
        if kind == "shape":
            ids = ids[:-1]
        header = tap_header(self._profile, len(ids))
        payload: list[bytes | memoryview] = list(self._maker.states(ids))
        if kind == "zeros":
            payload = [bytes(len(ids) * self._profile.bytes_per_token)]
        if kind == "nan":
            payload[0] = _NOT_FINITE[self._profile.dtype] + bytes(payload[0])[len(_NOT_FINITE[self._profile.dtype]) :]
        if kind == "ids":
            ids = ids + 1
        if kind == "missing":
            return
        part = path.with_suffix(".tmp")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            written = os.writev(fd, [header.encode(), *payload, ids.tobytes()])
        finally:
            os.close(fd)
        assert written == header.size
        if kind == "short":
            os.truncate(part, header.size - 100)
        os.rename(part, path)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def abort(self, request: web.Request) -> web.Response:
        self._aborts += 1
        return web.Response()

    async def stats(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "requests": self._count,
                "first_at": self._first_at,
                "last_at": self._last_at,
                "rows": self._rows,
                "most_inflight": self._most_inflight,
                "aborts": self._aborts,
            }
        )


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


async def serve(args: argparse.Namespace) -> None:
    p = profile(
        hidden=args.hidden,
        layers=args.layers,
        boundaries=[int(b) for b in args.boundaries.split(",")],
        final=args.final,
        dtype=args.dtype,
        max_length=args.max_length,
        sglang_version=args.sglang_version,
    )
    engine = StubEngine(args.tap, p, args.fault, delay_s=args.delay_ms / 1000, tokens_per_s=args.tokens_per_s, held_s=args.held_ms / 1000)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", engine.generate)
    app.router.add_get("/health", engine.health)
    app.router.add_post("/abort_request", engine.abort)
    app.router.add_get("/stats", engine.stats)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", args.port)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    args.tap.mkdir(parents=True, exist_ok=True)
    norm = {"variant": p.norm.variant, "eps": repr(p.norm.eps)}
    save_file({"weight": np.ones(args.hidden, np.float32)}, args.tap / NORM_FILE, metadata=norm)
    for path, data in (
        (args.tap / READY_FILE, ready(p, pid=os.getpid(), boot_id=f"boot-{os.getpid()}")),
        (args.port_file, str(port).encode()),
    ):
        part = path.with_name(f".{path.name}")
        part.write_bytes(data)
        part.replace(path)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tap", type=Path, required=True)
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--boundaries", default="2,4,5")
    parser.add_argument("--final", default="pre")
    parser.add_argument("--dtype", default="BF16")
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--sglang-version", default="")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--tokens-per-s", type=float, default=0.0, help="one prompt after the other, at this speed")
    parser.add_argument("--held-ms", type=float, default=0.0, help="time between the forward and the tap file's reply")
    parser.add_argument("--fault", type=Fault.parse, action="append", default=[])
    try:
        asyncio.run(serve(parser.parse_args()))
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
