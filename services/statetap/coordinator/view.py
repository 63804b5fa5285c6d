"""What the reconciler remembers of a job between two looks. All of it can be lost: it is derived again from store and Redis."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..contracts import keys
from ..contracts.profile import CaptureProfile
from ..contracts.records import JobSpec, Retain
from .feed import Entry
from .totals import PlanIndex, RateWindow, Sums, TotalsFold

FRUITLESS_LIMIT = 5
CIRCUIT_S = 30.0
MAX_DELAY_S = 30.0
TROUBLE_RETRY_S = 5.0
SETTLE_S = 2 * keys.LEASE_REFRESH_S  # after Redis was away or wiped: horses that live take their leases again within it


@dataclass(frozen=True, kw_only=True)
class Given:
    """An attempt that was out at the last look, and how many rows its batch had then."""

    entry: Entry
    rows: int


@dataclass(kw_only=True)
class JobView:
    """One job that has not ended. Only the reconciler's thread changes it, and the job's background task while it is busy."""

    spec: JobSpec
    profile: CaptureProfile
    profile_id: str
    plan: PlanIndex
    fold: TotalsFold
    window: RateWindow
    entries: dict[int, Entry] = field(default_factory=dict)  # out at this look
    leased: set[int] = field(default_factory=set)  # of them: somebody works on it
    leased_since: dict[tuple[int, int], float] = field(default_factory=dict)  # (batch, attempt) -> monotonic time
    yielded: set[tuple[int, int]] = field(default_factory=set)  # (batch, attempt) that were asked to make room
    room_made: set[tuple[int, int]] = field(default_factory=set)  # lost (batch, attempt) for which another batch was asked to make room
    given: dict[int, Given] = field(default_factory=dict)
    missing_since: dict[tuple[int, int], float] = field(default_factory=dict)  # (batch, attempt) not started and not queued
    tries: dict[int, int] = field(default_factory=dict)  # batch -> attempts handed back without a row
    not_before: dict[int, float] = field(default_factory=dict)  # batch -> monotonic time
    fruitless: int = 0  # in a row, over the job
    circuit_until: float = 0.0
    circuit_message: str = ""
    trouble: tuple[str, str] | None = None
    trouble_until: float = 0.0
    incomplete: int = 0  # times that finishing found rows missing
    room: int | None = None  # retain=until_read: bytes that may still be written
    touched: bool = True  # its totals may have changed since they were read
    last_fed: float = 0.0
    hold_until: float = 0.0  # monotonic; not fed before
    checked: bool = False  # dataset and plan were compared with job.json

    @classmethod
    def open(cls, spec: JobSpec, plan: PlanIndex, window_s: float) -> JobView:
        profile = spec.capture_profile
        return cls(spec=spec, profile=profile, profile_id=profile.profile_id, plan=plan, fold=TotalsFold(plan), window=RateWindow(window_s))

    @property
    def sums(self) -> Sums:
        return self.fold.sums

    def unread(self, freed: int) -> tuple[int, int] | None:
        """(bytes that wait to be read, bytes that may) when a job with retain=until_read has to wait for its readers; ``freed``: bytes acknowledged.

        Batches are given out only where all that they can write has room, so the limit holds whatever the workers do.
        """
        if self.spec.retain != Retain.UNTIL_READ:
            return None
        most, waiting = self.spec.retain_bytes, self.sums.bytes - freed
        self.room = most - waiting - sum(map(self.bytes_left, self.entries))
        batch = self.fold.next_batch(set(self.entries))
        full = batch is not None and not self.entries and not self.has_room(batch)
        return (waiting, most) if full else None

    def bytes_left(self, batch: int) -> int:
        """Bytes that a batch can still write, at most."""
        whole = self.spec.sample_format.most(int(self.plan.tokens[batch]), self.plan.rows(batch))
        return max(whole - self.fold.bytes_of(batch), 0)

    def has_room(self, batch: int) -> bool:
        return self.room is None or self.bytes_left(batch) <= self.room

    def in_trouble(self, code: str, message: str) -> None:
        """Remember why the last step failed; it is tried again after TROUBLE_RETRY_S."""
        self.trouble = (code, message)
        self.trouble_until = time.monotonic() + TROUBLE_RETRY_S

    def handed_back(self, now: float, *, excused: bool) -> list[Given]:
        """Attempts that were out at the last look and are out no more, with their batch unfinished and not a row further.

        Each delays its batch (1, 2, 4 … s), so that a worker that fails at once is not fed in a loop. ``excused``: the job is paused,
        and handing back is what was asked for. Progress anywhere in the job closes the circuit's count.
        """
        gone = [g for batch, g in self.given.items() if (e := self.entries.get(batch)) is None or e.attempt != g.entry.attempt]
        fruitless = []
        for g in gone:
            batch = g.entry.batch
            if self.fold.rows_of(batch) > g.rows or self.fold.finished[batch]:
                self.fruitless = 0
                self.tries.pop(batch, None)
            elif (batch, g.entry.attempt) in self.yielded:
                continue  # it did what it was asked for
            elif not excused and batch not in self.entries:
                self.tries[batch] = self.tries.get(batch, 0) + 1
                self.not_before[batch] = now + min(2.0 ** (self.tries[batch] - 1), MAX_DELAY_S)
                self.fruitless += 1
                fruitless.append(g)
        self.yielded &= {(b, e.attempt) for b, e in self.entries.items()}
        self.given = {
            b: kept if (kept := self.given.get(b)) and kept.entry.attempt == e.attempt else Given(entry=e, rows=self.fold.rows_of(b))
            for b, e in self.entries.items()
        }
        return fruitless

    def open_circuit(self, now: float, message: str) -> None:
        self.circuit_until = now + CIRCUIT_S
        self.circuit_message = message
        self.fruitless = FRUITLESS_LIMIT - 1  # one more that brings nothing opens it again

    def feedable(self, now: float, held: set[int]) -> int | None:
        """The lowest unfinished batch that may be given out now."""
        waiting = {b for b, t in self.not_before.items() if t > now}
        batch = self.fold.next_batch(self.entries.keys() | held | waiting)
        return batch if batch is not None and self.has_room(batch) else None
