"""The coordinator and the engines that are registered with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime

import httpx

from ... import __version__
from ...client import ApiError, Client, Engine, UnreachableError
from ...contracts import PROTOCOL
from .finding import Finding, failed, fine, warned

SKEW_S = 5.0
TIMEOUT_S = 5.0


def findings(url: str | None) -> Iterator[Finding]:
    with Client(url, patience_s=0) as client:
        try:
            client.health()
        except UnreachableError as e:
            missing = failed if url else warned
            yield missing("coordinator", e.message, "Start one with `statetap up`, or give its --url.")
            return
        except ApiError as e:
            yield failed("coordinator", str(e), e.next_step)
            return
        yield fine("coordinator", f"answers at {client.url}")
        yield from _clock(client.url)
        try:
            client.ready()
            yield fine("coordinator", "ready: Redis answers and the store can be written")
        except ApiError as e:
            yield failed("coordinator", f"not ready: {e}", e.next_step)
        try:
            yield _same_version(client.service().version)
            found = client.engines()
        except ApiError as e:
            yield failed("coordinator", str(e), e.next_step)
            return
    if not found:
        yield warned("engines", "none is alive", "Start one: `statetap up --model …`; a job waits for it only with --wait-for-engine.")
    for engine in found:
        yield from _engine(engine)


def _same_version(theirs: str) -> Finding:
    text = f"version {theirs}, this one {__version__}"
    return fine("coordinator", text) if theirs == __version__ else warned("coordinator", text, "Use the same version on both sides.")


def _clock(url: str) -> Iterator[Finding]:
    """Against the Date header, which has whole seconds. Ages and leases are compared over hosts."""
    before = time.time()
    try:
        date = httpx.get(f"{url}/healthz", timeout=TIMEOUT_S, trust_env=False).headers.get("Date")
        theirs = parsedate_to_datetime(date).timestamp() if date else None
    except (httpx.HTTPError, ValueError) as e:
        yield warned("clock", f"not compared ({type(e).__name__})", "Look at the coordinator.")
        return
    if theirs is None:
        return
    skew = max(0.0, before - (theirs + 1), theirs - time.time())
    if skew > SKEW_S:
        yield failed("clock", f"differs from the coordinator's by {skew:.0f} s", "Synchronise the clocks (NTP).")
    else:
        yield fine("clock", "agrees with the coordinator's")


def _engine(engine: Engine) -> Iterator[Finding]:
    subject, profile = engine.engine_id, engine.profile
    text = f"profile {engine.profile_id} ({profile.get('model')}), {engine.workers} workers"
    if engine.healthy:
        yield fine(subject, f"healthy, {text}")
    else:
        yield failed(subject, f"does not answer its workers, {text}", "Look at the engine's log; `statetap up` starts it again by itself.")
    protocol = profile.get("protocol")
    if protocol == PROTOCOL:
        yield fine(subject, f"hand-shake: protocol {protocol} on both sides, SGLang {profile.get('sglang_version') or 'unknown'}")
    else:
        yield failed(
            subject,
            f"hand-shake: the engine speaks protocol {protocol}, we {PROTOCOL}",
            "Run worker and engine from the same Statetap version.",
        )
    check = engine.self_check
    if check.get("ok") is False:
        yield failed(
            subject,
            f"self-check: {'; '.join(map(str, check.get('problems', []))) or 'failed'}",
            "Do not use its states; report model and version.",
        )
    elif check.get("indistinct") or not check:
        what = "; ".join(map(str, check.get("indistinct", []))) or "no result was registered"
        yield warned(subject, f"self-check: {what}", "Compare some rows: `statetap parity`.")
    else:
        yield fine(subject, "; ".join(["self-check passed", *map(str, check.get("notes", []))]))
