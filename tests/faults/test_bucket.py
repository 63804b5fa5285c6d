"""Sample files in a bucket, under faults: the promises are those of a folder. Records stay on the store."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from statetap.contracts import keys
from statetap.contracts.capture import new_lease
from statetap.contracts.errors import ErrorCode, StoreError
from statetap.contracts.sample_format import SampleFormat
from statetap.store.bucket import BucketSamples
from statetap.store.commit import Committer, Outcome
from statetap.store.delete import TRASH_PREFIX
from statetap.store.export.registry import FORMATS
from statetap.store.export.run import export_job
from statetap.store.reader import JobDataset
from statetap.store.rows import RowsFile
from statetap.store.sample import Placed, SampleWriter
from statetap.store.stream import JobStream
from tests.faults.forms import SEED, figure, times
from tests.support.coordinator import until
from tests.support.jobs import StateMaker, make_job, profile, token_rows
from tests.support.redis import RedisServer, free_port
from tests.support.s3 import S3, bucket_service, s3
from tests.support.service import ENDED, Service, run, verified
from tests.support.storm import Storm, assert_each_row_once, completed
from tests.support.workers import eventually

__all__ = ["bucket_service", "s3"]


def equal(a: Path, b: Path, **chosen: object) -> bool:
    ours, theirs = JobDataset(a, **chosen), JobDataset(b, **chosen)
    assert len(ours) == len(theirs) > 0
    return all(torch.equal(x[name], y[name]) for x, y in zip(ours, theirs, strict=True) for name in y)


FORMATS_OF_A_JOB = ({}, {"encoding": "zstd"}, {"encoding": "fp8"}, {"positions": "last:3"})


def test_a_job_in_a_bucket_is_the_job_in_a_folder(tmp_path: Path, redis_server: RedisServer, s3: S3) -> None:
    """Seen to fail with a PUT of the bytes without those of the mask: the job never ended."""
    rows = [r[: 1 + n % 40] for n, r in enumerate(token_rows(80, 40))]
    paths: dict[str, list[Path]] = {}
    for samples in (s3.url, ""):
        folder = tmp_path / ("bucket" if samples else "folder")
        folder.mkdir()
        with Service(folder, redis_server.url, settings={"SAMPLES": samples}) as service:
            service.start(workers=2)
            service.dataset(rows)
            for fields in FORMATS_OF_A_JOB:
                s3.puts.clear()
                job = run(service, **fields)
                path = service.path(job["job_id"])
                paths.setdefault(samples, []).append(path)
                objects = s3.keys(f"train/{job['job_id']}/")
                assert job["state"] == "completed" and verified(service, job) == {}
                if samples:
                    assert job["samples"] == f"{s3.url}/{job['job_id']}" and not list(path.glob("rows_*"))
                    assert len(objects) == 80 and sum(objects.values()) == job["bytes"]["committed"] and set(s3.puts.values()) == {1}
                else:
                    assert job["samples"] is None and not objects and not s3.puts
            service.rig.redis.flushall()
    assert all(equal(a, b) for a, b in zip(paths[s3.url], paths[""], strict=True))


@pytest.mark.timeout(900)
def test_a_storm_of_kills_leaves_each_row_once(tmp_path: Path, redis_server: RedisServer, s3: S3) -> None:
    """Seen to fail with a resume that sees no objects."""
    count, most = times(200, 3_000), times(8, 300)
    settings = {"PORT": str(free_port()), "SAMPLES": s3.url}
    with Service(tmp_path, redis_server.url, settings=settings, window=2, workers_per_engine=3) as service:
        service.dataset(token_rows(count, 60))
        service.start(workers=3, delay_ms=100)
        s3.slow_s = 0.05  # so that workers die between a PUT and the ledger
        job = service.api.submit("ds-1")["job_id"]
        over = completed(service, job)
        with Storm(service, redis_server, job, SEED, (0.5, 2.0)) as storm:
            storm.run(lambda: over() or storm.kills.total() >= most, 600)
            kills = storm.kills.total()
            eventually("it is complete", over, 120)
        assert_each_row_once(service, job, count, s3.keys(f"train/{job}/"))
        assert kills >= times(5, 60)
        note = f"{count:,} rows into a bucket, {kills} kills, {sum(n > 1 for n in s3.puts.values())} rows put again"
        print(f"\n{note}")
        figure("faults.bucket_kills", kills, "kills", note)


@pytest.mark.timeout(900)
def test_what_a_job_in_a_bucket_leaves_on_the_store_is_some_hundred_bytes_a_row(service: Service, s3: S3) -> None:
    """Seen to fail with samples in the folder."""
    count = times(400, 4_000)
    service.start(workers=2)
    service.dataset(token_rows(count, 20))
    job = service.api.until_state(service.api.submit("ds-1")["job_id"], *ENDED, seconds=600)
    assert job["rows"]["done"] == count == len(s3.keys(f"train/{job['job_id']}/"))
    path, sizes = service.path(job["job_id"]), Counter[str]()
    for file in path.rglob("*"):
        if file.is_file():
            sizes[str(file.relative_to(path)).partition("/")[0]] += file.stat().st_size
    a_row = sizes.total() / count
    assert 100 < a_row < 500 and {"job.json", "plan.parquet", "ledger", "manifest.parquet", "COMPLETE"} <= sizes.keys()
    parts = ", ".join(f"{name} {size:,}" for name, size in sizes.most_common(3))
    note = f"{count:,} rows, the job's folder in all: {parts} bytes, the rest of a fixed size"
    figure("s3.record_bytes_a_row", round(a_row), "bytes", note)


def test_an_object_without_a_ledger_line_is_adopted_and_a_wrong_one_is_not(service: Service, s3: S3) -> None:
    """Seen to fail with a resume that lists the folder, not the bucket: 80 prefills and not 3."""
    service.start()
    service.dataset(token_rows(40, 20))
    job = run(service)
    path = service.path(job["job_id"])
    prefix = f"train/{job['job_id']}/rows_0-2000"
    client = s3.client()
    whole = client.get_object(Bucket="drafts", Key=f"{prefix}/data_5.safetensors")["Body"].read()
    client.put_object(Bucket="drafts", Key=f"{prefix}/data_5.safetensors", Body=whole[:-1] + bytes([whole[-1] ^ 1]))
    client.put_object(Bucket="drafts", Key=f"{prefix}/data_6.safetensors", Body=whole)
    client.delete_object(Bucket="drafts", Key=f"{prefix}/data_7.safetensors")
    before = service.rig.stats()["requests"]
    _forget(service, path, job["job_id"])
    again = service.api.until_state(job["job_id"], *ENDED, seconds=40)
    assert again["rows"]["done"] == 40 and verified(service, job) == {}
    assert service.rig.stats()["requests"] - before == 3


def _forget(service: Service, path: Path, job_id: str) -> None:
    """As if every worker had died between its last PUT and the ledger, and Redis were lost."""
    service.api.kill()
    for name in ("COMPLETE", "manifest.parquet", *(f"ledger/{p.name}" for p in (path / "ledger").iterdir())):
        os.unlink(path / name)
    control = path / "control.json"
    control.write_text(control.read_text().replace('"completed"', '"running"').replace('"ended_at"', '"was"'))
    service.rig.redis.flushall()
    service.api.start()


def test_a_put_whose_reply_is_lost_is_found_and_recorded(service: Service, s3: S3) -> None:
    """Seen to fail with a name that is taken as an error: the batch ended with it."""
    service.start()
    service.dataset(token_rows(60, 20))
    s3.taken.clear()  # of the probe
    s3.lose_replies = 9
    job = run(service)
    assert job["state"] == "completed" and job["rows"]["done"] == 60 and verified(service, job) == {}
    assert len(list((service.path(job["job_id"]) / "ledger").iterdir())) == job["batches"]["total"], "no batch was run again for it"
    assert sum(s3.taken.values()) == 9 and service.rig.stats()["requests"] == 60


def test_taken_names_are_looked_at_before_they_are_recorded(tmp_path: Path, s3: S3) -> None:
    """Seen to fail with a commit that records its own sample where another's object stands."""
    p = profile()
    format, bucket, maker = SampleFormat(p), BucketSamples(f"{s3.url}/job-1"), StateMaker(p)
    job_dir, rows_path, _ = make_job(tmp_path / "store", p, token_rows(3, 20))
    rows = list(RowsFile(rows_path).read(0, 3))
    first, second = new_lease(), new_lease()

    def stage(attempt: str, n: int) -> Placed:
        (tap_file := tmp_path / f"{attempt}-{n}").write_bytes(maker.tap_file(rows[n].input_ids))
        staged = SampleWriter(job_dir, format, attempt, bucket).stage(rows[n], 0, tap_file)
        assert isinstance(staged, Placed)
        return staged

    def commit(attempt: str, item: Placed) -> Outcome:
        told: list[Outcome] = []
        committer = Committer(job_dir, format, 0, attempt, told.extend, bucket)
        committer.submit(item)
        committer.close()
        assert not item.tap_file.exists()
        return told[0]

    def lines(attempt: str) -> list[int]:
        path = job_dir / "ledger" / f"0.{attempt}.jsonl"
        return [json.loads(line)["row"] for line in path.read_text().splitlines()] if path.exists() else []

    sleeping, late = stage(first, 0), stage(second, 0)
    assert sleeping.first and not late.first
    adopted = commit(second, late)
    assert adopted.record is not None and adopted.record.xxh3 == sleeping.record.xxh3 and not adopted.won and lines(second) == [0]
    assert commit(first, sleeping).won  # it wakes: the same record once more, which counts once
    bucket.put(rows_0 := "rows_0-2000/data_1.safetensors", b"not a sample")
    wrong = commit(second, stage(second, 1))
    assert (wrong.record, wrong.error, wrong.won) == (None, None, False) and f"train/job-1/{rows_0}" not in set(s3.keys())
    assert commit(second, stage(second, 1)).won and commit(first, stage(first, 2)).won
    told = commit(second, stage(second, 2))
    assert told.record is not None and not told.won and (lines(first), lines(second)) == ([0, 2], [0, 1])


