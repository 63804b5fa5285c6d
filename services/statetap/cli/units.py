"""Sizes, durations and counts as people write and read them. Pure."""

from __future__ import annotations

import re

_SIZES = {
    "": 1,
    "b": 1,
    **{f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgtp")},
    **{f"{p}ib": 1024 ** (i + 1) for i, p in enumerate("kmgtp")},
}
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.I)


def size(n: float) -> str:
    """Bytes in decimal units, as disks are sold."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError


def duration(seconds: float | None) -> str:
    """``1:02:03``, or "unknown"."""
    if seconds is None:
        return "unknown"
    m, s = divmod(round(seconds), 60)
    h, m = divmod(m, 60)
    return f"{h}:{m:02d}:{s:02d}" if h else f"{m}:{s:02d}"


def parse_size(text: str) -> int:
    """``2TB``, ``1.5 GiB``, ``4096`` -> bytes. Raises ValueError."""
    return int(_parse(text, _SIZES, "a size such as 500GB, 2TB or 64GiB"))


def parse_duration(text: str) -> float:
    """``7d``, ``12h``, ``90`` -> seconds. Raises ValueError."""
    return _parse(text, _SECONDS, "a duration such as 45s, 30m, 12h or 7d")


def _parse(text: str, units: dict[str, int] | dict[str, float], what: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{text!r} is not {what}")
    return float(match[1]) * units[match[2].lower()]


def counts(of: dict[str, int]) -> str:
    """``{"bad_row": 2}`` -> ``bad_row 2``, the most frequent first."""
    return ", ".join(f"{name} {n:,}" for name, n in sorted(of.items(), key=lambda item: (-item[1], item[0])))
