"""What is known of a batch's rows: their records and the absolute totals, kept up to date in constant time a row.

Invariant: the totals are those that folding the ledger would give.
"""

from __future__ import annotations

from collections import Counter

from ..contracts.records import BatchTotals, RowRecord, RowState


class Tally:
    """Starts empty; what the ledger says is added first. Not thread-safe."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._records: dict[int, RowRecord] = {}
        self._states: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._tokens = 0
        self._bytes = 0
        self._reused = 0
        self._reused_tokens = 0
        self._reused_bytes = 0

    def add(self, record: RowRecord) -> None:
        """A record that is on disk now. One that does not win changes nothing."""
        held = self._records.get(record.row)
        if held is not None:
            if record.rank <= held.rank:
                return
            self._count(held, -1)
        self._records[record.row] = record
        self._count(record, 1)

    def _count(self, record: RowRecord, by: int) -> None:
        self._states[record.state] += by
        self._bytes += by * record.bytes
        if record.state == RowState.DONE.value:
            self._tokens += by * record.tokens
        if record.origin:
            self._reused += by
            self._reused_tokens += by * record.tokens
            self._reused_bytes += by * record.bytes
        if record.code:
            self._errors[record.code] += by

    def totals(self) -> BatchTotals:
        return BatchTotals(
            batch=self._batch,
            done=self._states[RowState.DONE.value],
            failed=self._states[RowState.FAILED.value],
            skipped=self._states[RowState.SKIPPED.value],
            tokens=self._tokens,
            bytes=self._bytes,
            reused=self._reused,
            reused_tokens=self._reused_tokens,
            reused_bytes=self._reused_bytes,
            errors={code: n for code, n in self._errors.items() if n},
        )
