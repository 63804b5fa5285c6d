"""What engines are alive: the records that workers register in Redis, merged, and the choice of a profile for a job.

Invariant: a record that does not parse is never taken for an engine, and never hides the others.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from ..contracts.errors import ErrorCode, RequestError, StatetapError
from ..contracts.profile import CaptureProfile
from ..contracts.records import EngineInfo

log = logging.getLogger(__name__)


def parse(values: Iterable[str | None]) -> list[EngineInfo]:
    """Registered records, one a worker, merged by engine and profile; sorted by engine id.

    Workers of one engine add up; the engine is healthy when one of them reaches it (another's probe may be seconds old).
    """
    merged: dict[tuple[str, str], EngineInfo] = {}
    for value in values:
        if value is None:  # its TTL ended between SCAN and MGET
            continue
        try:
            info = EngineInfo.from_dict(json.loads(value))
            key = info.engine_id, info.profile_id
        except (ValueError, TypeError, AttributeError) as e:
            log.warning("an engine record does not parse: %s", e)
            continue
        held = merged.get(key)
        merged[key] = info if held is None else _merge(held, info)
    return [merged[k] for k in sorted(merged)]


def _merge(a: EngineInfo, b: EngineInfo) -> EngineInfo:
    newer = a if a.registered_at >= b.registered_at else b
    ids = sorted({*a.worker_ids, *b.worker_ids})
    data = newer.to_dict() | {
        "worker_ids": ids,
        "workers": len(ids) or a.workers + b.workers,
        "healthy": a.healthy or b.healthy,
        "registered_at": min(a.registered_at, b.registered_at),
    }
    return EngineInfo.from_dict(data)


def workers_of(engines: Iterable[EngineInfo], profile_id: str) -> int:
    """Live workers of a profile."""
    return sum(len(e.worker_ids) or e.workers for e in engines if e.profile_id == profile_id)


def start_command(profile: dict[str, Any] | None, model: str = "", boundaries: Sequence[int] | None = None) -> str:
    """The command that starts an engine of this profile (or of this model), with these boundaries in place of its own."""
    parts = ["statetap up --model", str(profile["model"]) if profile else model or "<model>"]
    if boundaries or profile:
        parts += ["--boundaries", ",".join(map(str, boundaries or (profile or {})["boundaries"]))]
    if profile:
        parts += ["--final", str(profile["final"])]
        # Of a folder it is a fingerprint, which cannot be asked for.
        if (revision := str(profile.get("revision", ""))) not in ("", "main") and not str(profile["model"]).startswith(("/", ".")):
            parts += ["--", "--revision", revision]
    return " ".join(parts)


def choose(
    engines: list[EngineInfo],
    wanted: str | None,
    known: dict[str, Any] | None,
    model: str,
    *,
    wait: bool,
    boundaries: Sequence[int] | None = None,
) -> CaptureProfile:
    """The capture profile of a new job.

    ``wanted`` is the profile id asked for (None: the only live one that captures ``boundaries``); ``known`` that profile as an earlier job on the
    store has it; ``model`` is named in the start command when nothing else is known; ``boundaries``: those that the job keeps (None: all).

    Raises:
        RequestError: ``engine_mismatch`` with a start command when no live engine serves it (unless ``wait`` and it is known);
            ``invalid_request`` when several profiles are live and none was asked for, or a boundary is named twice.
    """
    if boundaries and len(set(boundaries)) < len(boundaries):
        raise RequestError(ErrorCode.INVALID_REQUEST, f"boundaries: {list(boundaries)} names one twice", field="boundaries")
    live = {e.profile_id: e.profile for e in engines}
    if wanted is None and boundaries and live:
        some = next(iter(live.values()))
        live = {i: p for i, p in live.items() if set(boundaries) <= set(p.get("boundaries") or ())}
        if not live:
            raise _not_captured(boundaries, some)
    if wanted is None:
        if len(live) > 1:
            listed = "; ".join(f"{i} ({p.get('model')}, boundaries {p.get('boundaries')})" for i, p in sorted(live.items()))
            raise RequestError(ErrorCode.INVALID_REQUEST, f"profile_id: several profiles are live, name one: {listed}", field="profile_id")
        if not live:
            command = start_command(None, model, boundaries)
            raise RequestError(ErrorCode.ENGINE_MISMATCH, f"no engine is alive; start one with: {command}", start_command=command)
        wanted = next(iter(live))
    profile = live.get(wanted) or (known if wait else None)
    if profile is None:
        command = start_command(known, model, boundaries)
        raise RequestError(
            ErrorCode.ENGINE_MISMATCH,
            f"no live engine has profile {wanted} (live: {', '.join(sorted(live)) or 'none'}); start one with: {command}",
            start_command=command,
        )
    try:
        found = CaptureProfile.from_dict(profile)
    except StatetapError as e:
        raise RequestError(
            ErrorCode.ENGINE_MISMATCH, f"the engine of profile {wanted} registered one that is not whole: {e.message}"
        ) from e
    if not set(boundaries or ()) <= set(found.boundaries):
        raise _not_captured(boundaries or (), profile)
    return found


def _not_captured(boundaries: Sequence[int], profile: dict[str, Any]) -> RequestError:
    missing = sorted(set(boundaries) - set(profile["boundaries"]))
    command = start_command(profile, "", boundaries)
    return RequestError(
        ErrorCode.ENGINE_MISMATCH,
        f"boundaries: {missing} are not captured by the engine of {profile.get('model')} ({profile['boundaries']} are); start one with: {command}",
        start_command=command,
        field="boundaries",
    )


def only_model(engines: list[EngineInfo]) -> str:
    """The model of the only live profile, else ""."""
    profiles = {e.profile_id: str(e.profile.get("model", "")) for e in engines}
    return next(iter(profiles.values())) if len(profiles) == 1 else ""
