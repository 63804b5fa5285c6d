"""What a worker knows of the engine beside it, from READY.json in the tap; made once by the parent and inherited by the horses."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..contracts import PROTOCOL
from ..contracts.capture import READY_FILE
from ..contracts.errors import EngineError, ErrorCode, StatetapError
from ..contracts.profile import CaptureProfile
from ..contracts.records import EngineStart
from .settings import WorkerSettings

log = logging.getLogger(__name__)

TAP_SHARE = 0.8  # of the tap's free space: the rest is for the engine's own temps and what is being swept


@dataclass(frozen=True, kw_only=True)
class Ready:
    """READY.json."""

    profile: CaptureProfile
    engine_id: str
    boot_id: str = ""
    self_check: dict[str, Any] = field(default_factory=dict)

    @property
    def start(self) -> EngineStart:
        p = self.profile
        return EngineStart(boot_id=self.boot_id, engine_id=self.engine_id, sglang_version=p.sglang_version, plugin_version=p.plugin_version)


def read_ready(tap: Path) -> Ready | None:
    """The engine's READY.json, or None where there is none (yet).

    Raises:
        EngineError: ``protocol_mismatch`` when the engine speaks another protocol or the file is not one that this version reads.
    """
    try:
        data = json.loads((tap / READY_FILE).read_bytes())
        profile = CaptureProfile.from_dict(data["profile"])
        engine_id = str(data["engine_id"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, StatetapError) as e:
        raise EngineError(ErrorCode.PROTOCOL_MISMATCH, f"{READY_FILE} in the tap is not of this version: {e}") from e
    if profile.protocol != PROTOCOL:
        raise EngineError(ErrorCode.PROTOCOL_MISMATCH, f"the engine speaks protocol {profile.protocol}, this worker {PROTOCOL}")
    check = data.get("self_check")
    return Ready(
        profile=profile,
        engine_id=engine_id,
        boot_id=str(data.get("boot_id", "")),
        self_check=check if isinstance(check, dict) else {"result": check},
    )


class EngineNow:
    """Which start of the engine captures now: it can be another one, of other versions, from one group of rows to the next."""

    def __init__(self, tap: Path, ready: Ready) -> None:
        self._tap = tap
        self._last = ready.start
        self._seen: tuple[int, int] | None = None

    def __call__(self) -> EngineStart:
        """While there is no READY.json: the last one."""
        with contextlib.suppress(OSError, EngineError):
            s = os.stat(self._tap / READY_FILE)
            if self._seen != (seen := (s.st_ino, s.st_mtime_ns)) and (ready := read_ready(self._tap)) is not None:
                self._seen, self._last = seen, ready.start
        return self._last


def wait_for_ready(settings: WorkerSettings, stop: threading.Event) -> Ready | None:
    """Wait for READY.json, and say so now and then; None when ``stop`` was set.

    Raises:
        EngineError: ``engine_start_failed`` after ``ready_timeout_s``, or ``protocol_mismatch``.
    """
    started = time.monotonic()
    said = 0.0
    while not stop.is_set():
        if (ready := read_ready(settings.tap)) is not None:
            return ready
        waited = time.monotonic() - started
        if waited > settings.ready_timeout_s:
            raise EngineError(ErrorCode.ENGINE_START_FAILED, f"no {READY_FILE} in {settings.tap} after {settings.ready_timeout_s:.0f} s")
        if waited >= said:
            log.info("event=waiting_for_engine tap=%s waited_s=%.0f", settings.tap, waited)
            said = max(10.0, said * 2)
        stop.wait(0.2)
    return None


@dataclass(frozen=True, kw_only=True)
class Context:
    """``tap_share``: bytes of the tap that one worker may have reserved at a time."""

    settings: WorkerSettings
    ready: Ready
    worker_id: str
    tap_total: int
    tap_share: int


def make_context(settings: WorkerSettings, ready: Ready, worker_id: str) -> Context:
    total = settings.tap_bytes
    if not total:
        s = os.statvfs(settings.tap)
        total = int(s.f_bavail * s.f_frsize * TAP_SHARE)
    return Context(settings=settings, ready=ready, worker_id=worker_id, tap_total=total, tap_share=total // settings.workers_per_engine)


_current: Context | None = None


def set_current(context: Context) -> None:
    """Called by the parent before it forks horses."""
    global _current
    _current = context


def current() -> Context:
    if _current is None:
        raise EngineError(ErrorCode.INTERNAL, "a batch task ran outside a Statetap worker")
    return _current
