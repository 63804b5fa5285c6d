"""Whether a file system keeps what the commit stands on: asked at the start of whoever writes to the store, with real files.

The first commit of a row wins because link() refuses a name that is there, and what was recorded stays because fsync of a file and of a
folder means it. Where one of these is missing (exFAT and vFAT have no hard links, some network and FUSE mounts neither) Statetap refuses to
start and says which; there is no weaker commit to fall back to (docs/adr/0021).
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..contracts.errors import ErrorCode, StoreError
from .fs import NO_SPACE, fsync_dir, make_dirs

log = logging.getLogger(__name__)

PREFIX = ".probe-"
NEXT_STEP = "Use another file system for the store: a local disk (ext4, xfs), NFS 4, or a volume that has hard links and fsync."


@dataclass(frozen=True)
class Promise:
    """``broken``: why it is not kept, "" when it is. ``full``: it could not be tried for lack of space."""

    text: str
    broken: str = ""
    full: bool = False


def promises(folder: Path) -> Iterator[Promise]:
    """Try each promise in an empty folder, which is the caller's to remove."""
    a, b = folder / "a", folder / "b"
    a.write_bytes(b"")
    yield _try(
        "O_EXCL refuses a file that is there", lambda: _must_refuse(lambda: os.close(os.open(a, os.O_WRONLY | os.O_CREAT | os.O_EXCL)))
    )
    yield _try("link() works and refuses a name that is there", lambda: _link(a, b))
    yield _try("rename() replaces a file", lambda: _replace(folder))
    yield _try("fsync of a file and of a folder", lambda: _fsync(a, folder))


def probe_store(store: Path) -> None:
    """Make the store's folder where there is none, and try its promises. A full disk proves nothing.

    Raises StoreError: ``store_unavailable`` where it cannot be written, or does not keep a promise.
    """
    try:
        make_dirs(store.absolute())
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=store))
    except OSError as e:
        if e.errno in NO_SPACE:
            log.warning("event=store_not_probed store=%s reason=no_space", store)
            return
        raise StoreError(ErrorCode.STORE_UNAVAILABLE, f"the store {store} cannot be written: {e.strerror}") from e
    try:
        for promise in promises(folder):
            if promise.full:
                log.warning("event=store_not_probed store=%s reason=no_space", store)
                return
            if promise.broken:
                message = f"the store {store} does not keep a promise of the commit: {promise.text}: {promise.broken}"
                raise StoreError(ErrorCode.STORE_UNAVAILABLE, message, next_step=NEXT_STEP)
    except OSError as e:
        raise StoreError(ErrorCode.STORE_UNAVAILABLE, f"the store {store} cannot be written: {e.strerror}") from e
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _try(text: str, attempt: Callable[[], object]) -> Promise:
    try:
        attempt()
    except OSError as e:
        return Promise(text, e.strerror or str(e), full=e.errno in NO_SPACE)
    return Promise(text)


def _must_refuse(attempt: Callable[[], object]) -> None:
    try:
        attempt()
    except FileExistsError:
        return
    raise OSError(errno.EEXIST, "it takes a name that is there")


def _link(a: Path, b: Path) -> None:
    os.link(a, b)
    if not os.path.samefile(a, b):
        raise OSError(errno.EOPNOTSUPP, "it makes another file")
    _must_refuse(lambda: os.link(a, b))


def _replace(folder: Path) -> None:
    old, new = folder / "old", folder / "new"
    old.write_bytes(b"")
    new.write_bytes(b"")
    os.replace(new, old)


def _fsync(file: Path, folder: Path) -> None:
    fd = os.open(file, os.O_WRONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    fsync_dir(folder)
