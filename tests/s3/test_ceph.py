"""Samples in a bucket of Ceph's gateway: what the commit stands on, the answers of a service that is not moto, and whole jobs."""

from __future__ import annotations

import errno
import os
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from statetap.contracts.errors import StoreError
from statetap.store import bucket as bucket_module
from statetap.store.bucket import BucketSamples, probe_bucket
from tests.support.ceph import Ceph, version
from tests.support.figures import print_figure
from tests.support.jobs import profile, token_rows
from tests.support.redis import RedisServer, free_port
from tests.support.s3 import reads_in_parts
from tests.support.service import ENDED, Service, run, verified
from tests.support.storm import Storm, assert_each_row_once, completed
from tests.support.workers import eventually

pytestmark = pytest.mark.timeout(600)
MIB = 1 << 20
SEED = 20251129


def figure(name: str, value: float, unit: str, note: str) -> None:
    """Print a figure, where figures are asked for."""
    if os.environ.get("STATETAP_FIGURES"):
        print_figure(name, value, unit, "STATETAP_FIGURES=1 make s3", f"Ceph {version()}, one OSD (BlueStore on a file); {note}")


def start_service(folder: Path, redis_server: RedisServer, samples: str, **env: object) -> Service:
    """Not entered yet. ``samples``: URL of a bucket, or nothing."""
    folder.mkdir(exist_ok=True)
    return Service(folder, redis_server.url, settings={"PORT": str(free_port()), "SAMPLES": samples}, **env)


# one request


def test_the_probe_passes_and_leaves_nothing(ceph: Ceph) -> None:
    """Seen to fail with a probe whose object is not removed."""
    bucket = ceph.bucket()
    probe_bucket(f"s3://{bucket}/train")
    assert ceph.keys(bucket) == {}


def test_objects_are_read_in_part(ceph: Ceph) -> None:
    reads_in_parts(BucketSamples(f"s3://{ceph.bucket()}/train/job-1"))


def test_of_32_puts_of_a_name_at_once_one_wins_and_is_whole(ceph: Ceph) -> None:
    """Seen to fail with a PUT without its condition: each of the 32 thought that it had won."""
    bucket = BucketSamples(f"s3://{ceph.bucket()}/train/job-1")
    with ThreadPoolExecutor(32) as pool:
        for row in range(20):
            together, name = threading.Barrier(32), f"rows_0-2000/data_{row}.safetensors"

            def put(n: int, together: threading.Barrier = together, name: str = name) -> bool:
                together.wait()
                return bucket.put(name, bytearray([n]) * 100_000)

            won = list(pool.map(put, range(32)))
            assert won.count(True) == 1 and bucket.map(name).tobytes() == bytes([won.index(True)]) * 100_000
            assert not bucket.put(name, b"late")


def test_a_body_that_was_damaged_on_the_way_is_refused(ceph: Ceph) -> None:
    """Ceph 16 does not look at the CRC32 that we send, but at the body's SHA-256 in the signature. Seen to fail without that."""
    bucket, name = BucketSamples(f"s3://{ceph.bucket()}/train"), "rows_0-2000/data_0.safetensors"

    def damage(request: object, **_: object) -> None:
        body = bytearray(request.body.read())  # type: ignore[attr-defined]
        body[1000] ^= 1
        request.body = bytes(body)  # type: ignore[attr-defined]

    events = bucket_module._client().meta.events
    events.register("before-send.s3.PutObject", damage)
    try:
        with pytest.raises(OSError, match="XAmzContentSHA256Mismatch"):
            bucket.put(name, bytearray(5000))
    finally:
        events.unregister("before-send.s3.PutObject", damage)
    assert list(bucket.all()) == [] and bucket.put(name, bytearray(5000))


def test_folders_are_listed_as_soon_as_they_are_written_and_emptied_in_pages(ceph: Ceph) -> None:
    """Seen to fail with a listing of one page, and with requests to delete more than 1,000 names."""
    name = ceph.bucket()
    bucket = BucketSamples(f"s3://{name}/train/job-1")
    with ThreadPoolExecutor(16) as pool:
        for folder, count in (("rows_0-2000", 2_005), ("rows_0-20000", 1), ("rows_2000-4000", 2)):
            assert all(pool.map(lambda n, f=folder: bucket.put(f"{f}/data_{n}.x", b"x" * n), range(count)))
            assert {e.name: e.size for e in bucket.entries(folder, lambda _: True)} == {f"{folder}/data_{n}.x": n for n in range(count)}
    size_of = bucket.sizes()
    assert [size_of(f"rows_0-2000/data_{n}.x") for n in (0, 2_004, 2_005)] == [0, 2_004, None]
    assert bucket.map("rows_0-2000/data_0.x").tobytes() == b"" and bucket.map("rows_0-2000/data_9.x").tobytes() == b"x" * 9
    bucket.remove("rows_2000-4000/data_1.x")
    bucket.remove("rows_2000-4000/data_1.x")  # no error
    assert len(list(bucket.remove_all())) == 2_007 and ceph.keys(name) == {}


