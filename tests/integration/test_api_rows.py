"""Rows by state, and the lists of jobs and datasets: filters, pages, and what a page costs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from statetap.contracts.records import DatasetSpec, DatasetStatus, JobControl, RowRecord
from statetap.coordinator import rows_page
from statetap.coordinator.catalog import Catalog
from statetap.store.fs import to_json
from statetap.store.jobs import load_job
from statetap.store.ledger import LedgerWriter
from statetap.store.plan import read_plan
from tests.support.coordinator import PROFILE, Coordinator, FakeWorker, make_dataset, register_engine
from tests.support.jobs import make_job

LENGTHS = [10 + i % 50 for i in range(300)]


def pages(coordinator: Coordinator, path: str, **params: Any) -> list[dict[str, Any]]:
    """All items, page by page."""
    items: list[dict[str, Any]] = []
    cursor = None
    for _ in range(1000):
        reply = coordinator.http.get(path, params=params | ({"cursor": cursor} if cursor else {}))
        assert reply.status_code == 200, reply.text
        items += reply.json()["items"]
        assert len(reply.json()["items"]) <= params.get("limit", 1000)
        cursor = reply.json()["next_cursor"]
        if cursor is None:
            return items
    raise AssertionError("the pages do not end")


def test_rows_by_state_are_those_of_the_ledger(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    dataset = make_dataset(coordinator.store, LENGTHS, bad=[7])
    job = coordinator.submit(dataset)["job_id"]
    path = f"/v1/jobs/{job}/rows"
    everything = pages(coordinator, path, limit=70)
    assert [(r["row"], r["state"]) for r in everything] == [(i, "open") for i in range(300)], "nothing has an outcome yet"
    task = worker.wait()
    assert worker.lease(task, ttl_ms=600_000)
    worker.run(task, rows=40, fail=[3, 30])
    start = read_plan(coordinator.store / "jobs" / job)[task["batch"]].start
    assert start == 0
    states = {"failed": [3, 30], "skipped": [7], "open": list(range(40, 300))}
    states["done"] = [i for i in range(40) if i not in (3, 7, 30)]
    for state, rows in states.items():
        for limit in (1, 7, 1000):
            found = pages(coordinator, path, state=state, limit=limit) if limit > 1 or len(rows) < 50 else rows
            assert [r if isinstance(r, int) else r["row"] for r in found] == rows, (state, limit)
    assert [r["row"] for r in pages(coordinator, path, limit=33)] == list(range(300))
    done = pages(coordinator, path, state="done")[5]
    file = coordinator.store / "jobs" / job / done["path"]
    assert (done["row"], done["tokens"], done["bytes"]) == (6, LENGTHS[6], file.stat().st_size)
    assert done["xxh3"] == "0" * 16 and abs(done["at"] - time.time()) < 600
    failed = pages(coordinator, path, state="failed")[0]
    assert (failed["code"], failed["message"], failed["path"], failed["generation"]) == ("nonfinite_states", "a NaN", "", 0)
    for wrong in ({"cursor": "x"}, {"cursor": "300"}, {"cursor": "9" * 30}, {"state": "none"}, {"limit": 0}, {"limit": 1001}):
        assert coordinator.http.get(path, params=wrong).status_code == 422, wrong
    assert coordinator.http.get("/v1/jobs/job-none/rows").status_code == 404


def test_a_page_of_a_big_job_parses_a_bounded_part_of_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[1, 2, 3]] * 3000
    path, _, batches = make_job(tmp_path, PROFILE, rows, batch_tokens=15)  # 600 batches of 5 rows
    assert len(batches) == 600
    for b in batches:
        writer = LedgerWriter(path, b.batch, "a")
        writer.append(
            [
                RowRecord(row=r, state="failed" if r == 2999 else "done", code="zero_states" if r == 2999 else "")
                for r in range(b.start, b.stop)
            ]
        )
        writer.close()
    catalog = Catalog(tmp_path)
    spec = load_job(path)
    parsed: list[int] = []
    real = rows_page.JobLedger.records
    monkeypatch.setattr(rows_page.JobLedger, "records", lambda self, batch: parsed.append(batch) or real(self, batch))

    def walk(state: rows_page.State) -> tuple[list[int], int]:
        """(rows found, pages)"""
        found: list[int] = []
        after, n = -1, 0
        while True:
            parsed.clear()
            page = rows_page.row_page(catalog, spec, after=after, limit=100, state=state)
            assert len(parsed) <= rows_page.PARSE_BATCHES
            found += [r.row for r in page.items]
            n += 1
            if page.next_cursor is None:
                return found, n
            assert int(page.next_cursor) > after, "each page goes on"
            after = int(page.next_cursor)

    assert walk("open") == ([], -(-600 // rows_page.PARSE_BATCHES))
    assert walk("failed") == ([2999], -(-600 // rows_page.SCAN_BATCHES)), "segments without an error are passed over"
    assert walk("done") == (list(range(2999)), 30)


def test_jobs_are_filtered(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    first, second = make_dataset(coordinator.store, LENGTHS), make_dataset(coordinator.store, [90] * 4000, "ds-0000000000000002")
    a = coordinator.submit(first, name="Alpha one")
    worker.drain(lambda: coordinator.job(a["job_id"])["state"] == "completed")
    b = coordinator.submit(second, name="beta")
    c = coordinator.submit(second, name="ALPHA two")
    for job in (b, c):
        coordinator.http.post(f"/v1/jobs/{job['job_id']}/pause")

    def listed(**params: Any) -> list[str]:
        names = {a["job_id"]: "a", b["job_id"]: "b", c["job_id"]: "c"}
        return [names[j["job_id"]] for j in pages(coordinator, "/v1/jobs", limit=1, **params)]

    assert listed() == ["c", "b", "a"]
    assert listed(name="alpha") == ["c", "a"]
    assert listed(state="paused") == ["c", "b"]
    assert listed(state=["completed", "paused"]) == ["c", "b", "a"]
    assert listed(state="cancelled") == []
    assert listed(reason="user") == ["c", "b"]
    assert listed(reason="no_engine") == []
    assert listed(dataset_id=first) == ["a"]
    assert listed(profile_id=PROFILE.profile_id, name="beta") == ["b"]
    assert listed(profile_id="f" * 16) == []
    assert listed(created_after=a["created_at"]) == ["c", "b"]
    assert listed(created_after=a["created_at"], created_before=c["created_at"]) == ["b"]
    for wrong in ({"state": "none"}, {"created_after": "soon"}, {"cursor": "x"}, {"cursor": "nan~x"}, {"cursor": "~"}):
        assert coordinator.http.get("/v1/jobs", params=wrong).status_code == 422, wrong


def test_a_cursor_stays_valid_when_its_job_is_gone(coordinator: Coordinator, redis_client: redis.Redis) -> None:
    register_engine(redis_client)
    dataset = make_dataset(coordinator.store, LENGTHS)
    made = [coordinator.submit(dataset)["job_id"] for _ in range(6)][::-1]
    page = coordinator.http.get("/v1/jobs", params={"limit": 2}).json()
    gone = made[1]  # the last of this page
    coordinator.http.post(f"/v1/jobs/{gone}/cancel")
    coordinator.until_state(gone, "cancelled")
    assert coordinator.http.delete(f"/v1/jobs/{gone}").status_code == 200
    rest = coordinator.http.get("/v1/jobs", params={"cursor": page["next_cursor"]}).json()
    assert [j["job_id"] for j in rest["items"]] == made[2:]


def test_datasets_are_filtered(coordinator: Coordinator) -> None:
    for i, (name, state) in enumerate([("chat", "ready"), ("Chat 2", "failed"), ("code", "ingesting")]):
        dataset_id = f"ds-{i:016x}"
        folder = coordinator.store / "datasets" / dataset_id
        folder.mkdir(parents=True)
        spec = DatasetSpec(dataset_id=dataset_id, name=name, path="/nowhere", created_at=100.0 + i)
        (folder / "dataset.json").write_bytes(to_json(spec.to_dict()))
        if state != "ingesting":
            (folder / "report.json").write_bytes(to_json(DatasetStatus(dataset_id=dataset_id, state=state).to_dict()))

    def listed(**params: Any) -> list[str]:
        return [d["name"] for d in pages(coordinator, "/v1/datasets", limit=1, **params)]

    assert listed() == ["code", "Chat 2", "chat"]
    assert listed(name="chat") == ["Chat 2", "chat"]
    assert listed(state="ingesting") == ["code"]
    assert listed(state=["ready", "failed"]) == ["Chat 2", "chat"]
    assert coordinator.http.get("/v1/datasets", params={"state": "x"}).status_code == 422


def many_jobs(store: Path, count: int) -> None:
    """Jobs that ended, as they stand on a store after some years."""
    dataset = make_dataset(store, LENGTHS)
    template, _, _ = make_job(store, PROFILE, [[1, 2, 3]] * 10, job_id="job-template", dataset_id="ds-template")
    spec = load_job(template).to_dict()
    final = {"done": 10, "failed": 0, "skipped": 0, "tokens": 30, "bytes": 1000, "finished": 1, "errors": {}}
    for i in range(count):
        folder = store / "jobs" / f"job-{i:016x}"
        folder.mkdir()
        made = spec | {"job_id": folder.name, "dataset_id": dataset, "created_at": 1e9 + i, "name": f"n{i}"}
        control = JobControl(state="completed", ended_at=1e9 + i, final=final)
        (folder / "plan.parquet").write_bytes((template / "plan.parquet").read_bytes())
        (folder / "control.json").write_bytes(to_json(control.to_dict()))
        (folder / "job.json").write_bytes(to_json(made))


def reads(pid: int) -> int:
    """Bytes that a process has read from files."""
    return int(next(line for line in Path(f"/proc/{pid}/io").read_text().splitlines() if line.startswith("rchar")).split()[1])


def test_with_a_thousand_jobs_a_page_reads_no_files_again(coordinator: Coordinator, redis_client: redis.Redis) -> None:
    register_engine(redis_client)
    many_jobs(coordinator.store, 1000)
    first = coordinator.http.get("/v1/jobs").json()
    assert len(first["items"]) == 50 and first["next_cursor"]
    size = (coordinator.store / "jobs" / first["items"][0]["job_id"] / "job.json").stat().st_size
    before, started = reads(coordinator.pid), time.monotonic()
    for _ in range(10):
        coordinator.http.get("/v1/jobs", params={"state": "completed", "limit": 50})
    took = (time.monotonic() - started) / 10
    print(json.dumps({"list_page_ms": round(took * 1000, 1)}))
    assert reads(coordinator.pid) - before < 1000 * size, "ten pages read less than all job.json once"
