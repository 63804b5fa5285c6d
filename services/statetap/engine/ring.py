"""Host memory for captured rows on their way from the GPU to the tap: one pinned block, taken from in order and given back by forward.

Invariant: taking never blocks (the scheduler must not stall) and never allocates once the ring is there: pinning memory costs
hundreds of milliseconds a gigabyte and stops the GPU. Without a GPU the rows stay where they are and only their bytes are counted.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

ALIGN = 512


class Region:
    """Bytes [start, start + size) of the ring, held until each of its ``holders`` has called :meth:`done`."""

    def __init__(self, ring: Ring, start: int, size: int, holders: int) -> None:
        self.start, self.size = start, size
        self._ring, self._holders = ring, holders

    def done(self) -> None:
        """One holder less. Thread-safe."""
        self._ring._release(self)


class Ring:
    """``limit`` bytes. ``memory`` is the pinned block (a uint8 tensor), made at the first use on a GPU."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._regions: deque[Region] = deque()  # in the order taken; the space of one is free when all before it are
        self._memory: Any = None

    def memory(self) -> Any:
        """The pinned block. Takes a second the first time: call it before the engine serves."""
        if self._memory is None:
            import torch

            self._memory = torch.empty(self.limit, dtype=torch.uint8, pin_memory=True)
        return self._memory

    def take(self, size: int, holders: int) -> Region | None:
        """A contiguous region, or None when there is no room. A region larger than the ring never fits."""
        size = -(-size // ALIGN) * ALIGN
        with self._lock:
            if not self._regions:
                start = 0
            else:
                head = self._regions[0].start
                tail = self._regions[-1].start + self._regions[-1].size
                wrapped = self._regions[-1].start < head
                if wrapped:
                    start = tail if tail + size <= head else -1
                elif tail + size <= self.limit:
                    start = tail
                else:
                    start = 0 if size <= head else -1
            if start < 0 or start + size > self.limit:
                return None
            region = Region(self, start, size, holders)
            self._regions.append(region)
            return region

    @property
    def used(self) -> int:
        """Bytes held by regions that are not given back."""
        with self._lock:
            return sum(r.size for r in self._regions if r._holders > 0)

    def _release(self, region: Region) -> None:
        with self._lock:
            region._holders -= 1
            while self._regions and self._regions[0]._holders <= 0:
                self._regions.popleft()
