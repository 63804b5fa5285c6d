"""/metrics of a real coordinator: what it says is what happened, names are the documented ones, and it works without Redis."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from statetap.coordinator.metrics import METRICS
from tests.support.coordinator import PROFILE, Coordinator, FakeWorker, make_dataset, register_engine, until
from tests.support.redis import RedisServer

LENGTHS = [10 + i % 50 for i in range(300)]


def scrape(coordinator: Coordinator) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> label values, in the order of the labels' names -> value."""
    reply = coordinator.http.get("/metrics")
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/plain")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def one(samples: dict[str, dict[Any, float]], name: str) -> float:
    (value,) = samples[name].values()
    return value


def test_names_types_and_labels_are_the_documented_ones(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    dataset = make_dataset(coordinator.store, LENGTHS, bad=[7])
    job = coordinator.submit(dataset)["job_id"]
    worker.drain(lambda: coordinator.job(job)["state"].startswith("completed"), fail=[3])
    big = coordinator.submit(make_dataset(coordinator.store, [90] * 4000, "ds-0000000000000002"))["job_id"]
    task = worker.wait()
    assert worker.lease(task, ttl_ms=600_000)
    until(lambda: worker.run(task, rows=1) or coordinator.job(big)["eta_s"], "an ETA is told")
    documented = {m.name.removesuffix("_total"): m for m in METRICS}
    seen = set()
    for family in text_string_to_metric_families(coordinator.http.get("/metrics").text):
        if family.name.endswith("_created"):
            continue
        described = documented[family.name]
        seen.add(family.name)
        assert (family.type, family.documentation) == (described.type, described.help), family.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(described.labels), sample
    assert documented.keys() - seen == set(), "documented, and not exported"


def test_counters_count_what_happened_and_jobs_are_labels_only_while_they_work(coordinator: Coordinator, worker: FakeWorker) -> None:
    register_engine(worker.redis)
    dataset = make_dataset(coordinator.store, LENGTHS, bad=[7])
    first = coordinator.submit(dataset)["job_id"]
    before = scrape(coordinator)
    assert before["statetap_job_rows"][first, "open"] == 300
    store = coordinator.http.get("/v1/store").json()
    assert one(before, "statetap_store_reserved_bytes") == coordinator.job(first)["bytes"]["expected"] == store["reserved"]
    assert one(before, "statetap_store_kept_free_bytes") == store["kept_free"] > 0 and store["free"] > 0 and store["samples"] is None
    assert before["statetap_jobs"]["queued",] == 1
    until(lambda: scrape(coordinator)["statetap_queue_batches"].get((PROFILE.profile_id,)), "its batches are queued")
    worker.drain(lambda: coordinator.job(first)["state"].startswith("completed"), fail=[3, 5])
    end = coordinator.job(first)
    for _ in range(2):  # a second look counts nothing twice
        after = scrape(coordinator)
        assert {s: after["statetap_rows_total"][s,] for s in ("done", "failed", "skipped")} == {"done": 297, "failed": 2, "skipped": 1}
        assert after["statetap_row_errors_total"] == {("bad_row",): 1, ("nonfinite_states",): 2}
        assert one(after, "statetap_tokens_total") == end["tokens"]["done"]
        assert one(after, "statetap_committed_bytes_total") == end["bytes"]["committed"]
        assert "statetap_job_rows" not in after
        assert after["statetap_jobs"]["completed_with_errors",] == 1
        assert one(after, "statetap_store_reserved_bytes") == 0 == coordinator.http.get("/v1/store").json()["reserved"]
    # One that begins and ends between two scrapes counts too.
    second = coordinator.submit(dataset, reuse=False)["job_id"]
    worker.drain(lambda: coordinator.job(second)["state"].startswith("completed"))
    assert scrape(coordinator)["statetap_rows_total"]["done",] == 297 + 299
    assert scrape(coordinator)["statetap_engines"] == {(PROFILE.profile_id,): 1}
    assert scrape(coordinator)["statetap_workers"] == {(PROFILE.profile_id,): 1}
    coordinator.signal(signal.SIGKILL)
    coordinator.wait()
    coordinator.start()
    again = scrape(coordinator)
    assert again["statetap_rows_total"]["done",] == 0, "what was done before the start is not this process's"
    assert again["statetap_jobs"]["completed_with_errors",] == 2


def test_requests_are_counted_under_their_templates(coordinator: Coordinator) -> None:
    for path in ("/v1/jobs/job-1", "/v1/jobs/job-2", "/no/such", "/v1/nothing/else"):
        assert coordinator.http.get(path).status_code == 404
    assert coordinator.http.post("/v1/jobs", json={}).status_code == 422
    assert coordinator.http.request("BREW", "/v1/jobs").status_code == 405
    samples = scrape(coordinator)
    requests = samples["statetap_http_requests_total"]
    assert requests["GET", "/v1/jobs/{job_id}", "404"] == 2
    assert requests["GET", "none", "404"] == 2
    assert requests["POST", "/v1/jobs", "422"] == 1
    assert not [labels for labels in requests if "job-1" in str(labels) or "BREW" in labels]
    assert samples["statetap_http_request_seconds_count"]["GET", "/v1/jobs/{job_id}"] == 2


def test_it_works_while_redis_is_away(coordinator: Coordinator, worker: FakeWorker, redis_server: RedisServer) -> None:
    register_engine(worker.redis)
    job = coordinator.submit(make_dataset(coordinator.store, LENGTHS))["job_id"]
    until(lambda: one(scrape(coordinator), "statetap_reconciler_tick_seconds_count") > 0, "the reconciler looked")
    up = scrape(coordinator)
    assert one(up, "statetap_redis_up") == 1
    assert one(up, "statetap_reconciler_last_tick_age_seconds") >= 0
    redis_server.kill()
    until(lambda: one(scrape(coordinator), "statetap_reconciler_last_tick_age_seconds") > 1, "no look ends well")
    away = scrape(coordinator)
    assert one(away, "statetap_redis_up") == 0
    assert away["statetap_job_rows"][job, "open"] == 300
    assert "statetap_engines" not in away
    redis_server.start()
    until(lambda: one(scrape(coordinator), "statetap_redis_up") == 1, "Redis is back")
    until(lambda: one(scrape(coordinator), "statetap_reconciler_last_tick_age_seconds") < 1, "it looks again", 20)


@pytest.mark.parametrize("limit", [50])
def test_labels_do_not_grow_with_jobs_that_ended(coordinator: Coordinator, worker: FakeWorker, limit: int) -> None:
    register_engine(worker.redis)
    dataset = make_dataset(coordinator.store, [5])
    coordinator.submit(dataset)
    base = sum(map(len, scrape(coordinator).values()))
    made = [coordinator.submit(dataset, reuse=False)["job_id"] for _ in range(limit)]
    grown = sum(map(len, scrape(coordinator).values()))
    assert grown > base + 5 * limit
    for job_id in made:
        coordinator.http.post(f"/v1/jobs/{job_id}/cancel")
    until(lambda: scrape(coordinator)["statetap_jobs"]["cancelled",] == limit, "all are cancelled", 30)
    # One label set more for each new route that was called, and no more.
    assert sum(map(len, scrape(coordinator).values())) < base + 60
