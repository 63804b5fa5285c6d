"""The whole OpenAPI: complete by itself, and true of a real coordinator (schemathesis)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

from statetap.contracts.records import DatasetSpec, DatasetStatus
from statetap.coordinator.app import create_app
from statetap.coordinator.examples import JSON, PROBLEM
from statetap.coordinator.settings import CoordinatorSettings
from statetap.store.fs import to_json
from tests.support.coordinator import Coordinator, FakeWorker, make_dataset, register_engine
from tests.support.figures import print_figure

EXAMPLES = int(os.environ.get("STATETAP_SCHEMA_EXAMPLES", "12"))  # cases an operation in the fuzzing phase
STREAMS = ("watch_job", "watch_jobs")  # they do not end: test_api_events.py
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance,"
    "allow_header_conformance,use_after_free"
)
COMMAND = "python -m pytest -q tests/integration/test_api_schema.py"


def document() -> dict[str, Any]:
    return create_app(CoordinatorSettings()).openapi()


def operations(spec: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"{verb} {path}", op) for path, ops in spec["paths"].items() for verb, op in ops.items()]


def contents(operation: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(where, media type, content) of the body and of every answer."""
    found = [("body", media, c) for media, c in operation.get("requestBody", {}).get("content", {}).items()]
    return found + [
        (status, media, c) for status, answer in operation["responses"].items() for media, c in answer.get("content", {}).items()
    ]


def test_every_operation_is_described_and_declares_its_errors() -> None:
    spec = document()
    ids = [op["operationId"] for _, op in operations(spec)]
    assert len(ids) == len(set(ids))
    for where, op in operations(spec):
        assert re.fullmatch("[a-z_]+", op["operationId"]), where
        assert op["summary"] and op.get("description") and op["tags"], where
        for parameter in op.get("parameters", []):
            assert parameter["in"] == "path" or parameter.get("description") or parameter["name"] == "limit", (where, parameter["name"])
        for status, answer in op["responses"].items():
            if status >= "4":
                assert PROBLEM in answer["content"], (where, status)
        assert {"500", "503"} <= op["responses"].keys(), where
        if "{" in where and "upload" not in where:
            assert "404" in op["responses"], where
        success = {s for s in op["responses"] if s < "3"}
        assert success, where
    assert "HTTPValidationError" not in json.dumps(spec), "problems are the only errors"
    assert set(spec["components"]["securitySchemes"]) == {"key", "session"}


def test_every_body_and_answer_has_an_example_that_is_valid() -> None:
    spec = document()
    seen = 0
    for where, op in operations(spec):
        for part, media, content in contents(op):
            if media not in (JSON, PROBLEM):
                continue
            assert "example" in content or "examples" in content, (where, part)
            shown = [content["example"]] if "example" in content else [e["value"] for e in content["examples"].values()]
            for value in shown:
                jsonschema.validate(value, content["schema"] | {"components": spec["components"]})
                seen += 1
    assert seen > 100


def test_the_page_needs_nothing_from_elsewhere_and_names_every_operation(coordinator: Coordinator) -> None:
    page = coordinator.http.get("/docs").text
    assert not re.search(r"(src|href)=.?(https?:)?//|<script|@import|url\(", page)
    for _, op in operations(document()):
        assert f'id="{op["operationId"]}"' in page
    assert coordinator.http.get("/redoc").status_code == 404


def test_what_is_not_there_is_a_problem_too(coordinator: Coordinator) -> None:
    missing = coordinator.http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["code"], missing.headers["content-type"]) == (404, "not_found", PROBLEM)
    for path, methods in (("/v1/jobs", "GET, POST"), ("/v1/jobs/job-1", "DELETE, GET"), ("/v1/uploads/x", "DELETE, GET, HEAD, PATCH")):
        wrong = coordinator.http.put(path)
        assert (wrong.status_code, wrong.headers["allow"], wrong.json()["status"]) == (405, methods, 405)
    garbage = coordinator.http.post("/v1/jobs", content=b"\xff\xfe", headers={"content-type": JSON})
    assert (garbage.status_code, garbage.json()["code"]) == (422, "invalid_request")


