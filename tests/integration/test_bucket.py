"""Sample files in a bucket: what one PUT, LIST and GET promise, and what is refused where they do not."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from statetap.contracts.errors import ErrorCode, RequestError, StoreError
from statetap.store import bucket as bucket_module
from statetap.store.bucket import BucketSamples, parse_url, probe_bucket
from tests.support.coordinator import PROFILE, Coordinator, FakeWorker, make_dataset, register_engine, until
from tests.support.redis import RedisServer, redis_client, redis_server
from tests.support.s3 import BUCKET, S3, reads_in_parts, s3
from tests.support.stack import cli

__all__ = ["redis_client", "redis_server", "s3"]


def test_the_first_put_of_a_name_wins_and_is_whole(s3: S3) -> None:
    bucket = BucketSamples(f"{s3.url}/job-1")
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: bucket.put("rows_0-2000/data_7.safetensors", bytes([n]) * 100_000), range(8)))
    held = bucket.map("rows_0-2000/data_7.safetensors").tobytes()
    # The server of this test decides under no lock, as S3 does: more than one may think that it has won only there.
    assert any(won) and len(set(held)) == 1 and len(held) == 100_000
    assert not bucket.put("rows_0-2000/data_7.safetensors", b"late")
    assert bucket.map("rows_0-2000/data_7.safetensors").tobytes() == held
    assert list(s3.keys()) == ["train/job-1/rows_0-2000/data_7.safetensors"]


def test_of_an_object_what_is_read_is_fetched(s3: S3) -> None:
    """Seen to fail with all of it, fetched when it is opened."""
    bucket = BucketSamples(f"{s3.url}/job-1")
    reads_in_parts(bucket)
    assert not s3.gets and s3.ranges["train/job-1/a/b"] == 10 + 5 + 5 + 3, "what was asked for, and no byte more"


def test_a_put_whose_reply_is_lost_is_there_once_and_not_claimed(s3: S3) -> None:
    bucket = BucketSamples(f"{s3.url}/job-1")
    s3.lose_replies = 1
    assert not bucket.put("a/b", b"ours")  # the library's second try met our first: the caller looks at what is there
    assert bucket.map("a/b").tobytes() == b"ours" and s3.puts["train/job-1/a/b"] == 2


def test_a_row_may_take_longer_than_a_connect(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail with the bytearray as body: all of it had the time of one connect, and was begun again and again."""
    monkeypatch.setattr(bucket_module, "_CONNECT_S", 0.5)
    s3.up_bytes_per_s = 8 << 20
    data = bytearray(os.urandom(16 << 20))  # as a worker has it; more than the sockets' buffers hold
    bucket = BucketSamples(f"{s3.url}/job-1")
    assert bucket.put("a/b", data) and s3.puts["train/job-1/a/b"] == 1
    assert s3.client().get_object(Bucket=BUCKET, Key="train/job-1/a/b")["Body"].read() == data


