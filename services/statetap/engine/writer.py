"""Writer threads of one scheduler: put captured rows at their place in ``tap/<lease>/<rid>.tmp`` and name the file when whole.

Invariant: ``<rid>.safetensors`` exists only when every position in [0, P) was written. A request belongs to one thread, which
does all that happens to it in order. Every region of the ring is given back, whatever becomes of its rows, and no fault ends a thread. Files are written and not mapped: a full tmpfs is an error of that request, never a SIGBUS of the
scheduler. Their space is not taken before (fallocate zeroes every page that is written again a moment later): workers reserve it.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contracts.capture import STATUS_ERROR, STATUS_OK, CaptureReply, lease_of
from ..contracts.errors import ErrorCode, StatetapError
from ..contracts.profile import CaptureProfile
from ..contracts.tensors import INPUT_IDS, Header, tap_header
from .channel import Sender
from .metrics import Tally
from .ring import Region

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CLOSED_KEPT = 16_384  # rids that are over, a thread: more than can be in flight, so that late rows of an aborted request make no new file
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)  # ENOMEM: a tmpfs in a memory cgroup that is full


@dataclass(kw_only=True)
class Rows:
    """Rows [position, position + n) of a prompt of ``total`` tokens. ``planes``: tensor name -> [n, columns] on the host."""

    rid: str
    total: int
    position: int
    planes: dict[str, torch.Tensor]
    region: Region  # of the ring; given back when these rows are written or given up
    ready: Any = None  # CUDA event after which the host copies are there
    begun: Any = None  # CUDA event before these copies, with the first rows of a forward only: what the copies took is counted once


@dataclass(kw_only=True)
class _Open:
    fd: int
    total: int
    header: Header
    spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def covered(self) -> int:
        """Length of the prefix that is written without a hole."""
        end = 0
        for lo, hi in sorted(self.spans):
            if lo > end:
                break
            end = max(end, hi)
        return end


class Writers:
    """The threads, and the way to them."""

    def __init__(self, tap: Path, profile: CaptureProfile, sender: Sender, *, threads: int) -> None:
        self._threads = [_Writer(tap, profile, sender, i) for i in range(threads)]
        for t in self._threads:
            t.start()

    def put(self, rows: Rows) -> None:
        """Hand over rows, in the order of their positions for each request."""
        self._of(rows.rid).jobs.put(("rows", rows))

    def fail(self, rid: str, code: ErrorCode, message: str) -> None:
        self._of(rid).jobs.put(("fail", rid, code, message))

    def drop(self, rid: str) -> None:
        """An aborted request: no file, and nothing more is made of rows that still come."""
        self._of(rid).jobs.put(("drop", rid))

    def drop_all(self) -> None:
        for t in self._threads:
            t.jobs.put(("drop_all",))

    @property
    def tallies(self) -> list[Tally]:
        """What each thread counted."""
        return [t.tally for t in self._threads]

    @property
    def open_files(self) -> int:
        return sum(len(t.open) for t in self._threads)

    def _of(self, rid: str) -> _Writer:
        return self._threads[hash(rid) % len(self._threads)]


class _Writer(threading.Thread):
    def __init__(self, tap: Path, profile: CaptureProfile, sender: Sender, index: int) -> None:
        super().__init__(daemon=True, name=f"statetap-writer-{index}")
        self._tap, self._profile, self._sender = tap, profile, sender
        self.jobs: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()  # bounded by the ring
        self.tally = Tally()
        self.open: dict[str, _Open] = {}
        self._closed: OrderedDict[str, bool] = OrderedDict()  # rid -> was it dropped (True: say nothing of late rows)

    def run(self) -> None:
        while True:
            kind, *args = self.jobs.get()
            try:
                getattr(self, "_do_" + kind)(*args)
            except Exception as e:
                rid = args[0].rid if kind == "rows" else args[0] if args else ""
                logger.warning("statetap: capture of %s failed: %r", rid, e, exc_info=not isinstance(e, OSError | StatetapError))
                try:
                    if rid:
                        self._do_fail(rid, _code_of(e), str(e) or repr(e))
                except Exception:  # this thread must live: the others' rows come by it too
                    logger.exception("statetap: the failure of %s could not be told", rid)

    def _path(self, rid: str, suffix: str) -> Path:
        return self._tap / str(lease_of(rid)) / (rid + suffix)

    def _do_rows(self, rows: Rows) -> None:
        try:
            if rows.rid in self._closed:
                if not self._closed[rows.rid] and rows.position == 0:
                    # Of a request that is run again after a retraction nobody waits for this; of a rid that is used again, its reply does.
                    self._tell(rows.rid, ErrorCode.CAPTURE_INCOMPLETE, "this rid was used before")
                return
            if rows.ready is not None:
                rows.ready.synchronize()
                if rows.begun is not None:
                    self.tally.copy_seconds += rows.begun.elapsed_time(rows.ready) / 1e3
            started = time.perf_counter()
            entry = self.open.get(rows.rid) or self._begin(rows)
            if entry.total != rows.total:
                raise StatetapError(ErrorCode.CAPTURE_INCOMPLETE, f"the prompt had {entry.total} tokens, and now has {rows.total}")
            for name, data in rows.planes.items():
                tensor = entry.header.tensors[name]
                width = (tensor.stop - tensor.start) // rows.total
                self.tally.written_bytes += _pwrite_all(entry.fd, _as_bytes(data), tensor.start + rows.position * width)
            self.tally.write_seconds += time.perf_counter() - started
            n = rows.planes[INPUT_IDS].shape[0]
            entry.spans.append((rows.position, rows.position + n))
            if entry.covered >= rows.total:
                self._finish(rows.rid, rows.total)
            elif rows.position + n >= rows.total:
                raise StatetapError(
                    ErrorCode.CAPTURE_INCOMPLETE,
                    f"the prompt is complete, but only [0, {entry.covered}) of {rows.total} was computed (prefix cache?)",
                )
        finally:
            rows.region.done()

    def _begin(self, rows: Rows) -> _Open:
        header = tap_header(self._profile, rows.total)
        fd = os.open(self._path(rows.rid, ".tmp"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o664)
        entry = self.open[rows.rid] = _Open(fd=fd, total=rows.total, header=header)
        self.tally.written_bytes += _pwrite_all(fd, memoryview(header.encode()), 0)
        return entry

    def _finish(self, rid: str, total: int) -> None:
        entry = self.open.pop(rid)
        os.close(entry.fd)
        final = self._path(rid, ".safetensors")
        os.rename(self._path(rid, ".tmp"), final)
        self._close(rid, dropped=False)
        self.tally.captured_requests += 1
        self.tally.captured_tokens += total
        self.tally.captured_bytes += entry.header.size
        reply = CaptureReply(status=STATUS_OK, path=str(final.relative_to(self._tap)), rows=total)
        self._sender.send({"rid": rid, **reply.to_dict()})

    def _do_fail(self, rid: str, code: ErrorCode, message: str) -> None:
        if rid in self._closed:
            return
        self._close(rid, dropped=False)  # first: if the file cannot be removed, its late rows must still not be taken
        self.tally.errors[code.value] += 1
        try:
            self._remove(rid, (".tmp",))
        finally:
            self._tell(rid, code, message)

    def _tell(self, rid: str, code: ErrorCode, message: str) -> None:
        self._sender.send({"rid": rid, **CaptureReply(status=STATUS_ERROR, code=code.value, message=message).to_dict()})

    def _do_drop(self, rid: str) -> None:
        over = rid in self._closed
        self._close(rid, dropped=True)
        try:
            self._remove(rid, (".tmp", ".safetensors"))
        finally:
            if not over:  # a reply may wait: the request ended before the abort reached it
                self.tally.aborted_requests += 1
                self._tell(rid, ErrorCode.CAPTURE_INCOMPLETE, "the request was aborted")

    def _do_drop_all(self) -> None:
        """Those without a row yet are dropped by their replies (replies.py), which say that they were aborted."""
        for rid in list(self.open):
            self.jobs.put(("drop", rid))  # each by itself: a fault of one is no fault of the others

    def _remove(self, rid: str, suffixes: tuple[str, ...]) -> None:
        entry = self.open.pop(rid, None)
        if entry is not None:
            os.close(entry.fd)
        for suffix in suffixes:
            self._path(rid, suffix).unlink(missing_ok=True)

    def _close(self, rid: str, *, dropped: bool) -> None:
        self._closed[rid] = dropped
        if len(self._closed) > CLOSED_KEPT:
            self._closed.popitem(last=False)


def _code_of(e: Exception) -> ErrorCode:
    if isinstance(e, StatetapError):
        return e.code
    return ErrorCode.TAP_FULL if isinstance(e, OSError) and e.errno in _FULL else ErrorCode.CAPTURE_INCOMPLETE


def _as_bytes(t: torch.Tensor) -> memoryview:
    import torch  # in the scheduler it is there already; this module's records are used without it

    return memoryview(t.contiguous().view(torch.uint8).reshape(-1).numpy())  # type: ignore[arg-type]


def _pwrite_all(fd: int, data: memoryview, offset: int) -> int:
    """Write all of ``data``; its length. A short write (the tap fills up in the middle) goes on until the error comes."""
    size = len(data)
    while data:
        n = os.pwrite(fd, data, offset)
        data, offset = data[n:], offset + n
    return size
