"""What a batch's feeder waits for, over the last seconds: the verdict of what bounds the job.

Invariant: only waiting of the feeder is counted, because only that costs throughput; a wait that goes on counts as far as it has come.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from ..contracts.records import Bound

WINDOW_S = 10.0


class Waits:
    """``begin``, ``end`` and ``replied`` are the event loop's, ``recent`` is called from the lease's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = dict.fromkeys((Bound.PREFILL, Bound.D2H, Bound.TAP, Bound.COMMIT), 0.0)
        self._kind: Bound | None = None
        self._since = 0.0
        self._share = 0.0  # of the latest replies' time that went by after the forward, until the tap file was there
        self._history: deque[tuple[float, dict[Bound, float]]] = deque([(time.monotonic(), dict(self._sums))])

    def begin(self, kind: Bound) -> None:
        """The feeder waits from now on; ``PREFILL`` stands for the engine as a whole."""
        with self._lock:
            self._settle()
            self._kind = kind

    def end(self) -> None:
        with self._lock:
            self._settle()
            self._kind = None

    def replied(self, seconds: float, held_s: float) -> None:
        """A prefill was answered after ``seconds``, of which the engine held the reply ``held_s`` for its tap file."""
        if seconds > 0:
            with self._lock:
                self._share += 0.1 * (min(held_s / seconds, 1.0) - self._share)

    def _settle(self) -> None:
        now = time.monotonic()
        if self._kind is not None:
            passed = now - self._since
            if self._kind is Bound.PREFILL:
                self._sums[Bound.PREFILL] += passed * (1 - self._share)
                self._sums[Bound.D2H] += passed * self._share
            else:
                self._sums[self._kind] += passed
        self._since = now

    def recent(self) -> dict[str, float]:
        """Seconds waited for each over about the last WINDOW_S, and ``seconds``, how long that was."""
        with self._lock:
            self._settle()
            now = time.monotonic()
            self._history.append((now, dict(self._sums)))
            while len(self._history) > 2 and self._history[1][0] <= now - WINDOW_S:
                self._history.popleft()
            began, before = self._history[0]
            return {"seconds": round(now - began, 3)} | {k.value: round(v - before[k], 3) for k, v in self._sums.items()}
