"""Who may do what: one decision for every request, before any route sees it.

Invariant: everything is closed unless :data:`OPEN` names it; a new route needs nothing to be closed. Reads take a ``read`` key, changes
``write``, the operations of :data:`ADMIN` ``admin``; what an operation asks for beyond that (``force``, a tokenizer's own code), it
asks of the :class:`Caller`.

A key comes as ``Authorization: Bearer st_…``; the page's session as a cookie (sessions.py), which a browser sends by itself: so what
changes something by cookie must come from our own origin. Without a keys file there is no key to ask for. That is accepted on
loopback only, where the other danger is a web page in a browser on this host: the Host header must be a loopback name (or a page
whose DNS name is rebound to 127.0.0.1 could read all) and changes from other origins are refused. The same-origin rule is that of Go's
CrossOriginProtection: Sec-Fetch-Site, else Origin against Host; a client that sends neither is no browser.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio.to_thread
from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from ..contracts.errors import ErrorCode, RequestError, StatetapError
from . import keyfile, page_files
from .keyfile import Key, KeyFile
from .problems import problem
from .sessions import COOKIE, Sessions
from .settings import CoordinatorSettings

log = logging.getLogger(__name__)

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
METRICS = "/metrics"
OPEN = frozenset((("GET", "/healthz"), ("GET", "/readyz"), ("POST", "/v1/session"), ("DELETE", "/v1/session"), ("GET", "/"))) | {
    ("GET", path) for path in page_files.PATHS
}
"""What needs no key: probes, the login, which checks one itself, and the page, which holds nothing but what it asks the API for."""
ADMIN = frozenset({"/v1/gc"})

LOOK_S = 1.0  # between two looks at the keys file: so long a revoked key may still pass
BURST, EVERY_S = 10, 2.0  # wrong keys of one client at once, and then one each
CLIENTS = 4096  # clients whose wrong keys are counted; the one seen longest ago is forgotten


def scope_of(method: str, path: str) -> keyfile.Scope | None:
    """What an operation asks for; None: nothing."""
    if (method, path) in OPEN:
        return None
    if path in ADMIN:
        return keyfile.Scope.ADMIN
    return keyfile.Scope.READ if method in _SAFE else keyfile.Scope.WRITE


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who asks. ``name`` is the key's; "" where there are no keys: then anybody who reaches us may do what we do, but nobody
    is trusted with this host (other folders, other people's code)."""

    name: str
    scope: keyfile.Scope
    session_ends: float | None = None

    def require(self, scope: keyfile.Scope, what: str) -> None:
        """Raises RequestError ``forbidden``; ``what`` names the field or operation."""
        if self.scope < scope:
            raise RequestError(ErrorCode.FORBIDDEN, f"{what}: needs a key with scope {scope.label}, {self.name!r} has {self.scope.label}")

    @property
    def trusted(self) -> bool:
        """Whether an admin's key was shown."""
        return bool(self.name) and self.scope >= keyfile.Scope.ADMIN


_NOBODY = Caller(name="", scope=keyfile.Scope.ADMIN)


