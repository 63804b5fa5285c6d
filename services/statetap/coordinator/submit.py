"""Making a job of a dataset: preflight, plan, job.json. Runs in a thread; reads lengths only, a record batch at a time.

Invariant: a job that is accepted fits on the store beside what running jobs still need (or was forced), and job.json and plan are
durable before it is acknowledged.
"""

from __future__ import annotations

import secrets
import time

from ..contracts.errors import ErrorCode, RequestError
from ..contracts.layout import ROWS
from ..contracts.profile import CaptureProfile
from ..contracts.records import Batch, DatasetState, DatasetStatus, JobSpec, Retain
from ..contracts.sample_format import SampleFormat
from ..store.jobs import create_job
from ..store.plan import batch_tokens_for, cut
from ..store.rows import RowsFile
from . import models
from .catalog import Catalog
from .sizing import Choice, Size, compressed, measure, preflight, room

RETAINED_BATCHES = 8  # that fit into retain_bytes: the workers' batches, and some that are read
MAX_REUSE_FROM = 16  # jobs: each costs a look a row


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


def new_job_id() -> str:
    return "job-" + secrets.token_hex(8)


def submit(
    catalog: Catalog,
    request: models.JobRequest,
    report: DatasetStatus,
    profile: CaptureProfile,
    reserved: int,
    min_free_bytes: int,
    job_id: str,
    samples: str = "",
) -> JobSpec:
    """Plan the job and write it durably. ``reserved``: bytes that running jobs still need; ``samples``: URL below which its files shall stand.

    Raises:
        RequestError: ``dataset_failed`` when there is nothing to prefill.
        StoreError: ``store_full`` with the numbers.
    """
    choice = Choice.of(profile, request.rows, request.max_length)
    format = SampleFormat(profile, tuple(request.boundaries or ()), request.encoding.value, request.positions)
    rows = RowsFile(catalog.dataset_path(request.dataset_id) / ROWS)
    try:
        size = measure(rows, format, choice)
        if size.accepted == 0:
            raise RequestError(
                ErrorCode.DATASET_FAILED,
                f"dataset {request.dataset_id} has no row that the job would take: {report.rejected} of {report.rows} are rejected, the "
                f"longest of its {size.rows} rows has {size.longest} tokens and up to {choice.longest} are taken",
            )
        if (
            request.retain == Retain.UNTIL_READ
            and (most := RETAINED_BATCHES * format.most(min(size.longest, choice.longest))) > request.retain_bytes
        ):
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                f"retain_bytes: {request.retain_bytes:,} hold not even {RETAINED_BATCHES} of the longest rows; give at least {most:,}",
                field="retain_bytes",
            )
        if not request.force and not samples:
            need = min(size.bytes, request.retain_bytes) if request.retain == Retain.UNTIL_READ else size.bytes
            preflight(rows, format, choice, size, need, room(catalog, reserved, min_free_bytes), compressed(catalog, format))
        batches: list[Batch] = list(cut(choice.sendable(rows), _batch_tokens(request, size, format)))
    finally:
        rows.close()
    spec = JobSpec(
        job_id=job_id,
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
        max_length=request.max_length or 0,
        boundaries=request.boundaries or [],
        encoding=request.encoding.value,
        positions=request.positions,
        reuse_from=reusable(catalog, format, bool(samples)) if request.reuse else [],
        retain=request.retain.value,
        retain_bytes=request.retain_bytes,
        samples=f"{samples.rstrip('/')}/{job_id}" if samples else "",
        created_at=time.time(),
    )
    create_job(catalog.store, spec, batches)
    return spec


def _batch_tokens(request: models.JobRequest, size: Size, format: SampleFormat) -> int:
    """Tokens a batch; of a job whose files wait to be read, so small that several fit into what may wait."""
    tokens = batch_tokens_for(size.tokens)
    if request.retain == Retain.UNTIL_READ:
        # By the bound that a batch is given out by, which may be more than its files take.
        most = format.most(size.tokens, size.accepted)
        tokens = min(tokens, max(request.retain_bytes // RETAINED_BATCHES * size.tokens // most, 1))
    return tokens


def reusable(catalog: Catalog, format: SampleFormat, in_bucket: bool) -> list[str]:
    """Jobs whose files a job of this format may take, newest first: they have at least begun, and keep what they have."""
    found: list[str] = []
    for spec in catalog.jobs():
        if len(found) == MAX_REUSE_FROM:
            break
        if spec.sample_format.format_id == format.format_id and spec.retain == Retain.ALL and bool(spec.samples) == in_bucket:
            found.append(spec.job_id)
    return found
