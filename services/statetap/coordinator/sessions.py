"""The page's sessions: a signed token in a cookie that stands for a key.

Invariant: a token is worth what its key is worth now. The signature covers the key's hash, and name and hash are looked up in the
keys at each request, so that a token ends with its key, or when the key's scope changes takes the new one. Nothing is kept on the
server but one secret, which all coordinators of a store share. It is HMAC-SHA256 over three fields; a library would add a dependency
to the image and nothing to that.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import time
from pathlib import Path

from ..contracts.errors import ErrorCode, StoreError
from ..store.fs import fsync_dir, store_error, write_all
from .keyfile import Key

COOKIE = "statetap_session"
SECRET = ".session-secret"  # on the store, 0600: removing it ends all sessions
_BYTES = 32


class Sessions:
    """``lifetime_s``: seconds after which a token ends."""

    def __init__(self, secret: bytes, lifetime_s: float) -> None:
        self._secret = secret
        self.lifetime_s = lifetime_s

    @classmethod
    def of_store(cls, store: Path, lifetime_s: float) -> Sessions:
        """With the store's secret, which is made where there is none. Raises StoreError."""
        return cls(_secret(store / SECRET), lifetime_s)

    def issue(self, key: Key) -> tuple[str, float]:
        """(token, Unix time at which it ends)."""
        ends = int(time.time() + self.lifetime_s)
        return f"{key.name}:{ends}:{self._sign(key, ends)}", float(ends)

    def check(self, token: str, keys: tuple[Key, ...]) -> tuple[Key, float] | None:
        """The key that a token stands for and when it ends; None when it is not ours, has ended, or its key is gone."""
        name, _, rest = token.partition(":")
        number, _, signature = rest.partition(":")
        key = next((k for k in keys if k.name == name), None)
        if key is None or not (number.isascii() and number.isdigit() and len(number) < 16):
            return None
        ends = int(number)
        if not hmac.compare_digest(self._sign(key, ends).encode(), signature.encode("utf-8", "surrogatepass")) or ends <= time.time():
            return None
        return key, float(ends)

    def _sign(self, key: Key, ends: int) -> str:
        return hmac.new(self._secret, f"session:{key.name}:{ends}:{key.digest}".encode(), hashlib.sha256).hexdigest()


def _secret(path: Path) -> bytes:
    """Read the secret; the first one to make it wins."""
    try:
        if not path.exists():
            tmp = path.with_name(f".tmp-{secrets.token_hex(8)}-{path.name}")
            fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                write_all(fd, secrets.token_hex(_BYTES).encode())
                os.fsync(fd)
                with contextlib.suppress(FileExistsError):
                    os.link(tmp, path)
            finally:
                os.close(fd)
                os.unlink(tmp)
            fsync_dir(path.parent)
        secret = path.read_bytes()
    except OSError as e:
        raise store_error(e, "keep the secret of the page's sessions") from e
    if len(secret) != 2 * _BYTES:
        raise StoreError(ErrorCode.STORE_IO, f"{path} is not a secret of sessions; remove it, and one is made (all sessions end then)")
    return secret
