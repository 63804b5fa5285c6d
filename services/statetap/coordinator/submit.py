"""Making a job of a dataset: preflight, plan, job.json. Runs in a thread; reads lengths only, a record batch at a time.

Invariant: a job that is accepted fits on the store beside what running jobs still need (or was forced), and job.json and plan are
durable before it is acknowledged.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..contracts.errors import ErrorCode, RequestError, StoreError
from ..contracts.layout import ROWS
from ..contracts.profile import CaptureProfile
from ..contracts.records import Batch, DatasetState, DatasetStatus, JobSpec
from ..contracts.tensors import sample_bytes
from ..store.fs import free_bytes
from ..store.jobs import create_job
from ..store.plan import batch_tokens_for, cut
from ..store.rows import RowsFile
from . import models
from .catalog import Catalog
from .reconciler import least_free


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a job would prefill and write. ``longest`` is the longest row of the dataset, skipped or not."""

    rows: int
    accepted: int
    tokens: int
    bytes: int
    longest: int


def ready_report(catalog: Catalog, dataset_id: str) -> DatasetStatus:
    """The report of a dataset that a job can be made of.

    Raises:
        RequestError: ``not_found``, ``dataset_not_ready``, ``dataset_failed``.
    """
    catalog.dataset(dataset_id)
    report = catalog.report(dataset_id)
    if report is None:
        raise RequestError(ErrorCode.DATASET_NOT_READY, f"dataset {dataset_id} is still being ingested")
    if report.state != DatasetState.READY:
        why = (report.error or {}).get("message", "no reason was recorded")
        raise RequestError(ErrorCode.DATASET_FAILED, f"dataset {dataset_id} failed: {why}")
    return report


def sendable(rows: RowsFile, max_length: int) -> Iterator[npt.NDArray[np.int64]]:
    """Token counts by record batch, 0 for rows that are not sent: bad ones, and ones longer than the engine takes."""
    for counts in rows.lengths():
        yield np.where(counts <= max_length, counts, 0)


def measure(rows: RowsFile, profile: CaptureProfile) -> Size:
    """Exact tokens and bytes of a job over these rows."""
    accepted = tokens = longest = 0
    for counts in rows.lengths():
        fits = counts[(counts > 0) & (counts <= profile.max_length)]
        accepted += fits.size
        tokens += int(fits.sum())
        longest = max(longest, int(counts.max(initial=0)))
    # sample_bytes is linear in the tokens, so the sum over rows needs no loop over them.
    base = sample_bytes(profile, 0)
    size = accepted * base + tokens * (sample_bytes(profile, 1) - base)
    return Size(rows=rows.rows, accepted=accepted, tokens=tokens, bytes=size, longest=longest)


def submit(
    catalog: Catalog,
    request: models.JobRequest,
    report: DatasetStatus,
    profile: CaptureProfile,
    reserved: Callable[[], int],
    min_free_bytes: int,
) -> JobSpec:
    """Plan the job and write it durably. ``reserved()``: bytes that running jobs still need.

    Raises:
        RequestError: ``dataset_failed`` when there is nothing to prefill.
        StoreError: ``store_full`` with the numbers.
    """
    rows = RowsFile(catalog.dataset_path(request.dataset_id) / ROWS)
    try:
        size = measure(rows, profile)
        if size.accepted == 0:
            raise RequestError(
                ErrorCode.DATASET_FAILED,
                f"dataset {request.dataset_id} has no row that the engine would take: {report.rejected} of {size.rows} are rejected, the "
                f"longest has {size.longest} tokens and the engine takes {profile.max_length}",
            )
        if not request.force:
            _preflight(catalog, size, reserved(), min_free_bytes)
        batches: list[Batch] = list(cut(sendable(rows, profile.max_length), batch_tokens_for(size.tokens)))
    finally:
        rows.close()
    spec = JobSpec(
        job_id="job-" + secrets.token_hex(8),
        dataset_id=request.dataset_id,
        content_hash=report.content_hash,
        profile=profile.to_dict(),
        rows=size.rows,
        tokens=size.tokens,
        bytes=size.bytes,
        batches=len(batches),
        name=request.name or catalog.dataset(request.dataset_id).name,
        priority=request.priority,
        max_failed=request.max_failed,
        created_at=time.time(),
    )
    create_job(catalog.store, spec, batches)
    return spec


def _preflight(catalog: Catalog, size: Size, reserved: int, min_free_bytes: int) -> None:
    free = free_bytes(catalog.store)
    kept = least_free(catalog.store, min_free_bytes)
    available = free - reserved - kept
    if size.bytes > available:
        raise StoreError(
            ErrorCode.STORE_FULL,
            f"the job needs {size.bytes:,} bytes; the store has {free:,} free, of which running jobs still need {reserved:,} and "
            f"{kept:,} stay free: {size.bytes - available:,} are missing. `force` accepts it all the same.",
            numbers={"needed": size.bytes, "free": free, "reserved": reserved, "kept_free": kept, "missing": size.bytes - available},
        )
