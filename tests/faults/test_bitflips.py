"""Row 10: a bit that flips on the disk is found by ``verify`` and made good by ``verify --repair``, which captures those rows alone anew."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from statetap.contracts.tensors import BLOCK
from statetap.store.complete import load_completion
from statetap.store.ledger import JobLedger
from statetap.store.verify import verify_job
from tests.faults.forms import SEED, figure, times
from tests.support.cli import statetap
from tests.support.jobs import token_rows
from tests.support.redis import RedisServer
from tests.support.service import Service

pytestmark = pytest.mark.timeout(times(120, 1_800))

ENDED = ("completed", "completed_with_errors")
PLACES = ("header", "states", "ids", "mask")


@pytest.fixture
def service(tmp_path: Path, redis_server: RedisServer):
    with Service(tmp_path, redis_server.url) as made:
        yield made


def url(service: Service) -> str:
    return str(service.api.http.base_url)


def flip(path: Path, place: str, tokens: int, draw: random.Random) -> None:
    """One bit of one byte of this part of a native file: header, states, ids (4 T), mask (T)."""
    size = path.stat().st_size
    start, stop = {
        "header": (0, BLOCK),
        "states": (BLOCK, size - 5 * tokens),
        "ids": (size - 5 * tokens, size - tokens),
        "mask": (size - tokens, size),
    }[place]
    at = draw.randrange(start, stop)
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1 << draw.randrange(8)]))


def test_verify_finds_every_flipped_bit_and_repair_redoes_only_those_rows(service: Service) -> None:
    """Seen to fail with a verify that compared header and size but not the hash (states, ids and masks were not found), with a repair that
    opened all rows of a damaged row's batch (good rows were prefilled twice), and with resume leaving the damaged file (two files a row)."""
    count, bad = times(110, 1_100), times(100, 1_000)
    draw = random.Random(SEED)
    tokens = 12
    service.start()
    job = service.api.submit(service.dataset(token_rows(count, tokens)))["job_id"]
    assert service.api.until_state(job, *ENDED, seconds=60)["state"] == "completed"
    path = service.path(job)
    assert verify_job(path).ok
    flipped = sorted(draw.sample(range(count), bad))
    before = JobLedger(path)
    records = {row: record for batch in before.batches() for row, record in before.records(batch).items()}
    for n, row in enumerate(flipped):
        flip(path / records[row].path, PLACES[n % 4], tokens, draw)

    found = statetap("verify", path, "--json")
    assert found.code == 7
    told = {p["row"] for p in found.json["problems"] if p["code"] == "file_corrupt" and p["path"] == records[p["row"]].path}
    assert sorted(told) == flipped and found.json["counts"] == {"file_corrupt": bad}
    assert sorted(row for start, stop in found.json["damaged"] for row in range(start, stop)) == flipped
    if bad == 1_000:
        figure("faults.bitflips_found_of_1000", len(told), "files", "one bit in each, over header, states, ids and mask")

    repaired = statetap("verify", path, "--repair", "--json", url=url(service))
    assert repaired.code == 0, repaired.err
    assert repaired.json["ok"] and repaired.json["complete"] and (repaired.json["files"], repaired.json["extra"]) == (count, 0)
    sent = service.rig.stats()["rows"]
    assert {int(row) for row, n in sent.items() if n == 2} == set(flipped) and set(sent.values()) == {1, 2}
    after = JobLedger(path)
    now = {row: record for batch in after.batches() for row, record in after.records(batch).items()}
    assert {row for row, record in now.items() if record.generation == 1} == set(flipped)
    # The stub's states depend on the ids alone: what was captured anew is what was there before.
    assert {row: r.xxh3 for row, r in now.items()} == {row: r.xxh3 for row, r in records.items()}
    assert {str(p.relative_to(path)) for p in path.glob("rows_*/*")} == {r.path for r in now.values()}
    job_now = service.api.job(job)
    assert (job_now["state"], job_now["rows"]["done"], job_now["bytes"]["committed"]) == (
        "completed",
        count,
        sum(r.bytes for r in now.values()),
    )
    assert statetap("verify", path, "--repair", url=url(service)).code == 0  # nothing to do, and nothing is done
    assert service.rig.stats()["requests"] == count + bad


def test_repair_makes_missing_and_cut_files_and_a_damaged_manifest_good(service: Service) -> None:
    """Seen to fail with a ``repairable`` that looked at rows alone: the manifest stayed as it was."""
    service.start()
    job = service.api.submit(service.dataset(token_rows(40, 12)))["job_id"]
    service.api.until_state(job, *ENDED, seconds=30)
    path = service.path(job)
    manifest = (path / "manifest.parquet").read_bytes()
    (path / "manifest.parquet").write_bytes(manifest[:-100] + b"x" + manifest[-99:])
    assert verify_job(path).counts == {"file_corrupt": 1} and verify_job(path).damaged == []
    whole = statetap("verify", path, "--repair", "--json", url=url(service))
    assert whole.code == 0 and whole.json["ok"], whole.err
    assert service.rig.stats()["requests"] == 40

    (path / "rows_0-2000" / "data_3.safetensors").unlink()
    os.truncate(path / "rows_0-2000" / "data_9.safetensors", 5_000)
    told = statetap("verify", path)
    assert told.code == 7 and "row 3 rows_0-2000/data_3.safetensors: file_missing" in told.out and "row 9 " in told.out
    whole = statetap("verify", path, "--repair", "--json", url=url(service))
    assert whole.code == 0 and whole.json["files"] == 40, whole.err
    assert service.rig.stats()["requests"] == 42
    completion = load_completion(path)
    assert completion is not None and (completion.done, completion.retries) == (40, 2)


def test_a_damaged_file_that_two_jobs_share_is_not_taken_over_again(service: Service) -> None:
    """Seen to fail with opened rows that were reused too (the second job linked the same damaged file once more and stayed corrupt)."""
    service.start()
    rows = token_rows(30, 12)
    first = service.api.submit(service.dataset(rows))["job_id"]
    service.api.until_state(first, *ENDED, seconds=30)
    second = service.api.submit("ds-1")["job_id"]
    assert service.api.until_state(second, *ENDED, seconds=30)["rows"]["reused"] == 30
    flip(service.path(second) / "rows_0-2000" / "data_7.safetensors", "states", 12, random.Random(SEED))
    assert [verify_job(service.path(job)).damaged for job in (first, second)] == [[(7, 8)]] * 2
    for job, requests in ((second, 31), (first, 32)):
        repaired = statetap("verify", service.path(job), "--repair", url=url(service))
        assert repaired.code == 0, repaired.out + repaired.err
        assert service.rig.stats()["requests"] == requests


def test_a_repair_says_why_it_cannot_be(service: Service) -> None:
    """Seen to fail without the look at the ranges: the refusal did not name the field."""
    service.start()
    job = service.api.submit(service.dataset(token_rows(20, 12)))["job_id"]
    service.api.until_state(job, *ENDED, seconds=30)
    for body in ({"rows": [[3, 2]]}, {"rows": [[0, 21]]}, {"rows": [[-1, 2]]}, {"rows": [[1, 2]], "codes": ["zero_states"]}):
        reply = service.api.http.post(f"/v1/jobs/{job}/retry", json=body)
        assert (reply.status_code, reply.json()["field"]) == (422, "rows")
    (service.path(job) / "rows_0-2000" / "data_3.safetensors").unlink()
    service.api.close()
    gone = statetap("verify", service.path(job), "--repair", "--json", url=url(service))
    assert gone.code == 1 and gone.error["code"] == "coordinator_unreachable" and "data_3" in gone.err