def test_a_service_that_is_away_for_some_seconds_is_asked_again(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail with the library's own tries alone: its newer versions are through with them after a second, and share a budget."""
    bucket = BucketSamples(f"s3://{BUCKET}/train/job-1")
    bucket.put("a/0", b"x" * 10)
    asks = [lambda: bucket.map("a/0").tobytes() == b"x" * 10, lambda: {e.name for e in bucket.entries("a", lambda _: True)} >= {"a/0"}]
    asks += [lambda: bucket.remove("a/x") is None, *(lambda n=n: bucket.put(f"a/{n}", b"x") for n in range(1, 9))]
    with ThreadPoolExecutor(len(asks)) as pool:
        s3.away_until = time.monotonic() + 4
        assert all(pool.map(lambda ask: ask(), asks))
    monkeypatch.setattr(bucket_module, "_AWAY_S", 0.5)
    s3.away_until = time.monotonic() + 60
    with pytest.raises(OSError, match="Connection was closed") as e:
        bucket.put("a/10", b"x")
    assert e.value.errno == errno.EIO and e.value.filename == f"s3://{BUCKET}/train/job-1/a/10"


def test_folders_are_listed_whole_and_alone_whatever_their_size(s3: S3) -> None:
    client = s3.client()
    with ThreadPoolExecutor(8) as pool:
        for folder, count in (("rows_0-2000", 1_205), ("rows_0-20000", 1), ("rows_2000-4000", 2)):
            list(
                pool.map(
                    lambda n, f=folder: client.put_object(Bucket=BUCKET, Key=f"train/job-1/{f}/data_{n}.x", Body=b"x" * n), range(count)
                )
            )
    bucket = BucketSamples(f"{s3.url}/job-1/")
    found = {e.name: e.size for e in bucket.entries("rows_0-2000", lambda name: name != "data_5.x")}
    assert len(found) == 1_204 and found["rows_0-2000/data_1204.x"] == 1204
    size_of = bucket.sizes()
    assert [size_of(n) for n in ("rows_0-2000/data_5.x", "rows_2000-4000/data_1.x", "rows_2000-4000/data_9.x", "none/x")] == [
        5,
        1,
        None,
        None,
    ]
    assert list(bucket.entries("rows_4000-6000", lambda _: True)) == []
    assert len(list(bucket.remove_all())) == 1_208 and s3.keys() == {}


def test_what_the_service_says_becomes_an_oserror_that_names_the_place(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = BucketSamples(f"{s3.url}/job-1")
    with pytest.raises(FileNotFoundError, match="s3://drafts/train/job-1/a/b"):
        bucket.map("a/b")
    bucket.remove("a/b")  # no error
    for code, number in (("AccessDenied", errno.EIO), ("QuotaExceeded", errno.ENOSPC)):
        s3.deny = code
        with pytest.raises(OSError, match=code) as e:
            bucket.put("a/b", b"x")
        assert e.value.errno == number and e.value.filename == "s3://drafts/train/job-1/a/b"
    with pytest.raises(OSError, match="NoSuchBucket") as e:
        BucketSamples("s3://no-such-bucket/x").map("a")
    assert not isinstance(e.value, FileNotFoundError)  # not one row that is missing: all of them
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.env["AWS_ENDPOINT_URL"] + "/")  # another client
    with pytest.raises(OSError, match="credentials"):
        bucket.map("a/b")


def test_a_client_is_not_taken_along_into_a_fork(s3: S3) -> None:
    """DataLoader's workers, and a worker's horses, are forks of a process that may have read from the bucket."""
    bucket = BucketSamples(f"{s3.url}/job-1")
    bucket.put("a/b", b"x" * 1000)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_length_and_client, [bucket] * 8) == [(1000, False)] * 8
    assert len(bucket.map("a/b")) == 1000


def test_a_fork_while_another_thread_makes_a_client_does_not_hang(s3: S3) -> None:
    """Seen to fail with the parent's lock in the child."""
    from statetap.store import bucket as module

    bucket = BucketSamples(f"{s3.url}/job-1")
    bucket.put("a/b", b"x" * 1000)
    with module._lock:
        child = multiprocessing.get_context("fork").Process(target=bucket.map, args=("a/b",))
        child.start()
        child.join(20)
    hung = child.is_alive()
    child.kill()
    assert not hung and child.exitcode == 0


def _length_and_client(bucket: BucketSamples) -> tuple[int, bool]:
    length = len(bucket.map("a/b"))
    return length, os.getppid() in {pid for pid, _ in bucket_module._clients}


def test_a_connection_that_ends_under_way_is_tried_again_and_then_told(s3: S3) -> None:
    """Seen to fail with a GET that is not tried again: the library's tries are over when the answer begins."""
    bucket = BucketSamples(f"{s3.url}/job-1")
    bucket.put("a/b", data := os.urandom(300_000))
    s3.cut_gets = 3
    assert bucket.map("a/b").tobytes() == data
    s3.cut_gets = 1_000
    with pytest.raises(OSError, match="s3://drafts/train/job-1/a/b") as e:
        bucket.map("a/b")
    assert e.value.errno == errno.EIO


