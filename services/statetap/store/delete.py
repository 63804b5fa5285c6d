"""Removing jobs and datasets, and what nobody needs any more.

Invariant: what is removed vanishes at once (one rename into the trash) and never while somebody reads it; a crash in the middle leaves
trash, which the next clean-up takes. Bytes freed are those of files whose last name went: files that another job shares by hard link
are not counted. Objects of a bucket go after the rename and before the folder, by whose job.json they are found. Memory does not grow with files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..contracts.errors import ErrorCode, RequestError
from ..contracts.layout import DATASETS, JOB, JOBS, SAMPLE_NAME, TEMP_PREFIX, folder
from ..contracts.records import RowState
from .acks import load_acks
from .fs import fsync_dir, read_json, remove, store_error
from .jobs import load_job
from .ledger import JobLedger
from .plan import read_plan
from .samples import SampleStore, samples_of

TRASH_PREFIX = ".trash-"
ORPHAN_AFTER_S = 60.0  # of a temp that is written and named in milliseconds


@dataclass(frozen=True)
class Freed:
    files: int = 0
    bytes: int = 0

    def __add__(self, other: Freed) -> Freed:
        return Freed(self.files + other.files, self.bytes + other.bytes)


class Reading:
    """A shared lock on a job that is being read: it cannot be deleted meanwhile. It goes with the process.

    On file systems without locks it holds nothing; there readers and deletion are the user's to keep apart.

    Raises RequestError: ``not_found`` for no job, ``conflict`` for one that is being deleted.
    """

    def __init__(self, job_dir: Path) -> None:
        self._fd = -1
        try:
            self._fd = _lock(job_dir, fcntl.LOCK_SH)
        except FileNotFoundError:
            raise RequestError(ErrorCode.NOT_FOUND, f"no job at {job_dir.name}") from None
        except BlockingIOError:
            raise RequestError(ErrorCode.CONFLICT, f"{job_dir.name} is being deleted") from None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, object]:
        return {"_fd": -1}  # a process that it is sent to is a child of one that holds the lock


def _lock(job_dir: Path, kind: int) -> int:
    """A descriptor that holds the lock, or -1 where the file system has none. Raises BlockingIOError, OSError."""
    fd = os.open(job_dir / JOB, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as e:
        os.close(fd)
        if e.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            return -1
        raise
    return fd


def delete_job(job_dir: Path, *, dry_run: bool = False) -> Freed:
    """Remove an ended job; the caller knows that it has ended. What would be freed when ``dry_run``.

    Raises:
        RequestError: ``conflict`` while somebody reads it.
        StoreError: it cannot be removed.
    """
    try:
        fd = _lock(job_dir, fcntl.LOCK_EX)
    except BlockingIOError:
        raise RequestError(ErrorCode.CONFLICT, f"{job_dir.name} is being read (a training run or a verify): end that first") from None
    except OSError as e:
        raise store_error(e, f"delete {job_dir.name}") from e
    try:
        return _delete(job_dir, dry_run)
    finally:
        if fd >= 0:
            os.close(fd)


def _in_bucket(job_dir: Path, dry_run: bool) -> Freed:
    """A job's objects. Before its folder goes, by which they are found. Raises OSError."""
    data = read_json(job_dir / JOB) or {}
    if not data.get("samples"):
        return Freed()
    from .bucket import BucketSamples  # as in samples.py

    bucket = BucketSamples(data["samples"])
    files = size = 0
    for entry in bucket.all() if dry_run else bucket.remove_all():
        files, size = files + 1, size + entry.size
    return Freed(files, size)


def delete_dataset(dataset_dir: Path, *, dry_run: bool = False) -> Freed:
    """Remove a dataset that no job needs; the caller has looked. Raises StoreError."""
    return _delete(dataset_dir, dry_run)


def _delete(path: Path, dry_run: bool) -> Freed:
    try:
        if dry_run:
            return _in_bucket(path, True) + _walk(path, lambda _: None)
        trash = path.with_name(f"{TRASH_PREFIX}{path.name}-{secrets.token_hex(4)}")
        os.rename(path, trash)
        fsync_dir(path.parent)
        return _remove_tree(trash)
    except OSError as e:
        raise store_error(e, f"delete {path.name}") from e


def _remove_tree(path: Path) -> Freed:
    freed = _in_bucket(path, False) + _walk(path, os.unlink)
    for root, _, _ in os.walk(path, topdown=False):
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(root)
    return freed


def _walk(path: Path, do: Callable[[str], None]) -> Freed:
    """Call ``do`` on every file below; a file that goes meanwhile is not an error."""
    files = size = 0
    for root, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = os.lstat(os.path.join(root, name))
                do(os.path.join(root, name))
                files += 1
                size += found.st_size if found.st_nlink == 1 else 0
    return Freed(files, size)


# what nobody needs any more


def empty_trash(store: Path, *, dry_run: bool = False) -> Iterator[tuple[str, Freed]]:
    """(name, what it freed) of folders that a delete left behind."""
    for parent in (store / JOBS, store / DATASETS):
        try:
            names = sorted(n for n in os.listdir(parent) if n.startswith(TRASH_PREFIX))
        except FileNotFoundError:
            continue
        for name in names:
            path = parent / name
            yield name, _in_bucket(path, True) + _walk(path, lambda _: None) if dry_run else _remove_tree(path)


def clean_job(job_dir: Path, *, dry_run: bool = False) -> Freed:
    """Remove from an ended job what nobody needs: temps, files of generations that were written again, and of acknowledged rows.

    Raises StoreError. A job that is being read is cleaned all the same: nothing that a reader may open goes.
    """
    try:
        samples = samples_of(job_dir, load_job(job_dir))
        ledger = JobLedger(job_dir)
        acks = load_acks(job_dir)
        freed = Freed()
        for batch in read_plan(job_dir):
            records = ledger.records(batch.batch)
            named = {r.path for r in records.values() if r.state == RowState.DONE.value and r.row not in acks}
            for name in dict.fromkeys(folder(row) for row in range(batch.start, batch.stop)):
                freed += _clean_folder(samples, name, range(batch.start, batch.stop), named, dry_run)
        return freed + _clean_top(job_dir, dry_run)
    except OSError as e:
        raise store_error(e, f"clean {job_dir.name}") from e


def _clean_folder(samples: SampleStore, name: str, rows: range, named: set[str], dry_run: bool) -> Freed:
    def superfluous(entry: str) -> bool:
        match = SAMPLE_NAME.fullmatch(entry)
        superseded = match is not None and int(match["row"]) in rows and f"{name}/{entry}" not in named
        # A temp belongs to no batch by its name alone; the first batch that looks into the folder takes it.
        return superseded or entry.startswith(TEMP_PREFIX)

    freed = Freed()
    for entry in samples.entries(name, superfluous):
        if not dry_run:
            samples.remove(entry.name)
        freed += Freed(1, entry.size if entry.last else 0)
    return freed


def _clean_top(job_dir: Path, dry_run: bool) -> Freed:
    """Temps of a coordinator that was killed while it wrote the job's own files. A young one may be about to get its name."""
    freed = Freed()
    with os.scandir(job_dir) as entries:
        for entry in entries:
            if entry.name.startswith(TEMP_PREFIX) and time.time() - (size := entry.stat()).st_mtime > ORPHAN_AFTER_S:
                if not dry_run:
                    remove(entry.path)
                freed += Freed(1, size.st_size if size.st_nlink == 1 else 0)
    return freed
