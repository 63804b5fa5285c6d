"""A job that is read while it runs: rows as they are committed, each once, acknowledged when the trainer has gone on.

Invariant: a row is acknowledged only after its item was consumed, so what a crash of the reader loses is read again. Memory is that of
the batches that are out, whatever the number of rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch.utils.data import IterableDataset

from ..contracts.errors import ErrorCode, StoreError
from ..contracts.records import JobState, RowState
from .acks import load_acks, merge
from .complete import load_completion
from .delete import Reading
from .jobs import load_control
from .ledger import JobLedger
from .plan import read_plan
from .reader import SampleLoader

Ranges = list[tuple[int, int]]


class JobStream(IterableDataset[dict[str, torch.Tensor]]):
    """Items as :class:`~statetap.store.reader.JobDataset` has them, in the order in which they are committed, until the job has ended.

    Args:
        ack: called with half-open ranges of rows that were consumed, e.g. ``lambda rows: client.ack(job_id, rows)``; None keeps the files.
        ack_every: rows after which they are acknowledged; those that are left when nothing new is there are acknowledged at once.
        poll_s: seconds between two looks at the ledger when nothing new is there.

    One process reads a stream: for several workers of a DataLoader give each a part with ``keep``, a predicate of the row.

    Raises, when it is read:
        StoreError: ``incomplete`` when the job was cancelled or failed; what was committed by then has been given out.
    """

    def __init__(
        self,
        job_dir: str | Path,
        *,
        boundaries: Sequence[int] | None = None,
        final: Literal["post", "pre"] | None = "post",
        ack: Callable[[Ranges], object] | None = None,
        ack_every: int = 64,
        poll_s: float = 0.5,
        keep: Callable[[int], bool] | None = None,
    ) -> None:
        self.job_dir = Path(job_dir)
        self._loader = SampleLoader(self.job_dir, boundaries=boundaries, final=final)
        self._ack = ack
        self._ack_every = ack_every
        self._poll_s = poll_s
        self._keep = keep

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Each item has ``row``, a scalar int64 tensor, besides."""
        batches = {b.batch: b for b in read_plan(self.job_dir)}
        acked = load_acks(self.job_dir)
        given: dict[int, set[int]] = {}  # batch -> rows of it that were given out; of batches that are not finished
        finished: dict[int, tuple[int, frozenset[int]]] = {}  # batch -> (segments it had, rows that failed): a retry brings a segment
        consumed: Ranges = []
        with Reading(self.job_dir):
            while True:
                # Asked before the look: what it finds then is all there is.
                complete = load_completion(self.job_dir) is not None
                state = JobState(load_control(self.job_dir).state)
                ledger = JobLedger(self.job_dir)
                news = False
                for batch in ledger.batches():
                    segments = len(ledger.segments(batch))
                    if batch not in batches or (batch in finished and finished[batch][0] == segments):
                        continue
                    rows = range(batches[batch].start, batches[batch].stop)
                    seen = given.setdefault(batch, set(rows) - finished.pop(batch)[1] if batch in finished else set())
                    records = ledger.records(batch)
                    done = {row for row, r in records.items() if r.state == RowState.DONE.value}
                    for row in sorted(done - seen):
                        seen.add(row)
                        if row in acked or not (self._keep is None or self._keep(row)):
                            continue
                        news = True
                        yield self._loader.load(records[row].path) | {"row": torch.tensor(row)}
                        consumed.append((row, row + 1))
                        if len(consumed) >= self._ack_every:
                            self._tell(consumed)
                    if len(records) == len(rows):
                        finished[batch] = segments, frozenset(records.keys() - done)
                        del given[batch]
                if news:
                    continue
                self._tell(consumed)
                if complete:
                    return
                if state in (JobState.CANCELLED, JobState.FAILED):
                    raise StoreError(ErrorCode.INCOMPLETE, f"job {self.job_dir.name} is {state}; what it had has been read")
                time.sleep(self._poll_s)

    def _tell(self, consumed: Ranges) -> None:
        if consumed and self._ack is not None:
            self._ack(list(merge(consumed)))
        consumed.clear()