@pytest.mark.parametrize(("name", "value"), [("AWS_ENDPOINT_URL", "no-url"), ("AWS_PROFILE", "nobody")])
def test_a_client_that_cannot_be_made_is_an_oserror_too(s3: S3, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Seen to fail with a client that is made outside of what turns errors around: boto3's own got out of a LIST and of the probe."""
    monkeypatch.setattr("statetap.store.bucket._clients", {})
    monkeypatch.setenv(name, value)
    bucket = BucketSamples(f"{s3.url}/job-1")
    for do in (lambda: bucket.put("a/b", b"x"), lambda: bucket.map("a/b"), lambda: list(bucket.all()), lambda: bucket.remove("a/b")):
        with pytest.raises(OSError, match=value):
            do()
    with pytest.raises(StoreError, match=value):
        probe_bucket(s3.url)


def test_the_probe_refuses_a_service_that_replaces_objects_and_leaves_nothing(s3: S3) -> None:
    probe_bucket(s3.url)
    s3.honest = False
    with pytest.raises(StoreError, match="If-None-Match") as e:
        probe_bucket(s3.url)
    assert e.value.code is ErrorCode.STORE_UNAVAILABLE and "STATETAP_SAMPLES" in e.value.next_step
    s3.deny = "AccessDenied"
    with pytest.raises(StoreError, match="AccessDenied"):
        probe_bucket(s3.url)
    with pytest.raises(StoreError, match="NoSuchBucket") as e:
        probe_bucket("s3://no-such-bucket")
    assert "endpoint" in e.value.next_step and s3.keys() == {}


@pytest.mark.parametrize("url", ["", "drafts", "s3://", "s3://UPPER/x", "http://drafts/x", "s3://drafts/x?y", "s3:///x"])
def test_what_is_no_bucket_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="s3://bucket"):
        parse_url(url)


def test_a_url_is_taken_apart() -> None:
    assert parse_url("s3://drafts") == ("drafts", "") and parse_url("s3://my.drafts-2/a/b/") == ("my.drafts-2", "a/b")


def test_the_coordinator_does_not_start_on_a_bucket_that_breaks_the_commit(s3: S3, tmp_path: Path, redis_server: RedisServer) -> None:
    env = {**os.environ, "STATETAP_STORE": str(tmp_path / "store"), "STATETAP_REDIS_URL": redis_server.url, "STATETAP_PORT": "0"}

    def start(samples: str) -> str:
        command = [sys.executable, "-m", "statetap.coordinator"]
        done = subprocess.run(command, env={**env, "STATETAP_SAMPLES": samples}, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, done.stderr
        return done.stderr

    s3.honest = False
    assert "store_unavailable" in (said := start(s3.url)) and "If-None-Match" in said and "next: " in said
    assert "STATETAP_SAMPLES" in start("http://drafts")


def test_doctor_tries_the_bucket(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATETAP_SAMPLES", s3.url)
    (tmp_path / "store").mkdir()
    assert f"{s3.url} takes an object once" in cli("doctor", "--cpu", "--store", tmp_path / "store").stdout
    s3.honest = False
    refused = cli("doctor", "--cpu", "--store", tmp_path / "store")
    assert refused.returncode == 1 and "If-None-Match" in refused.stdout


def test_a_job_in_a_bucket_takes_no_room_of_the_store_and_is_counted_all_the_same(
    s3: S3, tmp_path: Path, redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    """Seen to fail with an estimate and a submission that look at the store's disk, and with rates of jobs in folders alone."""
    coordinator, worker = Coordinator(tmp_path, redis_server.url, SAMPLES=s3.url), FakeWorker(redis_client, tmp_path / "store")
    try:
        coordinator.start()
        huge = replace(PROFILE, hidden=1 << 40)
        register_engine(redis_client, huge, worker="w2")
        register_engine(redis_client)
        dataset = make_dataset(coordinator.store, [90] * 4000)
        told = coordinator.http.post("/v1/estimate", json={"dataset_id": dataset, "profile_id": huge.profile_id}).json()
        assert told["bytes"] > told["free"] and told["fits"] and (told["missing"], told["alternatives"]) == (0, [])
        assert coordinator.submit(dataset, profile_id=huge.profile_id)["samples"].startswith(f"{s3.url}/job-")
        job = coordinator.submit(dataset, profile_id=PROFILE.profile_id)["job_id"]
        task = worker.wait()
        assert worker.lease(task, ttl_ms=60_000)
        worker.run(task, rows=40)  # the window begins where the first rows are seen
        until(lambda: coordinator.job(job)["rows"]["done"] == 40, "the first rows are told")
        worker.run(task, rows=60)
        until(lambda: coordinator.job(job)["rates"]["tokens_per_s"], "rates are told")
        lines = dict(line.rsplit(" ", 1) for line in coordinator.http.get("/metrics").text.splitlines() if line[0] != "#")
        assert all(float(lines[f"statetap_{unit}_per_second"]) > 0 for unit in ("rows", "tokens", "bytes"))
        assert float(lines["statetap_store_reserved_bytes"]) == 0
    finally:
        worker.close()
        coordinator.close()