@pytest.mark.parametrize(("code", "reason"), [("AccessDenied", "circuit_open"), ("QuotaExceeded", "low_disk")])
def test_a_bucket_that_refuses_pauses_the_job_with_its_words_and_loses_nothing(service: Service, s3: S3, code: str, reason: str) -> None:
    """Seen to fail with answers of the service that are no OSError: the batch ended as a bug of ours."""
    service.start()
    service.dataset(token_rows(80, 20))
    s3.deny = code
    job = service.api.submit("ds-1")["job_id"]
    paused = service.api.until_state(job, "paused", reason=reason, seconds=30)
    assert code in paused["message"] and f"{s3.url}/{job}/rows_0-2000" in paused["message"] and paused["rows"]["failed"] == 0
    s3.deny = ""
    service.post(f"/v1/jobs/{job}/resume")
    done = service.api.until_state(job, *ENDED, seconds=40)
    assert done["rows"]["done"] == 80 and verified(service, done) == {}


@pytest.mark.timeout(120)
def test_a_put_that_hangs_does_not_hold_up_a_stop(service: Service, s3: S3) -> None:
    """Seen to fail with an end of the batch that waits for its writer threads: for minutes, until the service cuts the connection."""
    service.start(STATETAP_DRAIN_S=2)
    service.dataset(token_rows(60, 20))
    s3.slow_s = 300.0
    job = service.api.submit("ds-1")["job_id"]
    until(lambda: s3.held, "objects are on their way", 30)
    assert service.rig.processes[-1].term(20) == 0
    eventually("the batch is handed back", lambda: not service.rig.redis.exists(keys.lease(job, 0)), 2)
    s3.slow_s = 0.0  # what the one that stopped had sent comes late
    service.rig.start_worker("next")
    done = service.api.until_state(job, *ENDED, seconds=40)
    assert done["rows"]["done"] == 60 and verified(service, done) == {}


