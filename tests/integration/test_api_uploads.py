"""Uploads in pieces: cuts, wrong offsets, limits, and the dataset that is made of one."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.support.coordinator import Coordinator, until
from tests.support.redis import RedisServer

LINE = b'{"input_ids": [1, 2, 3]}\n'
CONTENT = random.Random(7).randbytes(5_000_001)


def begin(coordinator: Coordinator, size: int = len(CONTENT), filename: str = "Data.JSONL") -> str:
    reply = coordinator.http.post("/v1/uploads", json={"filename": filename, "size": size})
    assert reply.status_code == 201, reply.text
    state = reply.json()
    assert (state["filename"], state["size"], state["offset"]) == (filename, size, 0)
    assert reply.headers["location"] == f"/v1/uploads/{state['upload_id']}"
    assert state["expires_at"] > time.time()
    return state["upload_id"]


def patch(coordinator: Coordinator, upload_id: str, offset: int, piece: bytes) -> httpx.Response:
    headers = {"Upload-Offset": str(offset), "content-type": "application/offset+octet-stream"}
    return coordinator.http.patch(f"/v1/uploads/{upload_id}", content=piece, headers=headers)


def offset_of(coordinator: Coordinator, upload_id: str) -> int:
    reply = coordinator.http.head(f"/v1/uploads/{upload_id}")
    assert (reply.status_code, reply.content) == (200, b"")
    assert reply.headers["cache-control"] == "no-store"
    return int(reply.headers["upload-offset"])


def open_patch(coordinator: Coordinator, upload_id: str, offset: int, length: int) -> socket.socket:
    """A PATCH whose head is sent."""
    host = coordinator.http.base_url
    s = socket.create_connection((host.host, host.port))
    s.sendall(
        f"PATCH /v1/uploads/{upload_id} HTTP/1.1\r\nhost: {host.host}\r\nupload-offset: {offset}\r\n"
        f"content-type: application/offset+octet-stream\r\ncontent-length: {length}\r\n\r\n".encode()
    )
    return s


def incoming(coordinator: Coordinator) -> Path:
    return coordinator.store / "datasets" / ".incoming"


def test_a_cut_upload_goes_on_where_it_was_and_is_whole_at_the_end(coordinator: Coordinator) -> None:
    upload_id = begin(coordinator)
    sent = 0
    for cut in (1, 1_500_000, 1_777_777):
        with open_patch(coordinator, upload_id, sent, len(CONTENT) - sent) as s:
            s.sendall(CONTENT[sent : sent + cut])
            until(lambda n=sent + cut: offset_of(coordinator, upload_id) > n - (1 << 20), "all but the last block is on the store")
        # The client is gone. How much of the last block came through is for the offset to say.
        at = until(
            lambda: (r := patch(coordinator, upload_id, offset_of(coordinator, upload_id), b"")).status_code == 204 and r, "it may go on"
        )
        assert sent + cut - (1 << 20) < int(at.headers["upload-offset"]) <= sent + cut
        sent = int(at.headers["upload-offset"])
        assert coordinator.http.get(f"/v1/uploads/{upload_id}").json()["offset"] == sent
    assert sent > 1_000_000
    coordinator.signal(signal.SIGKILL)
    coordinator.wait()
    coordinator.start()
    assert offset_of(coordinator, upload_id) == sent
    early = coordinator.http.post("/v1/datasets", json={"upload_id": upload_id})
    assert (early.status_code, early.json()["code"], early.json()["numbers"]["offset"]) == (409, "conflict", sent)
    reply = patch(coordinator, upload_id, sent, CONTENT[sent:])
    assert (reply.status_code, reply.content, reply.headers["upload-offset"]) == (204, b"", str(len(CONTENT)))
    made = coordinator.http.post("/v1/datasets", json={"upload_id": upload_id, "format": "tokenized", "name": "mine"})
    assert (made.status_code, made.json()["name"]) == (202, "mine"), made.text
    raw = coordinator.store / "datasets" / made.json()["dataset_id"] / "raw" / "source.jsonl"
    assert hashlib.sha256(raw.read_bytes()).digest() == hashlib.sha256(CONTENT).digest()
    assert raw.stat().st_nlink == 1 and not list(incoming(coordinator).glob("*.part")), "it was moved"
    assert coordinator.http.get(f"/v1/uploads/{upload_id}").status_code == 404
    # The same file by a form is the same dataset; the same request again too; other options would need the bytes again.
    form = coordinator.http.post("/v1/datasets", files={"file": ("x.jsonl", CONTENT)}, data={"format": "tokenized"})
    assert form.json()["dataset_id"] == made.json()["dataset_id"]
    again = coordinator.http.post("/v1/datasets", json={"upload_id": upload_id, "format": "tokenized"})
    assert again.json()["dataset_id"] == made.json()["dataset_id"]
    other = coordinator.http.post("/v1/datasets", json={"upload_id": upload_id, "format": "messages", "tokenizer": "org/model"})
    assert (other.status_code, other.json()["code"]) == (409, "conflict"), other.text


def test_a_wrong_offset_is_refused_with_the_right_one(coordinator: Coordinator) -> None:
    upload_id = begin(coordinator, 10)
    assert patch(coordinator, upload_id, 0, b"01234").status_code == 204
    for offset in (0, 4, 6):
        reply = patch(coordinator, upload_id, offset, b"x")
        assert (reply.status_code, reply.json()["code"], reply.json()["numbers"]) == (409, "conflict", {"offset": 5})
    assert patch(coordinator, upload_id, 5, b"").headers["upload-offset"] == "5"
    long = patch(coordinator, upload_id, 5, b"567890")
    assert (long.status_code, long.json()["code"]) == (413, "too_large")
    chunked = coordinator.http.patch(
        f"/v1/uploads/{upload_id}",
        content=iter([b"56", b"789", b"x"]),
        headers={"Upload-Offset": "5", "content-type": "application/offset+octet-stream"},
    )
    assert (chunked.status_code, chunked.json()["code"]) == (413, "too_large")
    at = offset_of(coordinator, upload_id)
    assert patch(coordinator, upload_id, at, b"0123456789"[at:]).status_code == 204
    assert (incoming(coordinator) / f"{upload_id}.part").read_bytes() == b"0123456789"
    for headers in ({}, {"Upload-Offset": "0"}, {"Upload-Offset": "-1", "content-type": "application/offset+octet-stream"}):
        assert coordinator.http.patch(f"/v1/uploads/{upload_id}", content=b"x", headers=headers).status_code == 422, headers
    for none in ("up-none", "up-" + "0" * 32, "..%2f..%2fx"):
        assert patch(coordinator, none, 0, b"x").status_code == 404
        assert coordinator.http.delete(f"/v1/uploads/{none}").status_code == 404
        assert coordinator.http.head(f"/v1/uploads/{none}").status_code == 404
    assert coordinator.http.delete(f"/v1/uploads/{upload_id}").status_code == 204
    assert os.listdir(incoming(coordinator)) == []
    assert coordinator.http.post("/v1/datasets", json={"upload_id": upload_id}).status_code == 404


def test_one_piece_at_a_time(coordinator: Coordinator) -> None:
    upload_id = begin(coordinator, 4_000_000)
    piece = b"x" * 2_000_000
    with open_patch(coordinator, upload_id, 0, 3_000_000) as s:
        s.sendall(piece)
        until(lambda: offset_of(coordinator, upload_id) > 0, "the first piece is being written")
        for refused in (
            patch(coordinator, upload_id, offset_of(coordinator, upload_id), b"y"),
            coordinator.http.delete(f"/v1/uploads/{upload_id}"),
            coordinator.http.post("/v1/datasets", json={"upload_id": upload_id}),
        ):
            assert (refused.status_code, refused.json()["code"]) == (409, "conflict"), refused.text
        s.sendall(b"x" * 1_000_000)
        assert s.recv(20).startswith(b"HTTP/1.1 204")
    assert patch(coordinator, upload_id, 3_000_000, b"x" * 1_000_000).status_code == 204
    assert (incoming(coordinator) / f"{upload_id}.part").read_bytes() == b"x" * 4_000_000


def test_one_upload_posted_many_times_at_once_is_one_dataset(coordinator: Coordinator) -> None:
    upload_id = begin(coordinator, len(LINE))
    assert patch(coordinator, upload_id, 0, LINE).status_code == 204
    replies: list[httpx.Response] = []

    def post() -> None:
        with httpx.Client(base_url=coordinator.http.base_url, timeout=30) as http:
            reply = http.post("/v1/datasets", json={"upload_id": upload_id, "format": "tokenized"})
            while reply.status_code == 409:  # another request is taking it
                reply = http.post("/v1/datasets", json={"upload_id": upload_id, "format": "tokenized"})
            replies.append(reply)

    threads = [threading.Thread(target=post) for _ in range(10)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert {r.status_code for r in replies} == {202}, [r.text for r in replies]
    assert len({r.json()["dataset_id"] for r in replies}) == 1


def test_limits_hold_for_both_kinds_of_upload_and_old_ones_are_swept(tmp_path: Path, redis_server: RedisServer) -> None:
    process = Coordinator(tmp_path, redis_server.url, MAX_UPLOAD_BYTES="5000000", UPLOAD_TTL_S="1000").start()
    try:
        reply = process.http.post("/v1/uploads", json={"filename": "a", "size": 5_000_001})
        assert (reply.status_code, reply.json()["code"]) == (413, "too_large")
        assert reply.json()["numbers"] == {"needed": 5_000_001, "allowed": 5_000_000}
        assert process.http.post("/v1/uploads", json={"filename": "a", "size": 0}).status_code == 422
        form = process.http.post("/v1/datasets", files={"file": ("a.jsonl", b"x" * 5_000_001)}, data={"format": "tokenized"})
        assert (form.status_code, form.json()["code"]) == (413, "too_large")
        assert (
            process.http.post("/v1/datasets", files={"file": ("a.jsonl", b"x" * 5_000_000)}, data={"format": "tokenized"}).status_code
            == 202
        )
        assert os.listdir(incoming(process)) == []
        old, young = begin(process, 10), begin(process, 10)
        for name in (f"{old}.part", f"{old}.json"):
            past = time.time() - 2000
            os.utime(incoming(process) / name, (past, past))
        process.signal(signal.SIGTERM)
        process.wait()
        process.start()
        assert process.http.get(f"/v1/uploads/{old}").status_code == 404
        assert offset_of(process, young) == 0
        assert sorted(os.listdir(incoming(process))) == [f"{young}.json", f"{young}.part"]
    finally:
        process.close()
    unlimited = Coordinator(tmp_path, redis_server.url).start()
    try:
        huge = unlimited.http.post("/v1/uploads", json={"filename": "a", "size": 1 << 60})
        assert (huge.status_code, huge.json()["code"]) == (507, "store_full")
    finally:
        unlimited.close()


@pytest.mark.parametrize("size", [64 << 20])
def test_a_piece_is_never_whole_in_memory(coordinator: Coordinator, size: int) -> None:
    def high_water() -> int:
        status = Path(f"/proc/{coordinator.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])

    small = begin(coordinator, 1 << 20)
    assert patch(coordinator, small, 0, b"x" * (1 << 20)).status_code == 204
    before = high_water()
    upload_id = begin(coordinator, size)
    started = time.monotonic()
    block = b"x" * (1 << 20)
    headers = {"Upload-Offset": "0", "content-type": "application/offset+octet-stream", "content-length": str(size)}
    reply = coordinator.http.patch(f"/v1/uploads/{upload_id}", content=(block for _ in range(size >> 20)), headers=headers)
    assert reply.status_code == 204, reply.text
    seconds = time.monotonic() - started
    made = coordinator.http.post("/v1/datasets", json={"upload_id": upload_id, "format": "tokenized"})
    assert made.status_code == 202
    print(json.dumps({"upload_mib": size >> 20, "grown_kib": high_water() - before, "mib_per_s": round((size >> 20) / seconds)}))
    assert high_water() - before < 30_000, "KiB more at the peak than before"
