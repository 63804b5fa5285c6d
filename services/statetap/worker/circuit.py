"""The circuit breaker of a job: when row after row fails with one cause, the rest is not sent.

Invariant: a row that passed its checks closes it; skipped rows say nothing about the engine and neither open nor close it. What a batch ends with is
where the next batch of the job begins, so short batches do not hide a streak.
"""

from __future__ import annotations

from ..contracts.errors import SPECS, ErrorCode


class Circuit:
    """Counts rows that failed in a row with one code. Not thread-safe."""

    def __init__(self, limit: int, code: str = "", rows: int = 0) -> None:
        """``limit``: rows at which it opens; 0: never. ``code``, ``rows``: where the batch before ended."""
        self._limit = limit
        self.code = code
        self.rows = rows
        self._last = ""
        self._tripped = False

    def good(self) -> None:
        """A row passed its checks. One that was in flight when this batch opened the circuit does not close it: the job stops."""
        if not self._tripped:
            self.code, self.rows = "", 0

    def failed(self, code: ErrorCode, message: str) -> bool:
        """Count a row that is given up; True when the circuit is open."""
        if self._tripped and code.value != self.code:
            return True
        self.rows = self.rows + 1 if code.value == self.code else 1
        self.code, self._last = code.value, message
        self._tripped = self.is_open
        return self.is_open

    @property
    def is_open(self) -> bool:
        return 0 < self._limit <= self.rows

    def stops(self, code: ErrorCode, message: str) -> bool:
        """Whether a row that fails with this code now stays open instead: its cause has opened the circuit."""
        if not self.is_open or code.value != self.code:
            return False
        self._last = message
        return True

    @property
    def message(self) -> str:
        next_step = SPECS[ErrorCode(self.code)].next_step if self.code in ErrorCode.__members__.values() else ""
        return (
            f"{self.rows} rows in a row failed with {self.code}; the last one: {self._last}. {next_step} "
            "Then `resume` the job, or `retry` it to run the failed rows too."
        )
