"""Row 1 of reliability.md: SIGKILL of a random worker, horse or coordinator until the job is complete. It is as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.faults.forms import FULL, SEED, figure, times
from tests.support.redis import RedisServer
from tests.support.storm import Audit, Storm, audit, completed, p99, samples, storm_service, wait_tap_empty
from tests.support.workers import eventually

WORKERS = times(3, 4)
ROWS = times(1_500, 10_000)
KILLS = times(15, 300)
RECOVERY_S = 15.0  # the promise: a lost batch is run again within it


def rows_of(count: int) -> list[list[int]]:
    """Rows of 100 to 300 tokens, so that a small job too has as many batches as a job can have."""
    random = np.random.default_rng(SEED)
    return [random.integers(1, 32_000, n).tolist() for n in random.integers(100, 300, count)]


@pytest.mark.timeout(1200 if FULL else 400)
def test_a_storm_of_kills_leaves_what_a_quiet_run_leaves(tmp_path: Path, redis_server: RedisServer) -> None:
    """Against a loss that charges every row in flight, the storm had two rows quarantined after 25 losses (the run itself was cut off by the
    limit of its time, on a loaded machine)."""
    rows = rows_of(ROWS)
    (tmp_path / "storm").mkdir()
    with storm_service(tmp_path / "storm", redis_server.url, workers=WORKERS, window=2) as service:
        service.dataset(rows)
        service.start(workers=WORKERS, delay_ms=times(120, 300))
        job = service.api.submit("ds-1")["job_id"]
        with Storm(service, redis_server, job, SEED, (0.5, 2.0)) as storm:
            storm.run(completed(service, job), 900)
        kills = storm.kills.total()
        every, recovery = storm.recovery_s(), storm.recovery_s(alone=True)
        note = f"{ROWS:,} rows, {kills} kills ({', '.join(f'{n} {k}' for k, n in sorted(storm.kills.items()))}), {len(every)} batches lost"
        note += f", {len(recovery)} of them while the coordinator lived until they were run again"
        print(
            f"\n{note}; recovery: median {recovery[len(recovery) // 2]:.1f} s, p99 {p99(recovery):.1f} s, worst {recovery[-1]:.1f} s; of all: p99 {p99(every):.1f} s, worst {every[-1]:.1f} s"
        )
        seen = audit(service, job, ROWS, storm.read)
        figure("faults.kills", kills, "kills", note)
        figure("faults.rows_lost", seen.lost, "rows", note)
        figure("faults.duplicates", seen.doubled, "rows and files", note)
        figure("faults.bad_checksums", seen.bad, "files", note)
        figure("faults.quarantined_innocent", seen.quarantined, "rows", note)
        figure(
            "faults.recovery_p99_s",
            round(p99(recovery), 1),
            "s",
            f"{note}; worst {recovery[-1]:.1f} s, till another attempt has the lease; of all {p99(every):.1f} s, worst {every[-1]:.1f} s",
        )
        assert seen == Audit(lost=0, doubled=0, bad=0, quarantined=0, temps=0)
        wait_tap_empty(service)
        assert service.api.wait_ready().job(job)["rows"]["done"] == ROWS
        _equal_to_a_quiet_run(tmp_path / "quiet", rows, samples(service.path(job)))
        assert kills >= KILLS
        assert p99(recovery) <= RECOVERY_S


@pytest.mark.parametrize("kind", ["worker", "horse"] if FULL else ["worker"])
def test_a_lost_batch_runs_again_in_time_though_every_worker_is_at_a_long_one(tmp_path: Path, redis_server: RedisServer, kind: str) -> None:
    """Seen to fail without arranging's room for lost batches, which was made for this test: the batch waited for a whole other one."""
    with storm_service(tmp_path, redis_server.url, workers=2, window=4) as service:
        service.dataset(rows_of(10_000))
        service.start(workers=2, delay_ms=300)  # a batch is 625 rows: 47 s
        job = service.api.submit("ds-1")["job_id"]
        with Storm(service, redis_server, job, SEED, (0.5, 2.0)) as storm:
            eventually("both are at work", lambda: service.rig.stats()["requests"] > 30 and len(list(service.rig.tap.glob("*/"))) == 2)
            storm.kill(kind, "worker-0")
            (loss,) = storm.losses
            eventually("its batch is run again", lambda: loss.back, RECOVERY_S)
            service.post(f"/v1/jobs/{job}/cancel")


def _equal_to_a_quiet_run(folder: Path, rows: list[list[int]], stormy: dict[str, Path]) -> None:
    folder.mkdir()
    server = RedisServer(folder / "redis")
    server.start()
    try:
        with storm_service(folder, server.url, workers=2, window=32) as service:
            service.dataset(rows)
            service.start(workers=2)
            job = service.api.submit("ds-1")["job_id"]
            service.api.until_state(job, "completed", seconds=300)
            quiet = samples(service.path(job))
            assert stormy.keys() == quiet.keys() and len(quiet) == len(rows)
            assert [n for n in quiet if quiet[n].read_bytes() != stormy[n].read_bytes()] == []
    finally:
        server.kill()
