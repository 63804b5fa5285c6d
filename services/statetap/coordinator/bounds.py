"""What bounds a job now: the verdict over what its workers' feeders waited for lately. Pure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable

from ..contracts.records import Bound, JobState, PauseReason

STALE_S = 10.0  # a worker tells it every two seconds
LEAST_SHARE = 0.1  # of the time: a feeder that waits less is bounded by nothing of these


def bound_of(values: Iterable[str], now: float) -> str:
    """The Bound that the workers waited for most, "" when they hardly wait or say nothing. ``now``: Unix time.

    ``values``: JSON as keys.bound has it.
    """
    sums: dict[Bound, float] = defaultdict(float)
    seconds = 0.0
    for value in values:
        try:
            told = json.loads(value)
            if now - float(told["at"]) > STALE_S:
                continue
            waits = {kind: max(float(told[kind.value]), 0.0) for kind in (Bound.PREFILL, Bound.D2H, Bound.TAP, Bound.COMMIT)}
            seconds += float(told["seconds"])
        except (ValueError, KeyError, TypeError):
            continue
        for kind, waited in waits.items():
            sums[kind] += waited
    if not sums or seconds <= 0:
        return ""
    worst = max(sums, key=lambda kind: sums[kind])
    return worst.value if sums[worst] >= LEAST_SHARE * seconds else ""


def verdict(state: str, reason: str, told: str) -> str:
    """What a job's status says: workers of a job that waits for an engine tell nothing."""
    if state == JobState.PAUSED:
        return Bound.NO_ENGINE.value if reason in (PauseReason.NO_ENGINE, PauseReason.ENGINE_DOWN) else ""
    return told if state == JobState.RUNNING else ""
