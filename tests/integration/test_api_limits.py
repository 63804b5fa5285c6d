"""What the API takes from outside has limits: tokenizers by path, code, bodies, rows, compressed files; and no pickle is ever loaded."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pyarrow as pa
import pytest
import redis

from statetap.coordinator.keyfile import Scope, add_key
from tests.support.coordinator import PROFILE, Coordinator, register_engine, until
from tests.support.ingestion import ingestion, until_ingested
from tests.support.made_tokenizer import make_tokenizer
from tests.support.redis import RedisServer

LINE = b'{"input_ids": [1, 2, 3]}\n'
CHAT = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Nobody."}]}


@contextmanager
def running(folder: Path, redis_server: RedisServer, **settings: str) -> Iterator[Coordinator]:
    (folder / "data").mkdir(exist_ok=True)
    process = Coordinator(folder, redis_server.url, DATA_DIR=str(folder / "data"), **settings)
    try:
        yield process.start()
    finally:
        process.close()


def post(coordinator: Coordinator, key: str = "", **fields: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return coordinator.http.post("/v1/datasets", files={"file": ("a.jsonl", LINE)}, data=fields, headers=headers)


def refused(reply: httpx.Response, status: int, code: str, field: str | None = None) -> bool:
    assert (reply.status_code, reply.json()["code"]) == (status, code), reply.text
    assert field is None or reply.json()["field"] == field
    return True


def cache(folder: Path, blobs: Path) -> Path:
    """A snapshot as Hugging Face's cache has it: links to blobs/ beside it."""
    snapshot = folder / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    blobs.mkdir(parents=True, exist_ok=True)
    (blobs / "1234").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to(os.path.relpath(blobs / "1234", snapshot))
    return snapshot