def test_a_row_of_a_gibibyte(ceph: Ceph) -> None:
    """Seen to fail with the bytearray as body: what takes more than five seconds to send was ended and begun again, six times."""
    bucket, row = BucketSamples(f"s3://{ceph.bucket()}/train"), bytearray(os.urandom(MIB)) * 1024
    assert bucket.put("rows_0-2000/data_0.safetensors", row)
    assert xxhash.xxh3_64_hexdigest(bucket.map("rows_0-2000/data_0.safetensors")) == xxhash.xxh3_64_hexdigest(row)
    assert not bucket.put("rows_0-2000/data_0.safetensors", row)


def test_what_the_gateway_refuses_becomes_an_oserror_that_says_so(ceph: Ceph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail with QuotaExceeded as any other answer: Ceph's has the status 403, not 507."""
    name = ceph.bucket()
    bucket = BucketSamples(f"s3://{name}/train")
    with pytest.raises(FileNotFoundError, match="NoSuchKey"):
        bucket.map("a/b")
    for ask in (lambda b: b.put("a/b", b"x"), lambda b: b.map("a/b"), lambda b: b.remove("a/b"), lambda b: list(b.all())):
        with pytest.raises(OSError, match="NoSuchBucket") as e:
            ask(BucketSamples("s3://no-such-bucket/x"))
        assert not isinstance(e.value, FileNotFoundError)  # not one row that is missing: all of them
    with pytest.raises(StoreError, match="NoSuchBucket"):
        probe_bucket("s3://no-such-bucket")
    ceph.quota(name, MIB)
    for size in (2 * MIB, 200 * MIB):  # the answer comes through also where most of the body is still to go
        with pytest.raises(OSError, match="QuotaExceeded") as e:
            bucket.put("a/b", bytearray(size))
        assert e.value.errno == errno.ENOSPC
    assert bucket.put("a/b", bytearray(MIB // 2))
    for variable, code in (("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch"), ("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId")):
        monkeypatch.setenv(variable, "wrong")
        bucket_module._clients.clear()  # it has the keys that it began with
        with pytest.raises(OSError, match=code) as e:
            bucket.put("c/d", b"x")
        assert e.value.errno == errno.EIO
    bucket_module._clients.clear()


def test_a_gateway_that_is_killed_in_the_middle_of_a_put_leaves_nothing_to_be_seen(ceph: Ceph) -> None:
    """Seen to fail with a client that tries once."""
    name = ceph.bucket()
    bucket, row = BucketSamples(f"s3://{name}/train"), bytearray(os.urandom(MIB)) * 400
    with ThreadPoolExecutor(1) as pool:
        before = len(ceph.stored())
        putting = pool.submit(bucket.put, "rows_0-2000/data_0.safetensors", row)
        eventually("a part of it is stored", lambda: len(ceph.stored()) > before + 10)
        ceph.kill_gateway()
        assert not putting.done()
        ceph.start_gateway()
        seen = ceph.keys(name)
        # The library's next try may have ended meanwhile, but nothing is ever there in part.
        assert set(seen.values()) <= {len(row)}
        assert putting.result(120)
    assert ceph.keys(name) == {"train/rows_0-2000/data_0.safetensors": len(row)}
    assert xxhash.xxh3_64_hexdigest(bucket.map("rows_0-2000/data_0.safetensors")) == xxhash.xxh3_64_hexdigest(row)


# whole jobs


def test_a_full_bucket_pauses_the_job_as_low_disk_and_a_dead_gateway_as_circuit_open(
    tmp_path: Path, redis_server: RedisServer, ceph: Ceph
) -> None:
    """Seen to fail with QuotaExceeded as any other answer: the reason was circuit_open."""
    bucket = ceph.bucket()
    with start_service(tmp_path, redis_server, f"s3://{bucket}/train") as service:
        service.dataset(token_rows(300, 400))  # of 200 KiB each
        service.start(workers=2, delay_ms=20)
        ceph.quota(bucket, 20 * MIB)
        job = service.api.submit("ds-1")["job_id"]
        paused = service.api.until_state(job, "paused", reason="low_disk", seconds=60)
        assert "QuotaExceeded" in paused["message"] and paused["rows"]["failed"] == 0
        assert 10 * MIB < sum(ceph.keys(bucket).values()) < 30 * MIB  # the gateway does not count what is under way
        ceph.quota(bucket, 0)
        ceph.kill_gateway()
        service.post(f"/v1/jobs/{job}/resume")
        try:
            paused = service.api.until_state(job, "paused", reason="circuit_open", seconds=180)
        finally:
            ceph.start_gateway()
        assert ceph.endpoint in paused["message"] and paused["rows"]["failed"] == 0
        service.post(f"/v1/jobs/{job}/resume")
        service.api.until_state(job, *ENDED, seconds=90)
        assert_each_row_once(service, job, 300, ceph.keys(bucket))


def test_a_storm_of_kills_of_workers_and_gateway_leaves_each_row_once(tmp_path: Path, redis_server: RedisServer, ceph: Ceph) -> None:
    """Seen to fail with a resume that sees no objects, and with the library's own tries alone: the job paused."""
    count, bucket, gateway_kills = 500, ceph.bucket(), 0
    with start_service(tmp_path, redis_server, f"s3://{bucket}/train", window=2, workers_per_engine=3) as service:
        service.dataset(token_rows(count, 400))
        service.start(workers=3, delay_ms=100)
        job = service.api.submit("ds-1")["job_id"]
        over = completed(service, job)
        with Storm(service, redis_server, job, SEED, (0.3, 1.0)) as storm:

            def over_or_gateway() -> bool:
                """Each fifth kill is followed by one of the gateway, that is away for three seconds."""
                nonlocal gateway_kills
                if storm.kills.total() >= 5 * (gateway_kills + 1):
                    gateway_kills += 1
                    ceph.kill_gateway()
                    time.sleep(3)  # it is away
                    ceph.start_gateway()
                return over() or storm.kills.total() >= 40

            storm.run(over_or_gateway, 400)
            eventually("it is complete", over, 120)
            kills = storm.kills
        objects = ceph.keys(bucket)
        assert_each_row_once(service, job, count, objects)
        told = service.api.job(job)
        assert told["rows"]["done"] == count and sum(objects.values()) == told["bytes"]["committed"]
        assert kills.total() >= 12 and kills["worker"] and kills["horse"] and gateway_kills >= 2
        note = f"{count} rows of 200 KiB; {dict(kills)}, and {gateway_kills} of the gateway"
        print(f"\n{note}")
        figure("s3.kills", kills.total() + gateway_kills, "kills", f"seed {SEED}; {note}; each row once, and right")
        assert service.api.http.delete(f"/v1/jobs/{job}").status_code == 200 and ceph.keys(bucket) == {}


def test_rows_of_some_mib_go_into_the_bucket_at_a_rate(tmp_path: Path, redis_server: RedisServer, ceph: Ceph) -> None:
    """A figure: the same job by the same workers into the bucket and into a folder of the same disk, in turns."""
    p = profile(hidden=1024, max_length=1_000)
    rows, rounds = 120, 3 if os.environ.get("STATETAP_FIGURES") else 1
    rates: dict[str, list[float]] = {"bucket": [], "folder": []}
    for turn in range(rounds):
        for kind in rates:
            bucket = ceph.bucket()
            with start_service(
                tmp_path / f"{kind}-{turn}", redis_server, f"s3://{bucket}/train" if kind == "bucket" else "", profile=p, tap_bytes=1 << 30
            ) as service:
                service.dataset(token_rows(rows, 500))
                service.start(workers=2)
                started = time.monotonic()
                job = run(service)
                rates[kind].append(job["bytes"]["committed"] / MIB / (time.monotonic() - started))
                assert job["rows"]["done"] == rows and verified(service, job) == {}
                assert len(ceph.keys(bucket)) == (rows if kind == "bucket" else 0)
                service.api.http.delete(f"/v1/jobs/{job['job_id']}")
                service.rig.redis.flushall()
    into, beside = (statistics.median(rates[kind]) for kind in ("bucket", "folder"))
    note = f"{rows} rows of {job['bytes']['committed'] / rows / MIB:.1f} MiB, 2 workers, stub engine, all on this machine; submit to end, median of {rounds}"
    note += "; " + "; ".join(f"{kind} {', '.join(f'{r:.0f}' for r in found)} MiB/s" for kind, found in rates.items())
    print(f"\n{note}")
    figure("s3.ceph_over_folder", round(into / beside, 3), "ratio", note)
    figure("s3.ceph_put_mib_per_s", round(into, 1), "MiB/s", note)
    assert into > 1
