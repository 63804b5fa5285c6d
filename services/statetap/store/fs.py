"""Durable file operations. Invariant: a file under its final name is whole and on disk; anything else has a temp name.

The order is always write, fsync, link or rename, fsync of the folder (ALICE, OSDI'14, shows what goes wrong otherwise).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from pathlib import Path
from typing import Any

from ..contracts.errors import ErrorCode, StoreError
from ..contracts.layout import temp

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def store_error(e: OSError, doing: str) -> StoreError:
    """The right code for an OSError of the store: ``store_full`` or ``store_io``."""
    code = ErrorCode.STORE_FULL if e.errno in NO_SPACE else ErrorCode.STORE_IO
    return StoreError(code, f"{doing}: {e.strerror or e} ({e.filename or 'no file named'})")


def fsync_dir(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_dirs(path: Path) -> None:
    """``mkdir -p`` that is durable: the parent of every folder it makes is fsynced."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync_dir(folder.parent)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """os.write until all is written (a short write is not an error of the kernel, but would be one of ours)."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def _write_temp(path: Path, data: bytes) -> Path:
    tmp = Path(temp(str(path), secrets.token_hex(8)))
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, data)
        os.fsync(fd)
    except BaseException:
        os.unlink(tmp)
        raise
    finally:
        os.close(fd)
    return tmp


def replace_file(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path``, whatever is there; a reader sees the old file or the new one. Raises StoreError."""
    try:
        os.replace(_write_temp(path, data), path)
        fsync_dir(path.parent)
    except OSError as e:
        raise store_error(e, f"write {path.name}") from e


def create_file(path: Path, data: bytes) -> bool:
    """Put ``data`` at ``path`` unless a file is there: True when ours is the one. Raises StoreError."""
    try:
        tmp = _write_temp(path, data)
        try:
            os.link(tmp, path)
        except FileExistsError:
            return False
        finally:
            os.unlink(tmp)
            fsync_dir(path.parent)
        return True
    except OSError as e:
        raise store_error(e, f"create {path.name}") from e


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in ``path``, or None where there is no file. Raises StoreError (``store_io``) for one that does not parse."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as e:
        raise StoreError(ErrorCode.STORE_IO, f"{path} does not parse: {e}") from e
    except OSError as e:
        raise store_error(e, f"read {path.name}") from e
    if not isinstance(data, dict):
        raise StoreError(ErrorCode.STORE_IO, f"{path} is not a JSON object")
    return data


def to_json(data: dict[str, Any]) -> bytes:
    return json.dumps(data, indent=1, sort_keys=True).encode() + b"\n"


def free_bytes(path: Path) -> int:
    """Bytes that a process without privileges can still write at ``path``."""
    s = os.statvfs(path)
    return s.f_bavail * s.f_frsize


def remove(path: str | Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
