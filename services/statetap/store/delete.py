"""Removing jobs and datasets, and what nobody needs any more.

Invariant: what is removed vanishes at once (one rename into the trash) and never while somebody reads it; a crash in the middle leaves
trash, which the next clean-up takes. Bytes freed are those of files whose last name went: files that another job shares by hard link
are not counted. Objects of a bucket go after the rename and before the folder, by whose job.json they are found. Memory does not grow with files.

A worker that sleeps over its lease can put an object after its job was deleted. Other stores may use the same bucket and prefix, so nothing is
taken for garbage since no job of ours has it: a deleted job leaves a note of where its objects stood, and the clean-up looks there alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contracts.errors import ErrorCode, RequestError, StatetapError, StoreError
from ..contracts.layout import DATASETS, DELETED, JOB, JOB_ID, JOBS, MANIFEST, ROWS_PER_FOLDER, SAMPLE_NAME, TEMP_PREFIX, folder
from ..contracts.records import RowState
from .acks import load_acks
from .fs import fsync_dir, make_dirs, read_json, remove, replace_file, store_error, to_json
from .jobs import load_job
from .ledger import JobLedger
from .plan import read_plan
from .samples import SampleStore, samples_of

if TYPE_CHECKING:  # its library is slow to import, and who has no bucket needs it not
    from .bucket import BucketSamples

log = logging.getLogger(__name__)

TRASH_PREFIX = ".trash-"
NOTE_KEPT_S = 7 * 86_400.0  # of a deleted job's objects: no worker sleeps longer and then goes on
NO_JOB_AFTER_S = 86_400.0  # of a folder without job.json: a submission writes that within seconds
ORPHAN_AFTER_S = 60.0  # of a temp that is written and named in milliseconds


Hold = Callable[[], contextlib.AbstractContextManager[bool]]


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


def _bucket(data: dict[str, Any], job_id: str) -> BucketSamples | None:
    """Where the objects of this job stand, by its job.json or its note; None for none, and for what is not below its own name: a copied
    folder, or one that was written by hand, must not take another job's objects with it."""
    url = str(data.get("samples") or "")
    if not url:
        return None
    if not JOB_ID.fullmatch(job_id) or not url.endswith(f"/{job_id}"):
        log.warning("event=objects_left job=%s samples=%s reason=not_below_its_name", job_id, url)
        return None
    from .bucket import BucketSamples  # as above

    return BucketSamples(url)


def _in_bucket(job_dir: Path, dry_run: bool) -> Freed:
    """A job's objects, also of one in the trash. Before its folder goes, by which they are found. Raises OSError, StatetapError."""
    job_id = job_dir.name
    if job_id.startswith(TRASH_PREFIX):
        job_id = job_id.removeprefix(TRASH_PREFIX).rpartition("-")[0]
    bucket = _bucket(read_json(job_dir / JOB) or {}, job_id)
    if bucket is None:
        return Freed()
    if not dry_run:
        _leave_note(job_dir.parent.parent, job_id, bucket.url)
    return _empty(bucket, dry_run)


def _empty(bucket: BucketSamples, dry_run: bool) -> Freed:
    files = size = 0
    for entry in bucket.all() if dry_run else bucket.remove_all():
        files, size = files + 1, size + entry.size
    return Freed(files, size)


def _leave_note(store: Path, job_id: str, samples: str) -> None:
    try:
        make_dirs(store / DELETED)
        replace_file(store / DELETED / f"{job_id}.json", to_json({"samples": samples, "at": time.time()}))
    except (OSError, StoreError) as e:  # a full disk is no reason not to delete
        log.warning("event=no_note_of_deleted_job job=%s error=%s", job_id, e)


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
    """(name, what it freed) of folders that a delete left behind, and of those that never were a job or are none any more."""
    for path in _no_jobs(store):
        try:
            yield path.name, _delete(path, dry_run)
        except StatetapError as e:
            log.warning("event=trash_left name=%s error=%s", path.name, e)
    for parent in (store / JOBS, store / DATASETS):
        try:
            names = sorted(n for n in os.listdir(parent) if n.startswith(TRASH_PREFIX))
        except FileNotFoundError:
            continue
        for name in names:
            path = parent / name
            try:
                yield name, _in_bucket(path, True) + _walk(path, lambda _: None) if dry_run else _remove_tree(path)
            except (OSError, StatetapError) as e:  # it stays for the next time
                log.warning("event=trash_left name=%s error=%s", name, e)