def test_a_tokenizer_by_path_lies_below_a_root_with_all_that_it_links_to(
    tmp_path: Path, redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    data, models, outside = tmp_path / "data", tmp_path / "models", tmp_path / "outside"
    for folder in (data, models / "plain", outside / "plain"):
        folder.mkdir(parents=True)
    inside = cache(models / "hub", models / "hub" / "blobs")
    leaks = cache(models / "leaky", outside / "blobs")
    (deep := models / "deep" / "templates").mkdir(parents=True)
    (deep / "chat.jinja").symlink_to(outside / "blobs" / "1234")
    (models / "nested").mkdir()
    (models / "nested" / "more").symlink_to(leaks)
    (models / "away").symlink_to(outside / "plain")
    (models / "loop").symlink_to(models / "loop")
    (models / "round").mkdir()
    (models / "round" / "again").symlink_to(models / "round")
    (data / "own").mkdir()
    with running(tmp_path, redis_server, MODEL_DIRS=f"{tmp_path / 'none'}:{models}") as coordinator:
        for good in (models / "plain", inside, data / "own", models / "round", coordinator.store / "datasets"):
            assert post(coordinator, tokenizer=str(good)).status_code == 202, good
        for name in ("tiny", "owner/name", "Qwen/Qwen3-8B", "a_b/c-d.e"):
            assert post(coordinator, tokenizer=name).json()["tokenizer"] == name
        for bad in (
            outside / "plain",
            models / "away",
            leaks,
            models / "deep",
            models / "nested",
            "/etc",
            outside / "none",
            models / ".." / "outside",
        ):
            assert refused(post(coordinator, tokenizer=str(bad)), 422, "path_not_allowed", "tokenizer"), bad
        for bad in (
            "..",
            "../models/plain",
            "a/b/c",
            "./tiny",
            "~/x",
            "-x",
            "a/..",
            "a\0",
            str(models / "none"),
            str(models / "loop"),
            "/" + "x" * 300,
        ):
            reply = post(coordinator, tokenizer=bad)
            assert reply.status_code == 422 and reply.json()["code"] in ("invalid_request", "path_not_allowed"), (bad, reply.text)
        there, not_there = (post(coordinator, tokenizer=str(outside / n)).json()["detail"] for n in ("plain", "nothn"))
        assert there.replace("plain", "nothn") == not_there, "what lies elsewhere is not told apart from what does not"

        live = PROFILE.to_dict() | {"model": str(outside / "plain")}
        register_engine(redis_client, type(PROFILE).from_dict(live))
        assert post(coordinator, tokenizer=str(outside / "plain")).json()["tokenizer"] == str(outside / "plain"), "the live model's own"
        assert post(coordinator).json()["tokenizer"] == str(outside / "plain")


def test_only_an_admin_or_the_operator_reaches_further(tmp_path: Path, redis_server: RedisServer) -> None:
    (outside := tmp_path / "outside").mkdir()
    keys = {s.label: add_key(tmp_path / "keys", s.label, s) for s in Scope}
    with running(tmp_path, redis_server, KEYS_FILE=str(tmp_path / "keys")) as coordinator:
        assert refused(post(coordinator, keys["write"], tokenizer=str(outside)), 422, "path_not_allowed", "tokenizer")
        assert post(coordinator, keys["admin"], tokenizer=str(outside)).status_code == 202
        assert refused(post(coordinator, keys["write"], tokenizer="a/b", trust_remote_code="true"), 403, "forbidden", "trust_remote_code")
        assert post(coordinator, keys["admin"], tokenizer="a/b", trust_remote_code="true").status_code == 202
    with running(tmp_path, redis_server) as coordinator:
        assert refused(post(coordinator, tokenizer="a/b", trust_remote_code="true"), 403, "forbidden", "trust_remote_code")
        by_path = coordinator.http.post("/v1/datasets", json={"path": "none", "tokenizer": "a/b", "trust_remote_code": True})
        assert refused(by_path, 403, "forbidden", "trust_remote_code")
    with running(tmp_path, redis_server, ALLOW_REMOTE_CODE="true", ALLOW_ANY_PATH="true") as coordinator:
        assert post(coordinator, tokenizer=str(outside), trust_remote_code="true").status_code == 202


def test_a_body_that_is_no_upload_is_bounded_whether_it_says_its_length_or_not(tmp_path: Path, redis_server: RedisServer) -> None:
    with running(tmp_path, redis_server, MAX_JSON_BYTES="2048") as coordinator:
        big = json.dumps({"path": "x" * 3000}).encode()
        for path in ("/v1/datasets", "/v1/jobs", "/v1/session"):
            for content in (big, iter([big[:1500], big[1500:]])):
                reply = coordinator.http.post(path, content=content, headers={"content-type": "application/json"})
                assert refused(reply, 413, "too_large"), path
                assert "STATETAP_MAX_JSON_BYTES" in reply.json()["detail"]
        small = coordinator.http.post(
            "/v1/jobs", content=iter([b'{"dataset_id":', b'"ds-none"}']), headers={"content-type": "application/json"}
        )
        assert small.status_code == 404
        assert coordinator.http.post("/v1/datasets", files={"file": ("a.jsonl", LINE * 1000)}).status_code == 202, "uploads stream"


def test_a_head_that_does_not_end_is_cut_off(tmp_path: Path, redis_server: RedisServer) -> None:
    with running(tmp_path, redis_server) as coordinator, socket.create_connection(("127.0.0.1", coordinator.http.base_url.port)) as s:
        s.settimeout(30)
        before = psutil.Process(coordinator.pid).memory_info().rss
        sent = 0
        s.sendall(b"GET /v1/jobs HTTP/1.1\r\nhost: localhost\r\n")
        with pytest.raises(ConnectionError):
            while sent < 64 << 20:
                sent += s.send(b"x-%d: " % sent + b"y" * 65_000 + b"\r\n")
                s.settimeout(30)
        assert psutil.Process(coordinator.pid).memory_info().rss - before < 32 << 20
        assert coordinator.http.get("/healthz").status_code == 200


def horse_peak(parent: int) -> list[int]:
    """Largest resident size so far of the horse, by the kernel's own count, in bytes; nothing while there is none."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
        for child in psutil.Process(parent).children():
            lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
            found += [int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")]  # a zombie has none
    return found


def test_a_giant_row_is_a_bad_row_and_a_bomb_is_no_memory(tmp_path: Path, redis_server: RedisServer) -> None:
    size = 400 << 20
    with running(tmp_path, redis_server) as coordinator:
        block = b"1," * (1 << 19)
        with gzip.open(tmp_path / "data" / "bomb.gz", "wb", compresslevel=1) as f:
            f.write(LINE + b'{"input_ids": [')
            for _ in range(size // len(block)):
                f.write(block)
            f.write(b"1]}\n" + LINE)
        with pa.CompressedOutputStream(str(tmp_path / "data" / "bomb.zst"), "zstd") as z:
            z.write(b"[" + LINE + b', {"input_ids": [')
            for _ in range(size // len(block)):
                z.write(block)
            z.write(b"1]}," + LINE + b"]")
        limits = {"MAX_ROW_BYTES": str(8 << 20), "MAX_ROW_TOKENS": "5"}
        with ingestion(coordinator, redis_server.url, tmp_path, **limits) as process:
            measured: list[int] = []
            for name in ("bomb.gz", "bomb.zst"):
                reply = coordinator.http.post("/v1/datasets", json={"path": name, "format": "tokenized"})
                dataset_id = reply.json()["dataset_id"]

                def ended(dataset_id: str = dataset_id) -> bool:
                    measured.extend(horse_peak(process.pid))
                    return coordinator.http.get(f"/v1/datasets/{dataset_id}").json()["state"] != "ingesting"

                until(ended, f"{name} is ingested", 90)
                dataset = coordinator.http.get(f"/v1/datasets/{dataset_id}").json()
                assert (dataset["state"], dataset["rows"], dataset["accepted"], dataset["errors"]) == ("ready", 3, 2, {"bad_row": 1}), (
                    dataset
                )
                assert "STATETAP_MAX_ROW_BYTES" in dataset["examples"][0]["message"]
            assert measured and max(measured) < size, "never the whole row"
            long = coordinator.http.post("/v1/datasets", files={"file": ("a.jsonl", LINE + b'{"input_ids": [1,2,3,4,5,6]}\n')})
            dataset = until_ingested(coordinator, long.json()["dataset_id"])
            assert dataset["errors"] == {"prompt_too_long": 1} and "STATETAP_MAX_ROW_TOKENS" in dataset["examples"][0]["message"]


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.flag), "w")


def test_no_pickle_is_ever_loaded(tmp_path: Path, redis_server: RedisServer) -> None:
    flag = tmp_path / "it-went-off"
    bomb = pickle.dumps(Bomb(flag))
    pickle.loads(bomb).close()
    assert flag.exists(), "the bomb is live"
    flag.unlink()
    tokenizer = Path(make_tokenizer(tmp_path / "data" / "model"))
    names = (
        "pytorch_model.bin",
        "model.pt",
        "tokenizer.pkl",
        "vocab.pkl",
        "vocab.pt",
        "vocab.bin",
        "tokenizer.model",
        "added_tokens.pkl",
        "merges.pkl",
    )
    for name in names:
        (tokenizer / name).write_bytes(bomb)
    bad = tmp_path / "data" / "bad"
    bad.mkdir()
    (bad / "tokenizer_config.json").write_text('{"tokenizer_class": "TransfoXLTokenizer"}')
    for name in ("tokenizer.json", "vocab.json", "config.json", *names):
        (bad / name).write_bytes(bomb)
    (tmp_path / "data" / "chat.jsonl").write_text(json.dumps(CHAT) + "\n")
    with running(tmp_path, redis_server) as coordinator, ingestion(coordinator, redis_server.url, tmp_path) as process:

        def ingested(path: str, **fields: str) -> dict[str, object]:
            reply = coordinator.http.post("/v1/datasets", json={"path": path, **fields})
            assert reply.status_code == 202, reply.text
            return until_ingested(coordinator, reply.json()["dataset_id"])

        assert ingested("chat.jsonl", tokenizer=str(tokenizer))["state"] == "ready", process.log
        assert ingested("chat.jsonl", tokenizer=str(bad))["state"] == "failed"
        for name in ("data.pkl", "data.pt", "data.bin", "data.jsonl", "data.npy", "data.arrow"):
            (tmp_path / "data" / name).write_bytes(bomb)
            assert ingested(name)["state"] == "failed", name
            (tmp_path / "data" / f"{name}.gz").write_bytes(gzip.compress(bomb))
            assert ingested(f"{name}.gz")["state"] == "failed", name
    assert not flag.exists()


def test_a_hub_id_is_not_a_folder_that_happens_to_lie_there(tmp_path: Path, redis_server: RedisServer) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chat.jsonl").write_text(json.dumps(CHAT) + "\n")
    # Ingestion stands in the repository: `tests/unit` is a folder there, and looks like owner/name.
    with running(tmp_path, redis_server) as coordinator, ingestion(coordinator, redis_server.url, tmp_path, HF_HUB_OFFLINE="1"):
        reply = coordinator.http.post("/v1/datasets", json={"path": "chat.jsonl", "tokenizer": "tests/unit"})
        assert reply.status_code == 202
        dataset = until_ingested(coordinator, reply.json()["dataset_id"])
    assert dataset["state"] == "failed" and "also a folder" in dataset["error"]["message"]