def test_verify_names_damaged_objects_and_a_repair_captures_those_alone(service: Service, s3: S3) -> None:
    """Seen to fail with a verify that does not hash what it fetched."""
    service.start()
    service.dataset(token_rows(50, 20))
    job = run(service)
    client, prefix = s3.client(), f"train/{job['job_id']}/rows_0-2000"
    data = client.get_object(Bucket="drafts", Key=f"{prefix}/data_9.safetensors")["Body"].read()
    client.put_object(Bucket="drafts", Key=f"{prefix}/data_9.safetensors", Body=data[:5000] + bytes([data[5000] ^ 4]) + data[5001:])
    client.delete_object(Bucket="drafts", Key=f"{prefix}/data_30.safetensors")
    assert verified(service, job) == {"file_corrupt": 1, "file_missing": 1}
    before = service.rig.stats()["requests"]
    service.post(f"/v1/jobs/{job['job_id']}/retry", rows=[[9, 10], [30, 31]])
    until(lambda: service.api.job(job["job_id"])["state"] == "completed" and verified(service, job) == {}, "it is repaired", 40)
    assert service.rig.stats()["requests"] - before == 2
    names = {k.rpartition("/")[2] for k in s3.keys(prefix)}
    assert len(names) == 50 and {"data_9.g1.safetensors", "data_30.g1.safetensors"} <= names