class Guard:
    """The decision, and what it needs: the keys, the sessions, who guessed how often. Belongs to the event loop."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        """Raises RequestError ``invalid_request`` when the settings would leave the API open to a network, or the keys do not parse."""
        self._settings = settings
        self._keys = KeyFile(settings.keys_file) if settings.keys_file is not None else None
        self._sessions: Sessions | None = None
        self._looked = time.monotonic()
        self._wrong = WrongKeys()
        # Behind a proxy on this host the Host header is the proxy's: who closes the network by other means says so.
        self._loopback_only = self._keys is None and not settings.allow_no_auth
        if self._keys is not None:
            return
        address, name = (settings.published, "STATETAP_PUBLISHED") if settings.published else (settings.host, "STATETAP_HOST")
        if self._loopback_only and not is_loopback(address):
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                f"{name}: {address} is not loopback and there are no keys: everybody who reaches it could do everything. "
                "Make one with `statetap keys add NAME --file FILE` and set STATETAP_KEYS_FILE=FILE, or set STATETAP_ALLOW_NO_AUTH=true "
                "where the network is closed by other means",
            )
        if settings.allow_no_auth:
            log.warning("no authentication (STATETAP_ALLOW_NO_AUTH): everybody who reaches %s may do everything", address)

    def start(self, store: Path) -> None:
        """Read or make the secret of the sessions. Raises StoreError."""
        if self._keys is not None:
            self._sessions = Sessions.of_store(store, self._settings.session_s)

    async def admit(self, connection: HTTPConnection) -> Caller | None:
        """Who asks, None on an open path. Raises RequestError ``unauthorized``, ``forbidden``, ``rate_limited``."""
        method, path, headers = connection.scope["method"], connection.scope["path"], connection.headers
        # The Host header tells a page of another site that a browser was led to from a caller of this host; /metrics holds nothing for it.
        metrics = path == METRICS and method in _SAFE and self._settings.metrics_open
        if self._loopback_only and not metrics and not is_loopback(host_name(headers.get("host", ""))):
            raise RequestError(
                ErrorCode.FORBIDDEN, "the Host header is no loopback name: without keys only this host is served (see STATETAP_KEYS_FILE)"
            )
        needed = scope_of(method, path)
        if metrics:
            needed = None
        if self._keys is None or needed is None:
            if method not in _SAFE:
                _same_origin(headers)
            return _NOBODY if self._keys is None else None
        if (bearer := headers.get("authorization")) is not None:
            kind, _, given = bearer.partition(" ")
            if kind.lower() != "bearer":
                raise RequestError(ErrorCode.UNAUTHORIZED, "Authorization: only Bearer is known here")
            caller = _caller(await self.key(connection, given.strip()))
        else:
            caller = await self._by_cookie(connection)
            if method not in _SAFE:
                _same_origin(headers)
        caller.require(needed, f"{method} {path}")
        return caller

    async def still_admits(self, connection: HTTPConnection) -> bool:
        """Whether an answer without an end may go on: its key was not revoked, its session has not ended."""
        try:
            await self.admit(connection)
        except RequestError:
            return False
        return True

    async def key(self, connection: HTTPConnection, given: str) -> Key:
        """The key that this is. Raises RequestError ``unauthorized``; ``rate_limited`` after too many wrong ones."""
        found = keyfile.find(await self._now(), given)
        if found is None:
            client = connection.client.host if connection.client else ""
            if (wait := self._wrong.count(client)) > 0:
                raise RequestError(ErrorCode.RATE_LIMITED, f"too many wrong keys from here; try again in {wait:.0f} s", retry_after_s=wait)
            raise RequestError(ErrorCode.UNAUTHORIZED, "this key is not known, or was revoked")
        return found

    async def login(self, connection: HTTPConnection, given: str) -> tuple[Key, str, float]:
        """(the key, a session's token, when it ends). Raises as :meth:`key`, and ``conflict`` where there are no keys."""
        if self._keys is None or self._sessions is None:
            raise RequestError(ErrorCode.CONFLICT, "this coordinator has no keys (STATETAP_KEYS_FILE): nobody has to log in")
        key = await self.key(connection, given)
        return key, *self._sessions.issue(key)

    async def _by_cookie(self, connection: HTTPConnection) -> Caller:
        token = connection.cookies.get(COOKIE)
        if token is None:
            raise RequestError(ErrorCode.UNAUTHORIZED, "no key was sent")
        found = self._sessions.check(token, await self._now()) if self._sessions is not None else None
        if found is None:
            raise RequestError(ErrorCode.UNAUTHORIZED, "the session has ended; log in again")
        return _caller(*found)

    async def _now(self) -> tuple[Key, ...]:
        """The keys, at most LOOK_S old."""
        assert self._keys is not None
        if time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            await anyio.to_thread.run_sync(self._keys.refresh)
        return self._keys.keys


class WrongKeys:
    """A token bucket a client. Right keys are never held up, so that one client cannot lock out another behind the same address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._clients: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client -> (tokens, at)

    def count(self, client: str) -> float:
        """One wrong key more: the seconds to wait, 0 when it may be answered."""
        now = self._clock()
        tokens, at = self._clients.pop(client, (float(BURST), now))
        tokens = min(BURST, tokens + (now - at) / EVERY_S)
        wait = 0.0 if tokens >= 1 else (1 - tokens) * EVERY_S
        self._clients[client] = (tokens - 1 if tokens >= 1 else tokens), now
        if len(self._clients) > CLIENTS:
            self._clients.popitem(last=False)
        return wait


class AuthMiddleware:
    """Pure ASGI: it sees every request first, the ones that no route takes included."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope["statetap.caller"] = await self._guard.admit(HTTPConnection(scope))
            except StatetapError as e:
                await problem(e.code, e.message, **e.detail)(scope, receive, send)
                return
        elif scope["type"] != "lifespan":  # there are no websockets; should there be, they are closed until somebody decides
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this host to itself. Other names are not looked up: DNS is not ours."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """``127.0.0.1:8700`` -> ``127.0.0.1``; ``[::1]:8700`` -> ``::1``."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _same_origin(headers: Headers) -> None:
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        ours = site in ("same-origin", "none")
    else:  # an Origin is scheme://host, or null
        ours = origin is None or origin.lower().partition("://")[2] == headers.get("host", "").lower()
    if not ours:
        raise RequestError(ErrorCode.FORBIDDEN, "the request comes from a page of another origin")


def _caller(key: Key, session_ends: float | None = None) -> Caller:
    return Caller(name=key.name, scope=key.scope, session_ends=session_ends)


def _asking(request: Request) -> Caller:
    caller: Caller = request.scope["statetap.caller"]
    return caller


Asking = Annotated[Caller, Depends(_asking)]
"""An operation's parameter: who asks."""


def _still(request: Request) -> Callable[[], Awaitable[bool]]:
    guard: Guard = request.app.state.guard
    return partial(guard.still_admits, request)


StillAdmitted = Annotated[Callable[[], Awaitable[bool]], Depends(_still)]
"""An operation's parameter: whether who asks may still hear its answer."""
