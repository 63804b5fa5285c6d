"""Which state a job is in, from what is seen at one look. Pure.

Invariant: a job that is not moving says why; every reason but a person's ends by itself when its cause is gone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..contracts.errors import ErrorCode
from ..contracts.records import Control, JobState, PauseReason


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one look at store and Redis says of a job that has not ended."""

    control: str
    standing: tuple[str, str] = ("", "")  # (reason, message) of a pause that stands until a person ends it
    started: bool  # a batch has a lease or totals, or the job ran before
    engines: int  # live engines of its profile
    healthy: int  # of them that answer
    free_bytes: int
    min_free_bytes: int
    start_command: str = ""
    worker_pause: tuple[str, str] | None = None  # (reason, message) that a horse left
    trouble: tuple[str, str] | None = None  # (code, message): the coordinator's own last step failed
    unread: tuple[int, int] | None = None  # (bytes that wait to be read, bytes that may), when the next batch has no room
    circuit: str = ""  # message while the circuit is open


@dataclass(frozen=True, kw_only=True)
class Pause:
    """What a horse left in keys.pause. ``stands``: it does not end by itself."""

    reason: str
    message: str
    stands: bool = False


def parse_pause(value: str | None) -> Pause | None:
    """One that does not parse still pauses the job."""
    if value is None:
        return None
    try:
        data = json.loads(value)
        return Pause(reason=PauseReason(data["reason"]).value, message=str(data.get("message", "")), stands=bool(data.get("code")))
    except (ValueError, KeyError, TypeError):
        return Pause(reason=PauseReason.ENGINE_DOWN.value, message=f"a worker paused the job: {value[:200]}")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    state: str
    reason: str = ""
    message: str = ""
    stands: bool = False  # until a person ends it

    @property
    def feeds(self) -> bool:
        return self.state in (JobState.QUEUED, JobState.RUNNING)

    @property
    def control(self) -> Control:
        """What horses have to read: they drain at low disk, and when rows fail one after another, as if a person had paused the job."""
        paused = self.state == JobState.PAUSED and (self.stands or self.reason in _DRAINED)
        return Control.PAUSE if paused else Control.RUN


_DRAINED = (PauseReason.USER, PauseReason.LOW_DISK)


def judge(seen: Seen) -> Verdict:
    """The state of a job that has not ended and is not to be cancelled. The first cause that applies is named."""
    if seen.control == Control.PAUSE:
        if seen.standing[0] == PauseReason.CIRCUIT_OPEN:
            return Verdict(state=JobState.PAUSED, reason=seen.standing[0], message=seen.standing[1], stands=True)
        return _paused(PauseReason.USER, "paused on request; resume it to go on")
    if seen.trouble is not None:
        code, message = seen.trouble
        return _paused(PauseReason.LOW_DISK if code == ErrorCode.STORE_FULL else code, message)
    if seen.free_bytes < seen.min_free_bytes:
        return _paused(
            PauseReason.LOW_DISK,
            f"the store has {seen.free_bytes:,} bytes free and keeps {seen.min_free_bytes:,}; it goes on when there is more",
        )
    if seen.unread is not None:
        return _paused(
            PauseReason.STORE_FULL,
            f"{seen.unread[0]:,} bytes wait to be read, and {seen.unread[1]:,} may; it goes on when rows are acknowledged",
        )
    if seen.engines == 0:
        return _paused(PauseReason.NO_ENGINE, f"no live engine has the job's profile; start one with: {seen.start_command}")
    if seen.worker_pause is not None:
        return _paused(*seen.worker_pause)
    if seen.healthy == 0:
        return _paused(PauseReason.ENGINE_DOWN, "no engine of the job's profile answers; it goes on when one does")
    if seen.circuit:
        return _paused(PauseReason.CIRCUIT_OPEN, seen.circuit)
    return Verdict(state=JobState.RUNNING if seen.started else JobState.QUEUED)


def _paused(reason: str, message: str) -> Verdict:
    return Verdict(state=JobState.PAUSED, reason=str(reason), message=message)
