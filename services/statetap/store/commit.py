"""The grouped commit: staged samples become visible, durable and recorded, many at a time (reliability.md).

Order: fsync the temps, link all to their final names, fsync the folders, append the ledger lines (one write and fdatasync), tell,
remove temps and tap files. Invariant: a ledger line never names a file that is not whole and durable, and the first commit of a
row wins: link() fails where a file is, so a worker that wakes after its lease can do no harm. Samples in a bucket come here placed:
the PUT that was answered was all of that, and only the ledger is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..contracts.errors import ErrorCode, RowError, StoreError
from ..contracts.records import EngineStart, RowRecord
from ..contracts.sample_format import SampleFormat
from .fs import fsync_dir, remove, store_error
from .ledger import LedgerWriter, fold, segments_by_batch
from .sample import Placed, Staged, check_sample
from .samples import FolderSamples, SampleStore

log = logging.getLogger(__name__)

Item = Staged | Placed | RowRecord

GROUP_ROWS = 64
GROUP_BYTES = 64 << 20
GROUP_WAIT_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one row handed to the committer.

    ``record`` is the row's record once it is on disk (of another attempt when ``won`` is False), or None: then the row is open
    still, and ``error`` says why (None: another attempt has the batch and swept our temp file).
    """

    row: int
    record: RowRecord | None = None
    error: StoreError | None = None
    won: bool = True


