"""A job takes what earlier ones have done; deleting frees what nobody needs and refuses what somebody does."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from statetap.store.delete import TRASH_PREFIX, Reading
from statetap.store.keyindex import KeyIndex, build_index, row_key
from statetap.store.ledger import JobLedger
from statetap.store.rows import RowsFile
from statetap.store.verify import verify_job
from tests.support.coordinator import until
from tests.support.jobs import token_rows
from tests.support.redis import RedisServer
from tests.support.service import Service

ENDED = ("completed", "completed_with_errors")


@pytest.fixture
def service(tmp_path: Path, redis_server: RedisServer):
    with Service(tmp_path, redis_server.url) as made:
        yield made


def rows_of(service: Service, dataset_id: str) -> Path:
    return service.rig.store / "datasets" / dataset_id / "rows.arrow"


def run(service: Service, dataset: str, **fields: object) -> dict:
    job = service.api.submit(dataset, **fields)["job_id"]
    return service.api.until_state(job, *ENDED, seconds=30)


def test_equal_rows_of_earlier_jobs_are_linked_and_not_prefilled(service: Service) -> None:
    """Seen to fail with a reuse that recorded nothing of what it linked."""
    service.start()
    rows = token_rows(300, 20)
    first = run(service, service.dataset(rows), rows=200)
    assert first["rows"]["done"] == first["rows"]["total"] == 200 and first["rows"]["reused"] == 0
    again = run(service, "ds-1")
    assert (again["rows"]["done"], again["rows"]["reused"]) == (300, 200)
    counts = service.rig.stats()["rows"]
    assert len(counts) == 300 and set(counts.values()) == {1}
    ours, theirs = (service.path(j["job_id"]) / "rows_0-2000" / "data_7.safetensors" for j in (again, first))
    assert os.path.samefile(ours, theirs)
    report = verify_job(service.path(again["job_id"]), rows_of(service, "ds-1"))
    assert report.ok and report.files == 300
    # The first job is deleted: what is shared stays, and is not counted as freed.
    dry = service.api.http.delete(f"/v1/jobs/{first['job_id']}", params={"dry_run": True}).json()
    freed = service.api.http.delete(f"/v1/jobs/{first['job_id']}").json()
    assert freed == dry | {"dry_run": False, "deleted": True} and freed["files"] > 200 and freed["bytes"] < 200 * 4096
    assert verify_job(service.path(again["job_id"])).ok
    assert service.api.http.get(f"/v1/jobs/{first['job_id']}").status_code == 404
    fresh = run(service, "ds-1", reuse=False)
    assert fresh["rows"]["reused"] == 0 and set(service.rig.stats()["rows"].values()) == {2}


def test_rows_that_moved_are_found_by_their_content_and_others_are_not(service: Service) -> None:
    """Seen to fail with a source that is asked for the same row number alone."""
    service.start()
    rows = token_rows(200, 20)
    first = run(service, service.dataset(rows))
    mixed = [*token_rows(50, 20, seed=11), *reversed(rows), *token_rows(30, 20, seed=12)]
    service.dataset(mixed, "ds-2")
    for dataset in ("ds-1", "ds-2"):
        build_index(rows_of(service, dataset))
    second = run(service, "ds-2")
    assert (second["rows"]["done"], second["rows"]["reused"]) == (280, 200)
    records = JobLedger(service.path(second["job_id"])).records(0)
    assert records[50].origin == f"{first['job_id']}/199" and records[0].origin == ""
    assert verify_job(service.path(second["job_id"]), rows_of(service, "ds-2")).ok
    # A third takes from the second what that took from the first.
    service.api.http.delete(f"/v1/jobs/{first['job_id']}")
    third = run(service, "ds-1")
    assert third["rows"]["reused"] == 200
    assert JobLedger(service.path(third["job_id"])).records(0)[3].origin == f"{first['job_id']}/3"


def test_a_file_that_is_not_what_its_ledger_says_is_not_taken(service: Service) -> None:
    """Seen to fail with files that are linked without a look at them."""
    service.start()
    first = run(service, service.dataset(token_rows(40, 20)))
    folder = service.path(first["job_id"]) / "rows_0-2000"
    with open(folder / "data_3.safetensors", "ab") as f:
        f.write(b"x")
    os.unlink(folder / "data_4.safetensors")
    other = (folder / "data_6.safetensors").read_bytes()  # another row's whole file under this row's name
    (folder / "data_5.safetensors").write_bytes(other)
    second = run(service, "ds-1")
    assert (second["rows"]["done"], second["rows"]["reused"]) == (40, 37)
    assert verify_job(service.path(second["job_id"]), rows_of(service, "ds-1")).ok


def test_the_index_finds_each_row_and_survives_zeros(tmp_path: Path, service: Service) -> None:
    """Seen to fail with a key of the first token alone."""
    rows = [[0], [0, 0], [256], [0] * 300, *token_rows(500, 7), [0, 0]]
    service.dataset(rows)
    build_index(rows_of(service, "ds-1"))
    index, source = KeyIndex(rows_of(service, "ds-1")), RowsFile(rows_of(service, "ds-1"))
    found = {row.row: list(index.rows(row_key(row))) for row in source.read(0, source.rows)}
    assert found.pop(1) == found.pop(len(rows) - 1) == [1, len(rows) - 1]
    assert all(numbers == [row] for row, numbers in found.items())
    assert list(index.rows(b"\0" * 8)) == []


def test_delete_refuses_what_runs_or_is_read_and_a_crash_leaves_only_trash(service: Service) -> None:
    """Seen to fail with a delete that takes the readers' kind of lock."""
    service.start(delay_ms=30, STATETAP_WINDOW=2)
    service.dataset(token_rows(400, 20))
    running = service.api.submit("ds-1")["job_id"]
    until(lambda: service.api.job(running)["rows"]["done"], "it runs", 20)
    http = service.api.http
    assert "cancel it first" in http.delete(f"/v1/jobs/{running}").json()["detail"]
    assert running in http.delete("/v1/datasets/ds-1", params={"force": True}).json()["detail"]
    http.post(f"/v1/jobs/{running}/cancel")
    service.api.until_state(running, "cancelled", seconds=20)
    with Reading(service.path(running)):
        refused = http.delete(f"/v1/jobs/{running}")
        assert refused.status_code == 409 and "being read" in refused.json()["detail"]
    assert http.delete("/v1/datasets/ds-1").status_code == 409
    # A delete that was killed after its rename.
    shutil.copytree(service.path(running), service.path(f"{TRASH_PREFIX}job-x-00000000"))
    (service.path(running) / "rows_0-2000" / ".tmp-0123456789abcdef-data_9.safetensors").write_bytes(b"torn")
    # Without a job.json: of a submission that was killed long ago, of one that is at work now, a whole job that lost it, and what is not ours.
    ages = {"job-0123456789abcdef": 90_000, "job-1123456789abcdef": 3_600, "job-2123456789abcdef": 90_000, "notes": 90_000}
    for name, age_s in ages.items():
        service.path(name).mkdir()
        (service.path(name) / ("manifest.parquet" if "job-2" in name else "plan.parquet")).write_bytes(b"x")
        os.utime(service.path(name), (at := time.time() - age_s, at))
    assert [j["job_id"] for j in http.get("/v1/jobs").json()["items"]] == [running]
    dry = service.post("/v1/gc", 200, dry_run=True, states=["cancelled"])
    assert {i["kind"] for i in dry["items"]} == {"trash", "job"} and service.path(running).exists()
    assert {i["name"] for i in dry["items"]} == {f"{TRASH_PREFIX}job-x-00000000", "job-0123456789abcdef", running}
    files = service.post("/v1/gc", 200, dry_run=False)
    assert {(i["kind"], i["files"]) for i in files["items"] if i["kind"] == "unnamed_files"} == {("unnamed_files", 1)}
    assert not service.path("job-0123456789abcdef").exists()
    for name in ("job-1123456789abcdef", "job-2123456789abcdef", "notes"):
        shutil.rmtree(service.path(name))
    whole = service.post("/v1/gc", 200, dry_run=False, states=["cancelled"], older_than_s=3600)
    assert whole["items"] == []
    whole = service.post("/v1/gc", 200, dry_run=False, states=["cancelled"])
    assert [i["name"] for i in whole["items"]] == [running] and not list((service.rig.store / "jobs").iterdir())
    assert http.delete("/v1/datasets/ds-1").json()["deleted"] and not list((service.rig.store / "datasets").glob("ds-*"))


