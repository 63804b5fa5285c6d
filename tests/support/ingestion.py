"""A real ``python -m statetap.datasets`` beside a coordinator of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.coordinator import Coordinator, until
from tests.support.workers import Process


@contextmanager
def ingestion(coordinator: Coordinator, redis_url: str, folder: Path, **settings: str) -> Iterator[Process]:
    """Settings are given without their prefix."""
    own = {"REDIS_URL": redis_url, "STORE": str(coordinator.store), **settings}
    process = Process("ingestion", ["-m", "statetap.datasets"], {f"STATETAP_{k}": v for k, v in own.items()}, folder)
    try:
        yield process
    finally:
        process.term()


def until_ingested(coordinator: Coordinator, dataset_id: str, seconds: float = 60) -> dict[str, Any]:
    """The dataset's answer, once it is ready or failed."""

    def ended() -> dict[str, Any] | None:
        dataset = coordinator.http.get(f"/v1/datasets/{dataset_id}").json()
        return dataset if dataset["state"] != "ingesting" else None

    return until(ended, f"{dataset_id} is ingested", seconds)
