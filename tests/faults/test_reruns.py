"""Row 9: what is finished is never prefilled again, and a stack that was killed whole repeats no more than what was in flight."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from statetap.store.verify import verify_job
from tests.faults.forms import FULL, figure, times
from tests.support.cli import statetap
from tests.support.coordinator import until
from tests.support.jobs import token_rows
from tests.support.redis import RedisServer
from tests.support.service import Service

pytestmark = pytest.mark.timeout(times(120, 1_800))

ENDED = ("completed", "completed_with_errors")


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The row of every request that any engine of the test got."""
    path = tmp_path / "sent"
    path.touch()
    monkeypatch.setenv("STUB_ENGINE_SENT", str(path))
    return path


@pytest.fixture
def service(tmp_path: Path, redis_server: RedisServer) -> Iterator[Service]:
    with Service(tmp_path, redis_server.url) as made:
        yield made


def test_a_finished_job_prefills_nothing_whatever_is_asked_of_it(service: Service, redis_server: RedisServer, sent: Path) -> None:
    """Seen to fail with a worker that took nothing over from earlier jobs."""
    service.start()
    job = service.api.submit(service.dataset(token_rows(300, 12)))["job_id"]
    service.api.until_state(job, "completed", seconds=40)
    assert sorted(map(int, sent.read_text().split())) == list(range(300))
    for verb in ("resume", "pause", "retry"):
        assert service.api.http.post(f"/v1/jobs/{job}/{verb}").status_code in (200, 202, 409)
        assert service.api.job(job)["state"] == "completed"
    again = service.api.submit("ds-1")["job_id"]
    assert service.api.until_state(again, "completed", seconds=40)["rows"]["reused"] == 300
    # Everything is started anew, over an empty Redis.
    service.api.close()
    service.rig.redis.flushall()
    service.rig.processes[-1].kill()
    service.api.start()
    service.rig.start_worker("anew")
    until(lambda: len(service.worker_ids()) == 1, "the new worker has registered", 30)
    more = service.api.submit(service.dataset(token_rows(20, 12, seed=8), "ds-2"))["job_id"]
    service.api.until_state(more, "completed", seconds=30)  # a whole way: all looks at the old jobs have been
    assert [service.api.job(j)["state"] for j in (job, again)] == ["completed"] * 2
    assert len(sent.read_text().split()) == 320
    assert statetap("watch", job, url=str(service.api.http.base_url)).code == 0


def test_a_stack_killed_whole_repeats_no_more_than_what_was_in_flight(service: Service, redis_server: RedisServer, sent: Path) -> None:
    """Seen to fail with a resume that took no notice of the ledger (every row of a batch ran again)."""
    count = times(400, 2_000)
    service.start(workers=2, delay_ms=15, STATETAP_WINDOW=8)
    job = service.api.submit(service.dataset(token_rows(count, 12)))["job_id"]
    in_flight = 0
    for share in (0.1, 0.5, 0.9) if FULL else (0.5,):
        until(lambda share=share: service.api.job(job)["rows"]["done"] >= share * count, f"{share:.0%} are done", 120)
        port = service.rig.engine_port
        for process in reversed(service.rig.processes):  # the engine last, so that what is in flight is known
            process.kill()
        service.api.close()
        in_flight += sum(len(service.rig.redis.smembers(name)) for name in service.rig.redis.scan_iter(f"statetap:inflight:{job}:*"))
        redis_server.kill()
        assert not (service.path(job) / "COMPLETE").exists()
        redis_server.start()
        service.api.start()
        service.rig.start_engine(port=port, delay_ms=15)
        for n in range(2):
            service.rig.start_worker(f"again-{n}", STATETAP_WINDOW=8, STATETAP_WORKERS_PER_ENGINE=2)
    ended = service.api.until_state(job, *ENDED, seconds=150)
    assert (ended["state"], ended["rows"]["done"]) == ("completed", count)
    times_sent = Counter(map(int, sent.read_text().split()))
    repeated = times_sent.total() - count
    assert len(times_sent) == count and repeated <= in_flight
    report = verify_job(service.path(job))
    assert report.ok and (report.files, report.extra) == (count, 0)
    if FULL:
        figure(
            "faults.repeated_of_in_flight",
            repeated,
            "prefills",
            f"{count} rows, everything killed at 10, 50 and 90 %; {in_flight} were in flight",
        )


def test_a_job_is_complete_only_with_every_file_there_and_whole(service: Service, sent: Path) -> None:
    """Seen to fail with a finish that believed the ledger (COMPLETE was written over a missing and a cut file)."""
    service.start(delay_ms=15, STATETAP_WINDOW=4)
    job = service.api.submit(service.dataset(token_rows(200, 300)))["job_id"]
    # Of a batch that is finished: nobody but the job's end looks at it again.
    until(lambda: service.api.job(job)["batches"]["finished"] >= 1, "a batch is finished", 30)
    folder = service.path(job) / "rows_0-2000"
    (folder / "data_3.safetensors").unlink()
    os.truncate(folder / "data_9.safetensors", 5_000)
    assert service.api.job(job)["rows"]["open"]
    # Without an engine the job cannot be made whole: it says so, and is not complete.
    port = service.rig.engine_port
    service.rig.processes[0].kill()
    down = service.api.until_state(job, "paused", reason="engine_down", seconds=40)
    assert down["message"] and not (service.path(job) / "COMPLETE").exists()
    service.rig.start_engine(port=port)
    ended = service.api.until_state(job, *ENDED, seconds=60)
    assert (ended["state"], ended["rows"]["done"]) == ("completed", 200)
    report = verify_job(service.path(job))
    assert report.ok and report.complete and (report.files, report.extra) == (200, 0)
    assert {"data_3.g1.safetensors", "data_9.g1.safetensors"} <= set(os.listdir(folder))
    assert Counter(map(int, sent.read_text().split()))[3] == 2