def _no_jobs(store: Path) -> Iterator[Path]:
    """Folders without a job.json: of a submission that was killed, or made anew by a worker that woke after its job was deleted.

    One with a manifest was a whole job, and what befell its job.json is not for us to say.
    """
    try:
        names = sorted(os.listdir(store / JOBS))
    except FileNotFoundError:
        return
    for path in (store / JOBS / name for name in names if JOB_ID.fullmatch(name)):
        with contextlib.suppress(FileNotFoundError):
            if not (path / JOB).exists() and not (path / MANIFEST).exists() and time.time() - path.stat().st_mtime > NO_JOB_AFTER_S:
                yield path


def late_objects(store: Path, *, dry_run: bool = False) -> Iterator[tuple[str, Freed]]:
    """(job, what it freed) of objects that came into a bucket after their job was deleted. Notes go when they are old."""
    try:
        names = sorted(os.listdir(store / DELETED))
    except FileNotFoundError:
        return
    for name in names:
        job_id, note = name.removesuffix(".json"), store / DELETED / name
        if not JOB_ID.fullmatch(job_id):
            continue
        try:
            data = read_json(note)
            bucket = None if data is None else _bucket(data, job_id)
            if data is None or bucket is None:
                continue
            back = (store / JOBS / job_id / JOB).exists()  # out of a backup: its objects are its own
            freed = Freed() if back else _empty(bucket, dry_run)
            if not dry_run and (back or time.time() - float(data["at"]) > NOTE_KEPT_S):
                remove(note)
        except (OSError, StatetapError, KeyError, TypeError, ValueError) as e:
            log.warning("event=late_objects_not_looked_for job=%s error=%s", job_id, e)
            if isinstance(e, OSError):
                return  # the bucket is away: the others would take as long
            continue
        if freed.files:
            yield job_id, freed


def clean_job(job_dir: Path, hold: Hold = lambda: contextlib.nullcontext(True), *, dry_run: bool = False) -> Freed:
    """Remove from an ended job what nobody needs: temps, files of generations that were written again, and of acknowledged rows.

    ``hold``: keeps a job from going back to work while one folder is looked at; False when it has done so since the ledger was read, and
    files could have come that this does not know of. Raises StoreError. A job that is being read is cleaned all the same: nothing that a
    reader may open goes.
    """
    try:
        samples = samples_of(job_dir, load_job(job_dir))
        freed = Freed()
        for rows, named in _needed(job_dir):
            with hold() as same:
                if not same:
                    return freed
                freed += _clean_folder(samples, rows, named, dry_run)
        return freed + _clean_top(job_dir, dry_run)
    except OSError as e:
        raise store_error(e, f"clean {job_dir.name}") from e


def _needed(job_dir: Path) -> Iterator[tuple[range, set[str]]]:
    """By folder, each once: its rows, and the files of it that the ledger names and nobody has acknowledged."""
    ledger, acks = JobLedger(job_dir), load_acks(job_dir)
    named: dict[str, set[str]] = {}
    begin = end = 0
    for batch in read_plan(job_dir):
        for r in ledger.records(batch.batch).values():
            if r.state == RowState.DONE.value and r.row not in acks:
                named.setdefault(folder(r.row), set()).add(r.path)
        end = batch.stop
        while begin + ROWS_PER_FOLDER <= end:
            yield range(begin, begin + ROWS_PER_FOLDER), named.pop(folder(begin), set())
            begin += ROWS_PER_FOLDER
    if begin < end:
        yield range(begin, end), named.pop(folder(begin), set())


def _clean_folder(samples: SampleStore, rows: range, named: set[str], dry_run: bool) -> Freed:
    name = folder(rows.start)

    def superfluous(entry: str) -> bool:
        match = SAMPLE_NAME.fullmatch(entry)
        superseded = match is not None and int(match["row"]) in rows and f"{name}/{entry}" not in named
        return superseded or entry.startswith(TEMP_PREFIX)

    found = list(samples.entries(name, superfluous))
    if not dry_run:
        samples.remove_many(e.name for e in found)
    return Freed(len(found), sum(e.size for e in found if e.last))


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