def test_reuse_copies_within_the_bucket_and_delete_and_gc_empty_it(service: Service, s3: S3) -> None:
    """Seen to fail with a delete of the folder alone, with an object that is fetched to be looked at and again to be copied, and with a
    damaged object that is copied (its states are not what the row is told by)."""
    service.start()
    rows = token_rows(60, 20)
    service.dataset(rows)
    first = run(service, rows=40)
    key = f"train/{first['job_id']}/rows_0-2000/data_9.safetensors"
    data = s3.client().get_object(Bucket="drafts", Key=key)["Body"].read()
    s3.client().put_object(Bucket="drafts", Key=key, Body=data[:5000] + bytes([data[5000] ^ 4]) + data[5001:])
    s3.gets.clear()
    second = run(service)
    assert sum(s3.gets.values()) == 40 and set((+s3.gets).values()) == {1}
    assert second["rows"]["reused"] == 39 and service.rig.stats()["requests"] == 61 and verified(service, second) == {}
    dry = service.api.http.delete(f"/v1/jobs/{first['job_id']}", params={"dry_run": True}).json()
    freed = service.api.http.delete(f"/v1/jobs/{first['job_id']}").json()
    assert freed["files"] == dry["files"] > 40 and freed["bytes"] == dry["bytes"] > first["bytes"]["committed"]
    assert len(s3.keys()) == 60 and verified(service, second) == {}
    # A file of a generation that was written again, and a delete that was killed after its rename.
    s3.client().put_object(Bucket="drafts", Key=f"train/{second['job_id']}/rows_0-2000/data_3.g7.safetensors", Body=b"old")
    found = service.post("/v1/gc", 200, dry_run=False)["items"]
    assert [(i["kind"], i["files"], i["bytes"]) for i in found] == [("unnamed_files", 1, 3)] and verified(service, second) == {}
    service.api.kill()
    os.rename(service.path(second["job_id"]), service.path(f"{TRASH_PREFIX}{second['job_id']}-00000000"))
    service.api.start()
    service.post("/v1/gc", 200, dry_run=False)
    assert s3.keys() == {} and not list((service.rig.store / "jobs").iterdir())


def test_objects_are_taken_over_side_by_side_until_a_pause(service: Service, s3: S3) -> None:
    """Seen to fail with a take-over that goes on to the end of its batch, and with one object after the other."""
    service.start()
    service.dataset(token_rows(150, 20))
    run(service)
    s3.slow_s = 1.0
    second = service.api.submit("ds-1")["job_id"]
    until(lambda: s3.held == 8, "it takes objects over, eight at once", 20)
    service.post(f"/v1/jobs/{second}/pause")
    until(lambda: not service.api.job(second)["batches"]["outstanding"], "its batch is handed back", 8)
    assert len(s3.keys(f"train/{second}/")) < 100
    s3.slow_s = 0.0
    service.post(f"/v1/jobs/{second}/resume")
    job = service.api.until_state(second, *ENDED, seconds=40)
    assert job["rows"]["reused"] == 150 and service.rig.stats()["requests"] == 150 and verified(service, job) == {}


def test_rows_that_were_read_leave_the_bucket(service: Service, s3: S3) -> None:
    """Seen to fail with acknowledgements that free files of the folder, and with a request for each row, while the job's lock is held."""
    service.start()
    service.dataset(token_rows(120, 50))
    most = 50 * (4096 + 50 * (4 * 64 * 2 + 5))
    job = service.api.submit("ds-1", retain="until_read", retain_bytes=most)["job_id"]
    service.api.until_state(job, "paused", reason="store_full", seconds=30)
    assert 0 < sum(s3.keys().values()) <= most
    s3.requests.clear()
    read = [int(i["row"]) for i in JobStream(service.path(job), ack=lambda ranges: service.post(f"/v1/jobs/{job}/acks", 200, rows=ranges))]
    assert sorted(read) == list(range(120)) and s3.keys() == {} and s3.requests["DELETE"] == 0 < s3.requests["POST"] <= 20
    eventually("it has ended", lambda: service.api.job(job)["state"] == "completed")


def test_a_job_in_a_bucket_is_exported(service: Service, s3: S3, tmp_path: Path) -> None:
    """Seen to fail with an export that opens files below the job's folder, and with one that fetches them to hash them and again to load them."""
    service.start()
    service.dataset(token_rows(20, 20))
    job = run(service)
    s3.gets.clear()
    s3.cut_gets = 3  # connections that end under way are no damage, and no end of an export
    report = export_job(service.path(job["job_id"]), tmp_path / "out", FORMATS["speculators"])
    assert (report.written, report.bad) == (20, 0) and sum(s3.gets.values()) == 23
    assert set(s3.ranges.values()) == {4096 + 20 * 5} and len(s3.ranges) == 20, "the end counts tokens: header, ids, masks"
    packed = run(service, encoding="zstd", reuse=False)
    s3.gets.clear()
    report = export_job(service.path(packed["job_id"]), tmp_path / "packed", FORMATS["speculators"])
    assert report.written == 20 and sum(s3.gets.values()) == 20
    lists = [(tmp_path / out / "data-00000-of-00001.arrow").read_bytes() for out in ("out", "packed")]
    assert lists[0] == lists[1]
    s3.away = True
    with pytest.raises(StoreError, match="AccessDenied") as e:
        JobDataset(service.path(job["job_id"]))[3]
    assert e.value.code is ErrorCode.STORE_IO
    s3.away = False
    s3.client().delete_object(Bucket="drafts", Key=f"train/{job['job_id']}/rows_0-2000/data_2.safetensors")
    assert verified(service, job) == {"file_missing": 1}
