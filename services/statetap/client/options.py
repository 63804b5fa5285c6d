"""What can be asked for, as typed keyword arguments; the API's reference describes each field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class DatasetOptions(TypedDict, total=False):
    """Of a dataset. ``max_length`` is in tokens; longer rows are rejected, or cut with ``truncate``."""

    name: str
    format: str
    tokenizer: str
    max_length: int
    truncate: bool
    trust_remote_code: bool


class JobOptions(TypedDict, total=False):
    """Of a job. ``rows``: only the first so many; ``max_length``: longer rows are skipped; ``retain`` is ``all`` or ``until_read``;
    ``boundaries``: only these of the captured ones are kept; ``encoding`` of the states: ``raw``, ``fp8`` or ``zstd``;
    ``positions`` whose states are kept: ``all``, ``loss_mask`` or ``last:N``."""

    name: str
    profile_id: str
    priority: int
    max_failed: int
    rows: int
    max_length: int
    boundaries: Sequence[int]
    encoding: str
    positions: str
    reuse: bool
    retain: str
    retain_bytes: int
    wait_for_engine: bool
    force: bool


class JobFilter(TypedDict, total=False):
    """Which jobs are listed. ``name``: a part of it; ``created_…``: Unix times."""

    state: str | Sequence[str]
    reason: str
    dataset_id: str
    profile_id: str
    name: str
    created_after: float
    created_before: float
