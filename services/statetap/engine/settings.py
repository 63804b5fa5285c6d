"""What the launcher tells the plugin, through the environment, so that every process that SGLang spawns has it.

Stdlib only: this is imported inside SGLang's own processes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..contracts.errors import EngineError, ErrorCode

PREFIX = "STATETAP_ENGINE_"

_PARSERS: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float, "bool": lambda v: v == "1"}


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """One field, one variable ``STATETAP_ENGINE_<FIELD>``. ``tap`` unset means: not our engine, capture nothing."""

    tap: str = ""
    """Tap folder, shared with the workers (tmpfs)."""
    boundaries: str = "default"
    """Comma-separated boundaries, or ``default`` = [2, L//2, L-3]."""
    final: str = "pre"
    """Final state to capture: pre, post, both or none."""
    model: str = ""
    """Name of the model in the capture profile (its path or hub id)."""
    engine_id: str = ""
    """Name of this engine; stays the same over restarts."""
    boot_id: str = ""
    """Different at every start."""
    notify: str = ""
    """Abstract Unix socket by which the writer tells the HTTP process what became of a request."""
    deadline_s: float = 60.0
    """Longest wait of a reply for its tap file after the prefill has ended."""
    ring_bytes: int = 4 << 30
    """Captured bytes that may wait for the writer; beyond it a request fails with capture_backpressure."""
    url: str = ""
    """Where this engine's HTTP service is, for the probe."""
    start_timeout_s: float = 3600.0
    """Seconds from the start until the probe must have passed."""
    writers: int = 4
    """Writer threads; a request belongs to one of them."""
    node_rank: int = 0
    """Which host of an engine over several this is; the HTTP service, the tap and READY are those of 0."""
    cpu: bool = False
    """Real SGLang without a GPU (tests, demo)."""
    allow_unchecked: bool = False
    """Serve although the self-check could not tell right from wrong: no second way to read the states, or (dummy weights) layers that
    change next to nothing. A difference is refused all the same."""

    @classmethod
    def from_env(cls) -> EngineSettings:
        """Raises EngineError ``invalid_request`` that names the variable which does not parse."""
        values: dict[str, Any] = {}
        for name, field in cls.__dataclass_fields__.items():
            raw = os.environ.get(PREFIX + name.upper())
            if raw is None:
                continue
            try:
                values[name] = _PARSERS[str(field.type)](raw)
            except ValueError:
                raise EngineError(ErrorCode.INVALID_REQUEST, f"{PREFIX}{name.upper()}={raw!r} is not a {field.type}") from None
        return cls(**values)

    def to_env(self) -> dict[str, str]:
        return {PREFIX + k.upper(): ("1" if v else "0") if isinstance(v, bool) else str(v) for k, v in vars(self).items()}

    @property
    def tap_dir(self) -> Path:
        return Path(self.tap)


@functools.cache
def current() -> EngineSettings:
    """The settings of this process, read once."""
    return EngineSettings.from_env()
