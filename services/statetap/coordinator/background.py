"""Long work of the reconciler (folding a ledger, writing a manifest) beside its loop, one task a job at a time.

Invariant: the threads are daemons, because everything they do on the store can be cut off at any point and done again: a stop of
the coordinator never waits for them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

THREADS = 2  # one long fold does not hold up the end of another job


class Background:
    def __init__(self, on_done: Callable[[], None]) -> None:
        """``on_done`` is called after each task."""
        self._on_done = on_done
        self._tasks: queue.SimpleQueue[tuple[str, Callable[[], None]]] = queue.SimpleQueue()
        self._busy: set[str] = set()
        for i in range(THREADS):
            threading.Thread(target=self._run, name=f"background-{i}", daemon=True).start()

    def busy(self, job_id: str) -> bool:
        return job_id in self._busy

    def start(self, job_id: str, task: Callable[[], None]) -> None:
        """Run ``task`` for a job that is not busy. Only the reconciler's thread calls this."""
        self._busy.add(job_id)
        self._tasks.put((job_id, task))

    def _run(self) -> None:
        while True:
            job_id, task = self._tasks.get()
            try:
                task()
            except Exception:
                log.exception("%s: a background task failed", job_id)
            finally:
                self._busy.discard(job_id)
                self._on_done()
