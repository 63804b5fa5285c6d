"""The file of API keys: a line a key, ``name scope sha256hex``; empty lines and lines that begin with # are left alone.

Invariant: a key itself is never written: only its SHA-256. One fast hash is right here, and a slow one (bcrypt, argon2) would add
nothing: a key is 256 random bits, which nobody searches, while slow hashes are there to protect words that people choose.
No package is imported, because the command line uses it too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ..contracts.errors import ErrorCode, RequestError
from ..store.fs import fsync_dir, write_all

log = logging.getLogger(__name__)

PREFIX = "st_"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Scope(IntEnum):
    """What a key may do; each includes the ones before it."""

    READ = 1
    WRITE = 2
    ADMIN = 3

    @property
    def label(self) -> str:
        return self.name.lower()


SCOPES = tuple(s.label for s in Scope)


@dataclass(frozen=True, kw_only=True)
class Key:
    """``digest`` is the SHA-256 of the key in hex."""

    name: str
    scope: Scope
    digest: str


def new_key() -> str:
    """``st_`` and 43 URL-safe characters: 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def find(keys: tuple[Key, ...], given: str) -> Key | None:
    """The key that ``given`` is. All are compared, each in constant time, so that the time says nothing about any of them."""
    wanted, found = digest(given).encode(), None
    for key in keys:
        if hmac.compare_digest(key.digest.encode(), wanted):
            found = key
    return found


def parse(text: str) -> tuple[list[Key], list[str]]:
    """The keys of a file, and what is wrong with its other lines ("line 3: …"; what stands there is not repeated)."""
    keys: dict[str, Key] = {}
    wrong: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        fault = _fault(parts, keys)
        if fault:
            wrong.append(f"line {number}: {fault}")
        else:
            name, scope, sha256 = parts
            keys[name] = Key(name=name, scope=Scope[scope.upper()], digest=sha256)
    return list(keys.values()), wrong


def _fault(parts: list[str], before: dict[str, Key]) -> str | None:
    if len(parts) != 3:
        return f"{len(parts)} words where `name scope sha256` is wanted"
    name, scope, sha256 = parts
    if not _NAME.fullmatch(name):
        return "the name is not 1 to 64 of A-Z a-z 0-9 . _ -"
    if name in before:
        return f"the name {name!r} is there twice"
    if scope not in SCOPES:
        return f"the scope of {name!r} is none of {', '.join(SCOPES)}"
    if sha256.startswith(PREFIX):
        return f"{name!r} has the key itself where its SHA-256 is wanted: revoke that key, it is no secret any more"
    if not _DIGEST.fullmatch(sha256):
        return f"{name!r} has no SHA-256 (64 digits of 0-9 a-f)"
    return None


class KeyFile:
    """The keys as the file has them now: it is read again when it changed, so that a key is revoked without a restart."""

    def __init__(self, path: Path) -> None:
        """Raises RequestError ``invalid_request`` that names the line, where the file cannot be read or does not parse."""
        self.path = path
        self._version: tuple[int, int, int] | None = None
        self.keys: tuple[Key, ...] = ()
        try:
            found = path.stat()
            keys, wrong = parse(path.read_text())
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else "not UTF-8"
            message = f"STATETAP_KEYS_FILE: {path}: {why}; `statetap keys add NAME --file {path}` makes it"
            raise RequestError(ErrorCode.INVALID_REQUEST, message) from e
        if wrong:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"STATETAP_KEYS_FILE: {path}: {'; '.join(wrong)}")
        if found.st_mode & (stat.S_IROTH | stat.S_IWOTH):
            log.warning("%s can be read or written by everybody on this host: chmod o= %s", path, path)
        if not keys:
            log.warning("%s holds no key: every request is refused until `statetap keys add` makes one", path)
        self._version, self.keys = _version(found), tuple(keys)

    def refresh(self) -> None:
        """Look at the file again. A line that does not parse is left out and logged; without the file there are no keys. So what
        was revoked is gone, whatever else is wrong."""
        try:
            found = self.path.stat()
            if _version(found) == self._version:
                return
            keys, wrong = parse(self.path.read_text(errors="replace"))
        except OSError as e:
            if self._version is not None:
                log.error("%s: %s: every request is refused until it is there again", self.path, e.strerror)
            self._version, self.keys = None, ()
            return
        for fault in wrong:
            log.error("%s: %s: left out", self.path, fault)
        log.info("%s was read again: %d keys", self.path, len(keys))
        self._version, self.keys = _version(found), tuple(keys)


def _version(found: os.stat_result) -> tuple[int, int, int]:
    # The inode too: two changes can fall within one tick of the file system's clock.
    return found.st_mtime_ns, found.st_ino, found.st_size


def read_keys(path: Path) -> list[Key]:
    """The keys of a file that is there. Raises RequestError as :class:`KeyFile` does."""
    return list(KeyFile(path).keys)


def add_key(path: Path, name: str, scope: Scope) -> str:
    """Make a key and append its hash; the key, which nobody can have again.

    Raises:
        RequestError: ``invalid_request`` for a name that cannot be one or a file that does not parse, ``conflict`` for one that is taken.
    """
    if not _NAME.fullmatch(name):
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{name!r} is not 1 to 64 of A-Z a-z 0-9 . _ -", field="name")
    key = new_key()

    def append(text: str) -> str:
        if any(k.name == name for k in _parsed(path, text)):
            raise RequestError(ErrorCode.CONFLICT, f"{path} has a key {name!r} already; revoke it first, or choose another name")
        end = "" if not text or text.endswith("\n") else "\n"
        return f"{text}{end}{name} {scope.label} {digest(key)}\n"

    _edit(path, append)
    return key


def revoke_key(path: Path, name: str) -> None:
    """Remove the line of this key. Raises RequestError ``not_found``, ``invalid_request``."""

    def without(text: str) -> str:
        if not any(k.name == name for k in _parsed(path, text)):
            raise RequestError(ErrorCode.NOT_FOUND, f"{path} has no key {name!r}")
        return "".join(line for line in text.splitlines(keepends=True) if line.split()[:1] != [name])

    _edit(path, without)


def _parsed(path: Path, text: str) -> list[Key]:
    keys, wrong = parse(text)
    if wrong:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{path}: {'; '.join(wrong)}")
    return keys


def _edit(path: Path, change: Callable[[str], str]) -> None:
    """Replace the file as a whole, 0600 when it is new, under a lock: two commands at once lose nothing."""
    path = path.resolve()  # a link is followed, not replaced
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            try:
                before, found = path.read_text(), path.stat()
            except FileNotFoundError:
                before, found = "", None
            data = change(before).encode()
            tmp = path.with_name(f".tmp-{secrets.token_hex(8)}-{path.name}")
            fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                if found is not None:
                    os.fchmod(fd, stat.S_IMODE(found.st_mode) & 0o770)
                    with contextlib.suppress(PermissionError):  # made as root for a service of another user: it stays that user's
                        os.fchown(fd, found.st_uid, found.st_gid)
                write_all(fd, data)
                os.fsync(fd)
                os.replace(tmp, path)
            except BaseException:
                os.unlink(tmp)
                raise
            finally:
                os.close(fd)
            fsync_dir(path.parent)
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "not UTF-8"
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{path}: {why}") from e


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
