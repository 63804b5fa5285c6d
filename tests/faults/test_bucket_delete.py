"""Objects of jobs that are deleted: what is late, what is another's, what a clean-up leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from statetap.store.delete import NOTE_KEPT_S, TRASH_PREFIX, delete_job
from tests.support.coordinator import until
from tests.support.jobs import token_rows
from tests.support.s3 import S3, bucket_service, s3
from tests.support.service import Service, run, verified
from tests.support.workers import eventually

__all__ = ["bucket_service", "s3"]


def test_objects_that_come_after_their_job_was_deleted_are_found_and_no_others(service: Service, s3: S3, tmp_path: Path) -> None:
    """The bucket is another store's too. Seen to fail without the note that a deleted job leaves, with a clean-up that looks below the
    whole prefix, and with one that does not see that the job is back."""
    service.start()
    service.dataset(token_rows(12, 20))
    kept, gone, back = (run(service, reuse=False)["job_id"] for _ in range(3))
    shutil.copytree(service.path(back), tmp_path / "backup")
    for job in (gone, back):
        assert service.api.http.delete(f"/v1/jobs/{job}").json()["files"] > 12
    shutil.copytree(tmp_path / "backup", service.path(back))
    late, theirs = (
        [f"train/{job}/rows_0-2000/data_3.safetensors" for job in (gone, back)],
        [
            "train/job-0123456789abcdef/rows_0-2000/data_3.safetensors",  # of another store
            f"train/{gone}x/rows_0-2000/data_3.safetensors",
            f"train/{gone}",
        ],
    )
    for key in late + theirs:
        s3.client().put_object(Bucket="drafts", Key=key, Body=b"late")
    for dry_run, count in ((True, 1), (True, 1), (False, 1), (False, 0)):
        found = service.post("/v1/gc", 200, dry_run=dry_run)["items"]
        assert [(i["kind"], i["name"], i["files"], i["bytes"]) for i in found] == [("trash", gone, 1, 4)] * count
        there = set(s3.keys())
        assert (late[0] in there) == dry_run and there > {late[1], *theirs} and verified(service, {"job_id": kept}) == {}
    # It looks there for a week.
    note = service.rig.store / "deleted" / f"{gone}.json"
    assert [p.name for p in note.parent.iterdir()] == [note.name], "that of the job that is back is gone"
    data = json.loads(note.read_text())
    note.write_text(json.dumps(data | {"at": data["at"] - NOTE_KEPT_S - 1}))
    s3.client().put_object(Bucket="drafts", Key=late[0], Body=b"late")
    service.post("/v1/gc", 200, dry_run=False)
    assert not s3.keys(late[0]) and not note.exists()


@pytest.mark.timeout(180)
def test_what_a_worker_puts_after_its_job_was_deleted_is_freed(service: Service, s3: S3) -> None:
    """A horse that sleeps over its lease, the job's cancellation and its deletion. Seen to fail with a clean-up that looks at jobs alone."""
    service.start(delay_ms=100, module="tests.faults.short_lease_worker", STATETAP_WINDOW=4)
    service.dataset(token_rows(400, 20))
    job = service.api.submit("ds-1")["job_id"]
    until(lambda: service.api.job(job)["rows"]["done"], "it has begun", 30)
    horse = service.rig.processes[-1].horse()
    assert horse is not None
    os.kill(horse.pid, signal.SIGSTOP)
    try:
        service.post(f"/v1/jobs/{job}/cancel")
        service.api.until_state(job, "cancelled", seconds=40)
        assert service.api.http.delete(f"/v1/jobs/{job}").status_code == 200 and s3.keys() == {}
    finally:
        os.kill(horse.pid, signal.SIGCONT)
    eventually("it puts what it had in hand", lambda: s3.keys(f"train/{job}/"), 30)
    eventually("it ends", lambda: f"event=batch_ended job={job}" in service.rig.processes[-1].log, 60)
    count = len(s3.keys())
    found = service.post("/v1/gc", 200, dry_run=False)["items"]
    assert [(i["kind"], i["name"], i["files"]) for i in found] == [("trash", job, count)] and s3.keys() == {}


def test_a_copy_of_a_job_does_not_take_the_objects_with_it(service: Service, s3: S3) -> None:
    """Seen to fail with a delete of whatever job.json names."""
    service.start()
    service.dataset(token_rows(12, 20))
    job = run(service)
    copy = service.path("job-ffffffffffffffff")
    shutil.copytree(service.path(job["job_id"]), copy)
    data = json.loads((copy / "job.json").read_text())
    delete_job(copy)
    assert not copy.exists() and verified(service, job) == {}
    service.path(job["job_id"]).joinpath("job.json").write_text(json.dumps(data | {"samples": s3.url}))
    s3.client().put_object(Bucket="drafts", Key="train/of-another", Body=b"theirs")
    delete_job(service.path(job["job_id"]))
    assert len(s3.keys()) == 13 and not list((service.rig.store / "deleted").glob("*"))


def test_a_clean_up_goes_on_where_the_bucket_is_away(service: Service, s3: S3) -> None:
    """Seen to fail with an error of the bucket that ends the request."""
    service.start()
    service.dataset(token_rows(12, 20))
    gone, ended = (run(service, reuse=False)["job_id"] for _ in range(2))
    os.rename(service.path(gone), service.path(f"{TRASH_PREFIX}{gone}-00000000"))
    (service.path(ended) / ".tmp-0123456789abcdef-control.json").write_bytes(b"torn")
    os.utime(service.path(ended) / ".tmp-0123456789abcdef-control.json", (0, 0))
    s3.away = True
    found = service.post("/v1/gc", 200, dry_run=False)["items"]
    assert found == [] and "event=trash_left" in service.api.log.read_text()
    s3.away = False
    found = service.post("/v1/gc", 200, dry_run=False)["items"]
    assert [(i["kind"], i["name"]) for i in found] == [("trash", f"{TRASH_PREFIX}{gone}-00000000"), ("unnamed_files", ended)]
    assert len(s3.keys()) == 12