def in_many_states(coordinator: Coordinator, worker: FakeWorker) -> dict[str, list[str]]:
    """Datasets, jobs and uploads of every kind; their ids."""
    store, http = coordinator.store, coordinator.http
    register_engine(worker.redis)
    ready = make_dataset(store, [10 + i % 50 for i in range(300)], bad=[7])
    big = make_dataset(store, [90] * 4000, "ds-0000000000000002")
    others = []
    for i, state in enumerate(("failed", "ingesting")):
        others.append(f"ds-{i + 10:016x}")
        folder = store / "datasets" / others[-1]
        folder.mkdir()
        spec = DatasetSpec(dataset_id=others[-1], name=state, path="/nowhere", created_at=time.time())
        (folder / "dataset.json").write_bytes(to_json(spec.to_dict()))
        if state == "failed":
            status = DatasetStatus(dataset_id=others[-1], state=state, error={"code": "bad_row", "message": "no good row"})
            (folder / "report.json").write_bytes(to_json(status.to_dict()))

    def submit(dataset: str, **fields: Any) -> str:
        return str(coordinator.submit(dataset, reuse=False, **fields)["job_id"])

    done = [submit(ready, name="errors"), submit(ready, name="whole")]
    worker.drain(lambda: coordinator.job(done[0])["state"].startswith("completed"), fail=[3, 5])
    worker.drain(lambda: coordinator.job(done[1])["state"].startswith("completed"))
    running = submit(big, name="running")
    task = worker.wait()
    assert worker.lease(task, ttl_ms=600_000)
    worker.run(task, rows=50)
    coordinator.until_state(running, "running")
    paused, cancelled, queued = (submit(big, name=n) for n in ("paused", "cancelled", "queued"))
    http.post(f"/v1/jobs/{paused}/pause")
    http.post(f"/v1/jobs/{cancelled}/cancel")
    coordinator.until_state(cancelled, "cancelled")
    victims = [submit(ready, name=f"victim {i}") for i in range(4)]
    for job_id in victims:
        http.post(f"/v1/jobs/{job_id}/cancel")
        coordinator.until_state(job_id, "cancelled")
    uploads = [http.post("/v1/uploads", json={"filename": "a.jsonl", "size": 100}).json()["upload_id"] for _ in range(3)]
    piece = {"Upload-Offset": "0", "content-type": "application/offset+octet-stream"}
    assert http.patch(f"/v1/uploads/{uploads[0]}", content=b"\n" * 100, headers=piece).status_code == 204
    return {
        "jobs": [*done, running, paused, cancelled, queued],
        "datasets": [ready, big, *others],
        "uploads": uploads,
        "victims": victims,
    }


def config(ids: dict[str, list[str]]) -> str:
    """schemathesis.toml: ids of what is there in most cases, random ones in the others."""
    lines = ["[cache]", "enabled = false", "[checks.not_a_server_error]", 'expected-statuses = ["2xx", "4xx", "507"]']
    for name, values in ids.items():
        lines += [f"[dictionaries.{name}]", f"values = {json.dumps(values)}"]
    lines.append("[parameters]")
    bound = {"path.job_id": "jobs", "path.dataset_id": "datasets", "path.upload_id": "uploads"}
    bound |= {"query.dataset_id": "datasets", "body.dataset_id": "datasets", "body.upload_id": "uploads"}
    lines += [f'"{key}" = {{ dictionary = "{name}", probability = 0.7 }}' for key, name in bound.items()]
    # Deleted are jobs that are there for it, so that the others last to the end.
    lines += ["[[operations]]", 'include-operation-id = "delete_job"', "[operations.parameters]"]
    lines.append('"path.job_id" = { dictionary = "victims", probability = 0.7 }')
    return "\n".join(lines) + "\n"


def answered(report: Path) -> Counter[tuple[str, str]]:
    """(operation, status) -> answers, from schemathesis's own record of the run."""
    found: Counter[tuple[str, str]] = Counter()
    for line in report.read_text().splitlines():
        recorder = (json.loads(line).get("ScenarioFinished") or {}).get("recorder") or {}
        for interaction in recorder.get("interactions", {}).values():
            status = (interaction.get("response") or {}).get("status_code", "none")
            found[recorder["label"], str(status)] += 1
    return found


def test_schemathesis_finds_nothing_that_is_not_documented(coordinator: Coordinator, worker: FakeWorker, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(config(in_many_states(coordinator, worker)))
    report = tmp_path / "report.ndjson"
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(tmp_path / "schemathesis.toml"), "run"]
    command += [f"{coordinator.http.base_url}/openapi.json", "--checks", CHECKS, "--max-examples", str(EXAMPLES)]
    command += ["--generation-deterministic", "--no-shrink", "--workers", "1"]
    command += ["--phases", "examples,coverage,fuzzing", "--suppress-health-check", "all", "--continue-on-failure", "--no-color"]
    command += ["--request-timeout", "20", "--warnings", "off", "--report-ndjson-path", str(report), "--output-truncate", "true"]
    for name in STREAMS:
        command += ["--exclude-operation-id", name]
    root = Path(__file__).parents[2]
    env = os.environ | {"SCHEMATHESIS_HOOKS": "tests.support.schemathesis_hooks", "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-3000:]
    answers = answered(report)
    documented = {w.replace(w.split()[0], w.split()[0].upper(), 1): set(op["responses"]) for w, op in operations(document())}
    undocumented = sum(n for (where, status), n in answers.items() if status >= "5" and status not in documented.get(where, set()))
    if os.environ.get("STATETAP_FIGURES"):
        note = f"{answers.total()} requests to {len(documented)} operations, jobs and datasets in every state"
        print_figure("service.undocumented_5xx", undocumented, "answers", f"STATETAP_FIGURES=1 {COMMAND} -s", note)
    assert done.returncode == 0, done.stdout[-8000:]
    assert undocumented == 0
    succeeded = {where for where, status in answers if status < "3"}
    assert len(succeeded) > 0.8 * (len(documented) - len(STREAMS)), (
        f"hardly anything was really done: {sorted(documented.keys() - succeeded)}"
    )
    assert "Traceback" not in coordinator.log.read_text()
