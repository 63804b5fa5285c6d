"""One supervised process of the stack: its log, its restarts with growing pauses, its end.

Invariant: a child dies with the supervisor, even when that is killed (PR_SET_PDEATHSIG), and is ended by its own process id only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PR_SET_PDEATHSIG = 1
LONGEST_PAUSE_S = 30.0
HOPELESS_AFTER = 6
STEADY_AFTER_S = 60.0  # a process that ran this long starts its pauses anew

_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    # SIGINT stays with the supervisor: a Ctrl-C must stop the stack in order, not all of it at once.
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@dataclass(kw_only=True)
class Service:
    """``argv`` with ``env`` on top of ours; output is appended to ``log``."""

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    _next_start: float = 0.0
    _pause_s: float = 1.0
    _quick_ends: int = 0

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                list(self.argv),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.env},
                preexec_fn=_die_with_parent,
            )
        self.started_at = time.monotonic()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    @property
    def hopeless(self) -> bool:
        """It has ended soon after its start again and again: starting it once more will not help."""
        return self._quick_ends >= HOPELESS_AFTER

    def supervise(self, say: Callable[[str], None]) -> None:
        """Start it again, after a pause that doubles, when it has ended by itself."""
        now = time.monotonic()
        if self.running or self.process is None:
            return
        if self._next_start == 0.0:
            if now - self.started_at > STEADY_AFTER_S:
                self._pause_s, self._quick_ends = 1.0, 0
            self._quick_ends += 1
            self._next_start = now + self._pause_s
            say(f"{self.name} ended with {self.process.returncode}; starting it again in {self._pause_s:.0f} s (log: {self.log})")
            self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2)
        elif now >= self._next_start:
            self._next_start = 0.0
            self.restarts += 1
            self.start()

    def terminate(self) -> None:
        if self.running and self.process is not None:
            self.process.terminate()

    def wait(self, timeout: float) -> bool:
        """True when it has ended within ``timeout`` seconds; it is killed otherwise."""
        if self.process is None:
            return True
        try:
            self.process.wait(timeout)
            return True
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False

    def tail(self, lines: int = 15) -> str:
        """The end of its log, for messages."""
        try:
            with self.log.open("rb") as f:
                f.seek(max(0, f.seek(0, os.SEEK_END) - 16_384))
                return "\n".join(f.read().decode(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""
