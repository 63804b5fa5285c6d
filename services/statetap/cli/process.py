"""One supervised process of the stack: its log, its restarts with growing pauses, its end.

Invariant: a child dies with the supervisor, even when that is killed (parent.py), and is ended by its own process id only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..parent import dies_with_me

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
HOPELESS_AFTER = 6
STEADY_AFTER_S = 60.0  # a process that ran this long starts its pauses anew
KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""Statuses that somebody else gave it: they say nothing about whether it can run, so a job of days is not given up for them."""


def _child() -> Callable[[], None]:
    tie = dies_with_me(signal.SIGTERM)

    def begin() -> None:
        tie()
        # It stays with the supervisor: a Ctrl-C must stop the stack in order, not all of it at once.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    return begin


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
    _pause_s: float = FIRST_PAUSE_S
    _quick_ends: int = 0

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                list(self.argv),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.env},
                preexec_fn=_child(),
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
        """It has ended by itself soon after its start again and again: starting it once more will not help."""
        return self._quick_ends >= HOPELESS_AFTER

    def supervise(self, say: Callable[[str], None]) -> None:
        """Start it again, after a pause that doubles, when it has ended by itself."""
        now = time.monotonic()
        if self.running or self.process is None:
            return
        if self._next_start == 0.0:
            self._next_start = now + self._account_end(now - self.started_at, self.process.returncode, say)
        elif now >= self._next_start:
            self._next_start = 0.0
            self.restarts += 1
            self.start()

    def _account_end(self, ran_s: float, status: int, say: Callable[[str], None]) -> float:
        """Seconds to wait before the next start."""
        if ran_s > STEADY_AFTER_S:
            self._pause_s, self._quick_ends = FIRST_PAUSE_S, 0
        pause = self._pause_s
        if status in KILLED:
            pause = FIRST_PAUSE_S
            say(
                f"{self.name} was killed ({signal.Signals(-status).name}: by hand, or for memory: see dmesg); starting it again in {pause:.0f} s"
            )
        else:
            self._quick_ends += 1
            self._pause_s = min(LONGEST_PAUSE_S, pause * 2)
            say(f"{self.name} ended with {status}; starting it again in {pause:.0f} s (log: {self.log})")
        return pause

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
