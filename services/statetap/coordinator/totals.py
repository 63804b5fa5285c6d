"""Sums over the batches of a job, and rates over a sliding window. Pure: no Redis, no files.

Invariant: never optimistic. A batch counts what its last published totals say, never more than it has rows; rates count work that
was seen being done, so totals that were folded again from the ledger, or were there before this process, are not speed.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..contracts.records import Batch, BatchTotals

MIN_WINDOW_S = 1.0  # a rate over less is noise
_COUNTS = ("done", "failed", "skipped", "tokens", "bytes", "reused", "reused_tokens", "reused_bytes")


@dataclass(frozen=True, kw_only=True)
class Sums:
    """What became of a job's rows so far. ``tokens_left`` counts tokens of rows that can still be prefilled."""

    done: int = 0
    failed: int = 0
    skipped: int = 0
    tokens: int = 0
    bytes: int = 0
    reused: int = 0  # of the done rows: taken from earlier jobs
    reused_tokens: int = 0
    reused_bytes: int = 0
    finished: int = 0  # batches
    tokens_left: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.done + self.failed + self.skipped

    def to_final(self) -> dict[str, Any]:
        """What control.json keeps of an ended job."""
        return {k: v for k, v in vars(self).items() if k != "tokens_left"}

    @classmethod
    def from_final(cls, data: Mapping[str, Any]) -> Sums:
        return cls(**{k: v for k, v in data.items() if k in cls.__dataclass_fields__})


class PlanIndex:
    """Rows and tokens of each batch, 16 bytes a batch, so that plans of many jobs can be held."""

    def __init__(self, batches: list[Batch]) -> None:
        self.starts: npt.NDArray[np.int64] = np.array([b.start for b in batches], np.int64)
        self.stops: npt.NDArray[np.int64] = np.array([b.stop for b in batches], np.int64)
        self.tokens: npt.NDArray[np.int64] = np.array([b.tokens for b in batches], np.int64)
        self.total_tokens = int(self.tokens.sum())

    def __len__(self) -> int:
        return len(self.starts)

    def rows(self, batch: int) -> int:
        return int(self.stops[batch] - self.starts[batch])

    def batch_of(self, row: int) -> int:
        """The batch that holds a row; ``len(self)`` when the row is past the end."""
        return int(np.searchsorted(self.stops, row, side="right"))


class TotalsFold:
    """Keeps the sums of a job up to date from the Redis hash batch -> BatchTotals; only fields that changed are parsed."""

    def __init__(self, plan: PlanIndex) -> None:
        self.plan = plan
        self._raw: dict[str, str] = {}
        self._totals: dict[int, BatchTotals] = {}
        self.finished = np.zeros(len(plan), dtype=bool)
        self.sums = Sums(tokens_left=plan.total_tokens)

    def update(self, raw: Mapping[str, str]) -> Sums:
        """Take the hash as it is now. Fields of batches that the plan does not have, or that do not parse, count nothing."""
        changed = [(k, v) for k, v in raw.items() if self._raw.get(k) != v]
        gone = self._raw.keys() - raw.keys()
        if not changed and not gone:
            return self.sums
        for key in gone:
            self._totals.pop(int(key), None)
        for key, value in changed:
            totals = self._parse(key, value)
            if totals is not None:
                self._totals[totals.batch] = totals
        self._raw = dict(raw)
        self.sums = self._add()
        return self.sums

    def _parse(self, key: str, value: str) -> BatchTotals | None:
        try:
            totals = BatchTotals.from_dict(json.loads(value))
            numbers = [getattr(totals, name) for name in _COUNTS] + [*totals.errors.values()]
            if (
                min(numbers) < 0
                or totals.reused > totals.done
                or not key.isdigit()
                or totals.batch != int(key)
                or totals.batch >= len(self.plan)
            ):
                return None
            return totals if totals.rows <= self.plan.rows(totals.batch) else None
        except (ValueError, TypeError, AttributeError):
            return None

    def _add(self) -> Sums:
        count = dict.fromkeys(_COUNTS, 0)
        errors: dict[str, int] = {}
        left = self.plan.total_tokens
        self.finished[:] = False
        for batch, t in self._totals.items():
            for name in count:
                count[name] += getattr(t, name)
            for code, n in t.errors.items():
                errors[code] = errors.get(code, 0) + n
            whole = t.rows == self.plan.rows(batch)
            self.finished[batch] = whole
            # Of an unfinished batch the failed rows' tokens stay in: the published totals do not know them.
            left -= int(self.plan.tokens[batch]) if whole else min(t.tokens, int(self.plan.tokens[batch]))
        return Sums(errors=errors, finished=int(self.finished.sum()), tokens_left=left, **count)

    def rows_of(self, batch: int) -> int:
        """Rows of a batch that have a terminal state."""
        totals = self._totals.get(batch)
        return totals.rows if totals else 0

    def bytes_of(self, batch: int) -> int:
        """Bytes of a batch's committed files."""
        totals = self._totals.get(batch)
        return totals.bytes if totals else 0

    def next_batch(self, outstanding: set[int]) -> int | None:
        """The lowest unfinished batch that is not given out, or None."""
        for batch in np.flatnonzero(~self.finished):
            if int(batch) not in outstanding:
                return int(batch)
        return None


@dataclass(frozen=True, kw_only=True)
class Rates:
    rows_per_s: float = 0.0
    tokens_per_s: float = 0.0
    bytes_per_s: float = 0.0

    def eta_s(self, tokens_left: int) -> float | None:
        """Seconds until the tokens left are prefilled; None when nothing moves."""
        return tokens_left / self.tokens_per_s if self.tokens_per_s > 0 else None


class RateWindow:
    """Samples (time, rows prefilled, their tokens and bytes) of the last ``window_s`` seconds, one a tick.

    Rows that were reused are no speed. The window begins with the first look that finds new rows: what went by before it was a start
    (an engine that warms up, a batch that is opened), and part of an interval.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, int, int, int]] = deque()
        self._idle: tuple[int, int, int] | None = None  # what there was before the first row came

    def reset(self) -> None:
        """Forget the samples: the totals jumped without work (folded again from the ledger), or the job stands still."""
        self._samples.clear()
        self._idle = None

    def add(self, now: float, sums: Sums) -> None:
        """``now`` is monotonic seconds."""
        worked = sums.done - sums.reused, sums.tokens - sums.reused_tokens, sums.bytes - sums.reused_bytes
        if self._idle is not None:
            if worked == self._idle:
                return
            self._idle = None
        elif not self._samples:
            self._idle = worked
            return
        self._samples.append((now, *worked))
        # The newest sample that is older than the window stays: it is where the window begins.
        while len(self._samples) > 2 and self._samples[1][0] <= now - self._window_s:
            self._samples.popleft()

    def rates(self) -> Rates:
        if len(self._samples) < 2:
            return Rates()
        first, last = self._samples[0], self._samples[-1]
        seconds = last[0] - first[0]
        if seconds < MIN_WINDOW_S:
            return Rates()
        rows, tokens, size = (max(last[i] - first[i], 0) / seconds for i in (1, 2, 3))
        return Rates(rows_per_s=rows, tokens_per_s=tokens, bytes_per_s=size)
