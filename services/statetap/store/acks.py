"""Rows of a job that readers have acknowledged, and whose files are freed (``retain: until_read``).

Invariant: a row is in acks.json, durably, before its file goes; so a done row without a file is either there or lost. What a crash leaves
of acknowledged files, ``gc`` takes. The file holds merged ranges: readers that go in order need one.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..contracts.errors import ErrorCode, StoreError
from ..contracts.layout import ACKS
from .fs import read_json, replace_file, to_json


@dataclass(frozen=True, kw_only=True)
class Acks:
    """``ranges``: half-open, sorted, apart from each other. ``rows``, ``bytes``: files that were freed."""

    ranges: tuple[tuple[int, int], ...] = ()
    rows: int = 0
    bytes: int = 0

    def __contains__(self, row: int) -> bool:
        at = bisect.bisect_right(self.ranges, (row, 1 << 62)) - 1
        return at >= 0 and row < self.ranges[at][1]


NONE = Acks()


def merge(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sorted, and those that touch joined; empty ones dropped."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)


def load_acks(job_dir: Path) -> Acks:
    """Raises StoreError."""
    data = read_json(job_dir / ACKS)
    if data is None:
        return NONE
    try:
        ranges = merge((int(start), int(stop)) for start, stop in data["ranges"])
        return Acks(ranges=ranges, rows=int(data["rows"]), bytes=int(data["bytes"]))
    except (KeyError, TypeError, ValueError) as e:
        raise StoreError(ErrorCode.STORE_IO, f"{job_dir / ACKS} is not a list of acknowledged rows: {e!r}") from e


def save_acks(job_dir: Path, acks: Acks) -> None:
    """Durably; the caller holds the job's lock. Raises StoreError."""
    replace_file(job_dir / ACKS, to_json({"ranges": [list(r) for r in acks.ranges], "rows": acks.rows, "bytes": acks.bytes}))
