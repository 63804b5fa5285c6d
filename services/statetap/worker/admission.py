"""Which rows are sent at all, and how many at a time: the row's own limits, the window and the bytes of the tap.

Invariant: the bytes of all files that a worker may have in the tap never exceed its share; waiting for them is neither an error nor
an attempt.
"""

from __future__ import annotations

import asyncio

from ..contracts.errors import ErrorCode
from ..contracts.profile import CaptureProfile
from ..contracts.records import Bound, RowRecord, RowState
from ..contracts.tensors import tap_bytes
from ..store.rows import Row


def refuse(row: Row, generation: int, profile: CaptureProfile, longest: int, tap_share: int) -> RowRecord | None:
    """The ``skipped`` record of a row that is never sent, or None. ``longest``: tokens of the longest row that the job sends."""
    num_tokens = len(row.input_ids)
    if row.error_code:
        code, message = row.error_code, row.error_message
    elif num_tokens == 0:
        code, message = ErrorCode.EMPTY_PROMPT.value, "the row has no token"
    elif num_tokens > longest:
        limit = f"the engine takes {longest}" if longest == profile.max_length else f"the job's max_length is {longest}"
        code, message = ErrorCode.PROMPT_TOO_LONG.value, f"{num_tokens} tokens; {limit}"
    elif tap_bytes(profile, num_tokens) > tap_share:
        need = tap_bytes(profile, num_tokens)
        code, message = ErrorCode.ROW_EXCEEDS_TAP.value, f"needs {need} bytes of the tap; the worker's share is {tap_share}"
    elif int(row.input_ids.min()) < 0 or int(row.input_ids.max()) >= profile.vocab_size:
        wrong = (row.input_ids < 0) | (row.input_ids >= profile.vocab_size)
        at = int(wrong.argmax())
        code = ErrorCode.BAD_TOKEN_ID.value
        message = f"position {at} is token {row.input_ids[at]}; the model has {profile.vocab_size}"
    else:
        return None
    return RowRecord(row=row.row, state=RowState.SKIPPED.value, generation=generation, code=code, message=message)


class Admission:
    """Counts what may be under way: prefills in flight, rows without an outcome, bytes of the tap. One waiter, one event loop."""

    def __init__(self, *, window: int, rows: int, tap_share: int) -> None:
        self._window = window
        self._rows = rows
        self._tap = tap_share
        self._changed = asyncio.Event()
        self.short_of = Bound.PREFILL
        """What the last refusal was for: a place in the window (PREFILL), a row that is committed (COMMIT), bytes of the tap (TAP)."""

    def admit(self, nbytes: int) -> bool:
        """Take a place in the window, a row and ``nbytes`` of the tap, if all are free."""
        if self._window < 1 or self._rows < 1 or nbytes > self._tap:
            self.short_of = Bound.PREFILL if self._window < 1 else Bound.COMMIT if self._rows < 1 else Bound.TAP
            return False
        self._window -= 1
        self._rows -= 1
        self._tap -= nbytes
        return True

    def answered(self) -> None:
        """A prefill has its reply: its place in the window is free."""
        self._window += 1
        self._changed.set()

    def again(self) -> None:
        """A row that is under way is sent once more; it does not queue behind rows that are not."""
        self._window -= 1

    def ended(self, nbytes: int) -> None:
        """A row has its outcome (or stays open) and its tap file is gone."""
        self._rows += 1
        self._tap += nbytes
        self._changed.set()

    def wake(self) -> None:
        """Make the waiter look again: something else has changed."""
        self._changed.set()

    async def changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()
