"""Row 13 of reliability.md: many rows through coordinator, workers and stub engine. Nothing grows with the rows that went by."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.faults.forms import FULL, figure, times
from tests.support.jobs import token_rows
from tests.support.redis import RedisServer
from tests.support.service import Service
from tests.support.storm import completed, storm_service, wait_tap_empty
from tests.support.workers import eventually

ROWS = times(5_000, 100_000)
TOKENS = times(60, 8)  # so that the short form has many batches too, and the full one fits on a disk
WARM = 0.1  # of the rows: till then caches fill
SLOPE_MIB = 1.0  # a process, for 10,000 rows
REDIS_MIB = 200


@dataclass
class Watched:
    """One process that lives as long as the job. ``rss``: [MiB] at ``rows`` rows done."""

    process: psutil.Process
    rows: list[int] = field(default_factory=list)
    rss: list[float] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def look(self, rows: int) -> None:
        self.rows.append(rows)
        self.rss.append(self.process.memory_info().rss / 2**20)
        self.fds.append(self.process.num_fds())

    def slope(self) -> float:
        """MiB for 10,000 rows, by least squares."""
        return float(np.polyfit(self.rows, self.rss, 1)[0] * 10_000)


@pytest.mark.timeout(1500 if FULL else 120)
def test_nothing_grows_with_the_rows_that_went_by(tmp_path: Path, redis_server: RedisServer) -> None:
    """Seen to fail with a parent that leaves a file open for each horse. The slope is asked of the full form only."""
    with storm_service(tmp_path, redis_server.url, workers=2, window=32) as service:
        service.dataset(token_rows(ROWS, TOKENS))
        service.start(workers=2)
        watched = {
            "coordinator": Watched(psutil.Process(service.api.pid)),
            **{p.name: Watched(psutil.Process(p.pid)) for p in service.rig.processes if p.name.startswith("worker")},
        }
        job = service.api.submit("ds-1")["job_id"]
        redis_mib = soak(service, job, watched)
        wait_tap_empty(service)
        for name, w in watched.items():
            print(f"\n{name}: {w.rss[0]:.0f} to {w.rss[-1]:.0f} MiB, {w.slope():+.3f} MiB for 10,000 rows; {w.fds[0]} to {w.fds[-1]} fds")
        worst = max(w.slope() for w in watched.values())
        figure("soak.redis_mib", round(redis_mib, 1), "MiB", f"peak of used_memory over {ROWS:,} rows")
        figure("soak.rss_slope_mib_per_10k", round(worst, 3), "MiB", f"the worst of coordinator and two workers over {ROWS:,} rows")
        assert redis_mib < REDIS_MIB
        assert [n for n, w in watched.items() if w.fds[-1] > w.fds[0] + 2] == []
        if FULL:  # over the seconds of the short form it is noise
            assert worst < SLOPE_MIB
        shutil.rmtree(service.path(job))  # a gigabyte of files that nobody looks at


def soak(service: Service, job: str, watched: dict[str, Watched]) -> float:
    """Run the job and look at it, evenly over its rows; the peak of Redis' used_memory [MiB]."""
    over = completed(service, job)
    done = lambda: service.api.job(job)["rows"]["done"]  # noqa: E731
    following = int(ROWS * WARM)
    while following < ROWS:
        rows = eventually(f"{following:,} rows are done", lambda n=following: (d := done()) >= n and d, 60)
        for w in watched.values():
            w.look(rows)
        following = max(following, rows) + ROWS // 100
    eventually("the job is complete", over, 60)
    for w in watched.values():
        w.look(ROWS)
    return int(service.rig.redis.info("memory")["used_memory_peak"]) / 2**20