def test_a_job_takes_only_the_rows_and_lengths_that_it_was_asked_for(service: Service) -> None:
    """Seen to fail with record batches that are not cut at the last row asked for."""
    service.start()
    service.dataset([[5] * n for n in (10, 4000, 20, 30, 100, 50)])
    estimate = service.post("/v1/estimate", 200, dataset_id="ds-1", max_length=30)
    assert estimate["fits"] and estimate["alternatives"] == [] and (estimate["rows"], estimate["accepted"]) == (6, 3)
    done = run(service, "ds-1", max_length=30)
    assert (done["rows"]["done"], done["rows"]["skipped"], done["errors"]) == (3, 3, {"prompt_too_long": 3})
    assert done["bytes"]["committed"] == done["bytes"]["expected"] == estimate["bytes"]
    page = service.api.http.get(f"/v1/jobs/{done['job_id']}/errors").json()["items"]
    assert page[0]["message"] == "4000 tokens; the job's max_length is 30"
    part = run(service, "ds-1", rows=4, max_length=100)
    assert (part["rows"]["total"], part["rows"]["done"], part["rows"]["reused"]) == (4, 3, 3)
    wrong = service.api.http.post("/v1/jobs", json={"dataset_id": "ds-1", "max_length": 5000})
    assert wrong.status_code == 422 and wrong.json()["field"] == "max_length"
