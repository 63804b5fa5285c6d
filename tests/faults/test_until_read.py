"""retain=until_read: a store that holds a bounded part of a job, and every row is read once all the same."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from statetap.contracts.errors import StatetapError
from statetap.store.acks import Acks, load_acks, merge
from statetap.store.delete import clean_job
from statetap.store.reader import JobDataset
from statetap.store.stream import JobStream
from statetap.store.verify import verify_job
from tests.support.coordinator import until
from tests.support.jobs import token_rows
from tests.support.redis import RedisServer
from tests.support.service import Service

ROW_BYTES = 4096 + 50 * (4 * 64 * 2 + 5)  # a row of 50 tokens of the stub's profile


@pytest.fixture
def service(tmp_path: Path, redis_server: RedisServer):
    with Service(tmp_path, redis_server.url) as made:
        yield made


def on_disk(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("data_*.safetensors"))


def acker(service: Service, job: str):
    def ack(rows: list[tuple[int, int]]) -> None:
        service.post(f"/v1/jobs/{job}/acks", 200, rows=rows)

    return ack


def test_a_job_larger_than_its_part_of_the_store_is_read_whole(service: Service) -> None:
    """Seen to fail with a feed that took no notice of the room."""
    service.start(tokens_per_s=30_000)
    rows = token_rows(1500, 50)
    most = 500 * ROW_BYTES
    job = service.api.submit(service.dataset(rows), retain="until_read", retain_bytes=most)["job_id"]
    full = service.api.until_state(job, "paused", reason="store_full", seconds=30)
    assert "wait to be read" in full["message"]
    until(lambda: service.api.job(job)["batches"]["outstanding"] == 0, "the workers have drained")
    path = service.path(job)
    assert ROW_BYTES * 100 < on_disk(path) <= most
    high, stop = [0], threading.Event()

    def look() -> None:
        while not stop.wait(0.02):
            high[0] = max(high[0], on_disk_or_less(path))

    watcher = threading.Thread(target=look)
    watcher.start()
    seen = {}
    try:
        for item in JobStream(path, ack=acker(service, job), poll_s=0.05):
            number = int(item["row"])
            assert number not in seen
            seen[number] = item["input_ids"].tolist()
    finally:
        stop.set()
        watcher.join()
    assert [seen[i] for i in range(1500)] == rows
    ended = service.api.until_state(job, "completed", seconds=20)
    assert ended["rows"]["done"] == 1500 and ended["bytes"]["freed"] == ended["bytes"]["committed"] == 1500 * ROW_BYTES
    assert high[0] <= most and on_disk(path) == 0
    assert load_acks(path) == Acks(ranges=((0, 1500),), rows=1500, bytes=1500 * ROW_BYTES)
    report = verify_job(path)
    assert report.ok and report.freed == 1500 and report.files == 0
    assert set(service.rig.stats()["rows"].values()) == {1}
    assert len(JobDataset(path)) == 0


def on_disk_or_less(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            if name.startswith("data_"):
                try:
                    total += os.stat(os.path.join(folder, name)).st_size
                except FileNotFoundError:
                    continue
    return total


def test_a_reader_that_dies_reads_again_what_it_had_not_acknowledged(service: Service) -> None:
    """Seen to fail with a stream that acknowledges what it gave out when it is closed."""
    service.start()
    job = service.api.submit(service.dataset(token_rows(300, 50)), retain="until_read", retain_bytes=1 << 30)["job_id"]
    service.api.until_state(job, "completed", seconds=30)
    first = iter(JobStream(service.path(job), ack=acker(service, job), ack_every=50))
    got = [int(next(first)["row"]) for _ in range(120)]
    first.close()  # 100 are acknowledged
    assert load_acks(service.path(job)).ranges == ((0, 100),)
    rest = [int(item["row"]) for item in JobStream(service.path(job), ack=acker(service, job))]
    assert got == list(range(120)) and rest == list(range(100, 300))


def test_what_cannot_have_been_read_is_not_freed(service: Service) -> None:
    """Seen to fail with acknowledgements that counted failed rows as read."""
    service.start("nan@token=31000:3", delay_ms=20, STATETAP_WINDOW=2)
    rows = token_rows(400, 50, vocab=30_000)
    rows[5][0] = 31_000
    job = service.api.submit(service.dataset(rows), retain="until_read", retain_bytes=1 << 30)["job_id"]
    until(lambda: service.api.job(job)["rows"]["done"] > 20, "some rows are done", 30)
    http, path = service.api.http, service.path(job)
    early = http.post(f"/v1/jobs/{job}/acks", json={"rows": [[0, 400]]})
    assert early.status_code == 409 and "still open" in early.json()["detail"] and not load_acks(path).rows
    service.api.until_state(job, "completed_with_errors", seconds=60)
    for wrong in ([[-1, 3]], [[3, 2]], [[0, 401]], []):
        assert http.post(f"/v1/jobs/{job}/acks", json={"rows": wrong}).status_code == 422
    assert service.post(f"/v1/jobs/{job}/acks", 200, rows=[[0, 10]]) == {"rows": 9, "bytes_freed": 9 * ROW_BYTES}
    assert service.post(f"/v1/jobs/{job}/acks", 200, rows=[[0, 10]]) == {"rows": 0, "bytes_freed": 0}
    # The failed row is captured by a retry, and it has not been read.
    service.post(f"/v1/jobs/{job}/retry")
    service.api.until_state(job, "completed", seconds=30)
    assert (path / "rows_0-2000" / "data_5.g1.safetensors").exists()
    assert sorted(int(i["row"]) for i in JobStream(path)) == [5, *range(10, 400)]
    # A crash between the acknowledgement and the file's end.
    (path / "rows_0-2000" / "data_3.safetensors").write_bytes(b"left behind")
    assert clean_job(path).files == 1
    keeps = service.api.submit("ds-1")["job_id"]
    assert http.post(f"/v1/jobs/{keeps}/acks", json={"rows": [[0, 1]]}).status_code == 409
    assert http.post("/v1/jobs", json={"dataset_id": "ds-1", "retain": "until_read"}).status_code == 422
    service.api.until_state(keeps, "completed", seconds=60)
    assert service.api.job(keeps)["rows"]["reused"] == 0  # files that go are not taken over


def test_ranges_merge_and_tell_what_they_hold() -> None:
    """Seen to fail with ranges that touch and were not joined."""
    assert merge([(5, 7), (0, 2), (2, 3), (6, 9), (4, 4)]) == ((0, 3), (5, 9))
    acks = Acks(ranges=((0, 3), (5, 9)))
    assert [row in acks for row in range(10)] == [True] * 3 + [False] * 2 + [True] * 4 + [False]
    with pytest.raises(StatetapError):
        JobStream("/nowhere")
