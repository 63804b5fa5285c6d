"""The service without a model: a real coordinator, real redis-server, real workers, and the stub engine in SGLang's place."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from statetap.contracts.layout import DATASET_SPEC, DATASETS, REPORT, ROWS
from statetap.contracts.records import DatasetSpec, DatasetStatus
from statetap.store.fs import to_json
from statetap.store.rows import RowsFile
from statetap.store.verify import verify_job
from tests.support.coordinator import Coordinator, until
from tests.support.jobs import Mask, every_second, write_rows
from tests.support.workers import Rig

ENDED = ("completed", "completed_with_errors")


def add_dataset(
    store: Path,
    rows: Sequence[Sequence[int]] | Iterator[Sequence[int]],
    dataset_id: str,
    errors: dict[int, str] | None = None,
    mask: Mask = every_second,
) -> str:
    """A ready dataset of token rows, as ingestion would leave it."""
    folder = store / DATASETS / dataset_id
    write_rows(folder / ROWS, rows, errors, mask)
    source = RowsFile(folder / ROWS)
    lengths: list[npt.NDArray[np.int64]] = list(source.lengths())
    digest = xxhash.xxh3_128((folder / ROWS).read_bytes()).hexdigest()
    report = DatasetStatus(
        dataset_id=dataset_id,
        state="ready",
        rows=source.rows,
        accepted=source.rows - len(errors or {}),
        rejected=len(errors or {}),
        tokens=sum(int(n.sum()) for n in lengths),
        content_hash=digest,
    )
    source.close()
    spec = DatasetSpec(dataset_id=dataset_id, name=dataset_id, path="/nowhere", format="tokenized", created_at=time.time())
    (folder / REPORT).write_bytes(to_json(report.to_dict()))
    (folder / DATASET_SPEC).write_bytes(to_json(spec.to_dict()))
    return dataset_id


class Service:
    """Coordinator and workers over one store. Use as a context manager; engine and workers are started by name."""

    def __init__(self, folder: Path, redis_url: str, *, settings: dict[str, str] | None = None, **env: object) -> None:
        self.rig = Rig(folder / "rig", redis_url, drain_s=10, engine_down_after_s=1.5, **env)
        (folder / "coordinator").mkdir()
        (folder / "data").mkdir()
        self.api = Coordinator(
            folder / "coordinator", redis_url, STORE=str(self.rig.store), **({"DATA_DIR": str(folder / "data")} | (settings or {}))
        )

    def __enter__(self) -> Service:
        self.api.start()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.rig.__exit__(*exc)
        finally:
            self.api.close()

    def start(
        self, *faults: str, workers: int = 1, delay_ms: float = 0.0, tokens_per_s: float = 0.0, held_ms: float = 0.0, **env: object
    ) -> None:
        """An engine and its workers, and wait until it is registered."""
        self.rig.start_engine(*faults, delay_ms=delay_ms, tokens_per_s=tokens_per_s, held_ms=held_ms)
        for i in range(workers):
            self.rig.start_worker(f"worker-{i}", STATETAP_WORKERS_PER_ENGINE=workers, **env)
        until(lambda: len(self.worker_ids()) == workers, "the workers have registered", 30)

    def worker_ids(self) -> list[str]:
        return [w for e in self.api.http.get("/v1/engines").json()["items"] for w in e["worker_ids"]]

    def dataset(self, rows: Sequence[Sequence[int]], dataset_id: str = "ds-1", mask: Mask = every_second) -> str:
        return add_dataset(self.rig.store, rows, dataset_id, mask=mask)

    def post(self, path: str, status: int = 202, **body: Any) -> dict[str, Any]:
        reply = self.api.http.post(path, json=body)
        assert reply.status_code == status, reply.text
        return reply.json()

    def path(self, job_id: str) -> Path:
        return self.rig.store / "jobs" / job_id


def run(service: Service, **fields: object) -> dict[str, Any]:
    """Submit a job on the dataset ds-1 and wait for its end; what the API says of it then."""
    return service.api.until_state(service.api.submit("ds-1", **fields)["job_id"], *ENDED, seconds=40)


def verified(service: Service, job: dict[str, Any]) -> dict[str, int]:
    """Problems by their code, of a job on the dataset ds-1 and its rows."""
    return verify_job(service.path(job["job_id"]), service.rig.store / DATASETS / "ds-1" / ROWS).counts
