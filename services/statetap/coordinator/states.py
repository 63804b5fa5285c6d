"""Which state a job is in, from what is seen at one look. Pure.

Invariant: a job that is not moving says why; every reason but a person's ends by itself when its cause is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..contracts.errors import ErrorCode
from ..contracts.records import Control, JobState, PauseReason


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one look at store and Redis says of a job that has not ended."""

    control: str
    started: bool  # a batch has a lease or totals, or the job ran before
    engines: int  # live engines of its profile
    healthy: int  # of them that answer
    free_bytes: int
    min_free_bytes: int
    start_command: str = ""
    worker_pause: tuple[str, str] | None = None  # (reason, message) that a horse left
    trouble: tuple[str, str] | None = None  # (code, message): the coordinator's own last step failed
    circuit: str = ""  # message while the circuit is open


@dataclass(frozen=True, kw_only=True)
class Verdict:
    state: str
    reason: str = ""
    message: str = ""

    @property
    def feeds(self) -> bool:
        return self.state in (JobState.QUEUED, JobState.RUNNING)

    @property
    def control(self) -> Control:
        """What horses have to read: they drain at low disk as if a person had paused the job."""
        paused = self.state == JobState.PAUSED and self.reason in (PauseReason.USER, PauseReason.LOW_DISK)
        return Control.PAUSE if paused else Control.RUN


def judge(seen: Seen) -> Verdict:
    """The state of a job that has not ended and is not to be cancelled. The first cause that applies is named."""
    if seen.control == Control.PAUSE:
        return _paused(PauseReason.USER, "paused on request; resume it to go on")
    if seen.trouble is not None:
        code, message = seen.trouble
        return _paused(PauseReason.LOW_DISK if code == ErrorCode.STORE_FULL else code, message)
    if seen.free_bytes < seen.min_free_bytes:
        return _paused(
            PauseReason.LOW_DISK,
            f"the store has {seen.free_bytes:,} bytes free and keeps {seen.min_free_bytes:,}; it goes on when there is more",
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