class Committer:
    """One thread that commits groups. ``tell`` is called in it with the outcomes of a group, after the ledger's fsync.

    The order in which rows are told is the order of the groups; a row is told exactly once.
    """

    def __init__(
        self,
        job_dir: Path,
        format: SampleFormat,
        batch: int,
        attempt: str,
        tell: Callable[[Sequence[Outcome]], None],
        samples: SampleStore | None = None,
        engine: Callable[[], EngineStart | None] = lambda: None,
    ) -> None:
        self._job_dir = job_dir
        self._samples = samples or FolderSamples(job_dir)
        self._format = format
        self._batch = batch
        self._tell = tell
        self._ledger = LedgerWriter(job_dir, batch, attempt, engine)
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._known: dict[int, RowRecord] | None = None  # the ledger, read once for a group of rows whose names are taken
        self._hurry = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="committer")
        self._thread.start()

    def submit(self, item: Item) -> None:
        """Hand over a checked sample, or the record of a row that has no file (failed, skipped)."""
        if not self._thread.is_alive():
            raise StoreError(ErrorCode.INTERNAL, f"the committer of batch {self._batch} has ended")
        self._items.put(item)

    def hurry(self, on: bool) -> None:
        """While on, a group does not wait for more rows: the caller has none to give until some are committed."""
        if on and not self._hurry.is_set():
            self._hurry.set()
            self._items.put(None)  # wakes a wait that began before
        elif not on:
            self._hurry.clear()

    def close(self) -> None:
        """Commit what was handed over, then end. Idempotent."""
        if self._thread.is_alive():
            self._closing = True
            self._items.put(None)
            self._thread.join()
        self._ledger.close()

    def _run(self) -> None:
        group: list[Item] = []
        try:
            # The flag is set before the item that wakes us, so it is seen here at the latest after that item.
            while not (self._closing and self._items.empty()):
                group = self._next_group()
                if group:
                    self._tell(self._commit(group))
        except BaseException as e:
            # A bug: the rows stay open and their caller must not wait for ever.
            error = StoreError(ErrorCode.INTERNAL, f"the committer of batch {self._batch} ended: {e!r}")
            while not self._items.empty():
                if (item := self._items.get()) is not None:
                    group.append(item)
            self._tell([Outcome(row=_row(item), error=error) for item in group])
            raise

    def _next_group(self) -> list[Item]:
        """The next rows to commit together; empty when woken for another reason."""
        first = self._items.get()
        if first is None:
            return []
        group: list[Item] = [first]
        size = _bytes(first)
        deadline = time.monotonic() + GROUP_WAIT_S
        while len(group) < GROUP_ROWS and size < GROUP_BYTES:
            wait = 0.0 if self._hurry.is_set() or self._closing else max(0.0, deadline - time.monotonic())
            try:
                item = self._items.get(timeout=wait) if wait else self._items.get_nowait()
            except queue.Empty:
                break
            if item is not None:
                group.append(item)
                size += _bytes(item)
        return group

    def _commit(self, group: list[Item]) -> list[Outcome]:
        samples = [item for item in group if not isinstance(item, RowRecord)]
        records = [item for item in group if isinstance(item, RowRecord)]
        outcomes: dict[int, Outcome] = {}
        self._known = None
        lines = [(record, True) for record in records]
        lines += self._link([item for item in samples if isinstance(item, Staged)], outcomes)
        lines += self._placed([item for item in samples if isinstance(item, Placed)], outcomes)
        try:
            self._ledger.append(record for record, is_new in lines if is_new)
        except StoreError as e:
            # Linked but not recorded: the next attempt adopts these files after a full check.
            outcomes.update({record.row: Outcome(row=record.row, error=e) for record, is_new in lines if is_new})
        ours = {item.row.row: item.record for item in samples}
        for record, _ in lines:
            won = record is ours.get(record.row, record)
            outcomes.setdefault(record.row, Outcome(row=record.row, record=record, won=won))
        for path in (path for item in samples for path in _done_with(item)):
            try:
                remove(path)
            except OSError as e:
                # Nothing depends on it: temps are swept at the next attempt or by gc, tap files go with their lease.
                log.warning("event=cleanup_failed batch=%d error=%s", self._batch, e)
        return list(outcomes.values())

    def _link(self, staged: list[Staged], outcomes: dict[int, Outcome]) -> list[tuple[RowRecord, bool]]:
        """Make files durable under their final names. Returns (record, needs a ledger line) of every row that has one now."""
        synced = []
        for item in staged:
            try:
                try:
                    os.fsync(item.fd)
                    os.posix_fadvise(item.fd, 0, 0, os.POSIX_FADV_DONTNEED)  # terabytes pass here: not through the page cache
                finally:
                    os.close(item.fd)
                synced.append(item)
            except OSError as e:
                outcomes[item.row.row] = Outcome(row=item.row.row, error=store_error(e, f"fsync row {item.row.row}"))
        linked: list[tuple[Staged, RowRecord, bool]] = []
        for item in synced:
            row = item.row.row
            try:
                if _link_first(item.temp, item.final):
                    linked.append((item, item.record, True))
                    continue
                linked.append((item, *self._other(item)))
            except FileNotFoundError:
                log.info("event=late_commit_discarded row=%d batch=%d reason=temp_swept", row, self._batch)
                outcomes[row] = Outcome(row=row, won=False)
            except StoreError as e:
                outcomes[row] = Outcome(row=row, error=e)
            except OSError as e:
                outcomes[row] = Outcome(row=row, error=store_error(e, f"link row {row}"))
        broken: dict[Path, StoreError] = {}
        for folder in {item.final.parent for item, _, _ in linked}:
            try:
                fsync_dir(folder)
            except OSError as e:
                broken[folder] = store_error(e, f"fsync folder {folder.name}")
        lines = []
        for item, record, is_new in linked:
            if error := broken.get(item.final.parent):
                outcomes[item.row.row] = Outcome(row=item.row.row, error=error)
            else:
                lines.append((record, is_new))
        return lines

    def _placed(self, placed: list[Placed], outcomes: dict[int, Outcome]) -> list[tuple[RowRecord, bool]]:
        """As :meth:`_link`, of samples in a bucket."""
        lines = []
        for item in placed:
            row = item.row.row
            try:
                lines.append((item.record, True) if item.first else self._held(item))
            except RowError as e:
                # Never recorded and not whole: not of a worker of ours. The next attempt at the batch captures the row.
                log.warning("event=corrupt_file_removed row=%d batch=%d error=%s", row, self._batch, e)
                with contextlib.suppress(OSError):
                    self._samples.remove(item.record.path)
                outcomes[row] = Outcome(row=row, won=False)
            except StoreError as e:
                outcomes[row] = Outcome(row=row, error=e)
        return lines

    def _held(self, item: Staged | Placed) -> tuple[RowRecord, bool]:
        """A file that is not ours has our final name: its record, and whether that needs a ledger line. Raises RowError, StoreError."""
        row = item.row.row
        if self._known is None:
            self._known = fold(segments_by_batch(self._job_dir).get(self._batch, []))
        recorded = self._known.get(row)
        if recorded is not None and recorded.path == item.record.path:
            log.info("event=late_commit_discarded row=%d batch=%d reason=already_committed", row, self._batch)
            return recorded, False
        return check_sample(self._samples, self._format, item.row, item.record.generation), True

    def _other(self, item: Staged) -> tuple[RowRecord, bool]:
        """:meth:`_held`, or ours in its place where that is not whole."""
        row = item.row.row
        try:
            return self._held(item)
        except RowError as e:
            # Never recorded and not whole: not a committed file. Ours is.
            log.warning("event=corrupt_file_replaced row=%d batch=%d error=%s", row, self._batch, e)
            remove(item.final)
            if not _link_first(item.temp, item.final):
                raise StoreError(ErrorCode.STORE_IO, f"row {row}: another writer keeps putting corrupt files at {item.final}") from e
            return item.record, True


def _bytes(item: Item) -> int:
    return item.record.bytes if isinstance(item, Staged) else 0  # what a bucket has need not be fsynced


def _row(item: Item) -> int:
    return item.row if isinstance(item, RowRecord) else item.record.row


def _done_with(item: Staged | Placed) -> Iterator[Path]:
    """Files of a sample that nobody needs after its commit."""
    if isinstance(item, Staged):
        yield item.temp
    yield item.tap_file


def _link_first(temp: Path, final: Path) -> bool:
    """Link ``temp`` to ``final``: True when that name is ours, False when another file has it. Raises OSError."""
    try:
        os.link(temp, final)
    except FileExistsError:
        # The same inode: our link was made and its reply was lost (NFS), or the call was repeated.
        return os.path.samestat(os.stat(temp), os.stat(final))
    return True
