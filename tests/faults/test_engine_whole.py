"""Row 7 by REST and command line: what an engine does wrong is told by row, code, message and exit code, no bad file is kept, and a job whose
engine is away or starts again mid-job goes on by itself."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from statetap.contracts.errors import SPECS, ErrorCode
from statetap.store.verify import verify_job
from tests.faults.forms import times
from tests.faults.test_engine_faults import LASTING
from tests.support.cli import ROOT, statetap
from tests.support.coordinator import until
from tests.support.jobs import token_rows
from tests.support.redis import RedisServer
from tests.support.service import Service

pytestmark = pytest.mark.timeout(times(120, 1_800))

ENDED = ("completed", "completed_with_errors")


@pytest.fixture
def service(tmp_path: Path, redis_server: RedisServer) -> Iterator[Service]:
    with Service(tmp_path, redis_server.url) as made:
        yield made


def test_every_fault_of_an_engine_is_told_by_its_code_and_the_rest_is_whole(service: Service) -> None:
    """Seen to fail with a client for which a reply whose body was cut is no error of the engine (the batch ended with it, and the job never
    did)."""
    kinds = [k for k in LASTING if k != "503"]  # a busy engine is waited for
    tokens = {31_000 + n: kind for n, kind in enumerate(kinds)}
    service.start(*(f"{kind}@token={token}" for token, kind in tokens.items()), STATETAP_REQUEST_TIMEOUT_S=1)
    rows = token_rows(100, 12, vocab=30_000)
    bad = {5 * n + 2: token for n, token in enumerate(tokens)}
    for row, token in bad.items():
        rows[row][5] = token
    job = service.api.submit(service.dataset(rows))["job_id"]
    ended = service.api.until_state(job, *ENDED, seconds=60)
    assert ended["state"] == "completed_with_errors"
    assert ended["errors"] == dict(Counter(LASTING[kind] for kind in kinds))
    items = service.api.http.get(f"/v1/jobs/{job}/errors", params={"limit": 100}).json()["items"]
    assert {i["row"]: i["code"] for i in items} == {row: LASTING[tokens[token]] for row, token in bad.items()}
    assert all(i["message"] and i["next_step"] == SPECS[ErrorCode(i["code"])].next_step for i in items)
    report = verify_job(service.path(job))
    assert report.ok and (report.files, report.extra) == (100 - len(bad), 0)
    url = str(service.api.http.base_url)
    watched = statetap("watch", job, "--json", url=url)
    assert watched.code == 3
    assert statetap("watch", job, "--max-failed", len(bad), url=url).code == 0
    listed = statetap("errors", job, "--code", "nonfinite_states", url=url)
    assert listed.code == 0 and len(listed.out.splitlines()) == 1 and "nonfinite_states" in listed.out


def test_an_engine_that_is_killed_and_started_again_mid_job_costs_no_row(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail with a worker that took an engine that is gone for one that is up, and charged its rows for it."""
    sent = tmp_path / "sent"
    monkeypatch.setenv("STUB_ENGINE_SENT", str(sent))
    service.start(delay_ms=15, STATETAP_WINDOW=4)
    count = 300
    job = service.api.submit(service.dataset(token_rows(count, 12)))["job_id"]
    url = str(service.api.http.base_url)
    watch = subprocess.Popen(
        [sys.executable, "-m", "statetap.cli", "watch", job, "--url", url], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    restarts = times(1, 3)
    try:
        for n in range(restarts):
            until(lambda n=n: service.api.job(job)["rows"]["done"] > count * (n + 1) / (restarts + 2), "rows are done", 60)
            port = service.rig.engine_port
            engine = next(p for p in reversed(service.rig.processes) if p.log_path.name == "engine.log")
            engine.kill()
            killed = time.monotonic()
            down = service.api.until_state(job, "paused", reason="engine_down", seconds=30)
            assert time.monotonic() - killed < 10  # within seconds
            assert "did not answer" in down["message"] or "answers" in down["message"]
            assert down["rows"]["failed"] == 0 and down["bound"] == "no_engine"
            shown = statetap("jobs", job, url=url)
            assert shown.code == 0 and "paused (engine_down)" in shown.out and watch.poll() is None
            service.rig.start_engine(port=port, delay_ms=15)
        ended = service.api.until_state(job, *ENDED, seconds=90)
        assert (ended["state"], ended["rows"]["done"]) == ("completed", count)
        out, _ = watch.communicate(timeout=30)
        assert watch.returncode == 0 and "engine_down" in out and "completed" in out
    finally:
        watch.kill()
        watch.wait()
    runs = Counter(map(int, sent.read_text().split()))
    assert len(runs) == count and runs.total() <= count + restarts * 4 * 3  # a window, three tries each at most
    report = verify_job(service.path(job))
    assert report.ok and (report.files, report.extra) == (count, 0)
