"""Commands on a terminal of a given width (a real pty), and what they left on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence

_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[=>])")


class Terminal:
    """A command on a pty. ``output`` is all that it wrote so far."""

    def __init__(self, argv: Sequence[str], *, columns: int = 80, env: dict[str, str] | None = None) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "CI")}
        self._process = subprocess.Popen(
            list(argv),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**kept, "TERM": "xterm-256color", **(env or {})},
            start_new_session=True,
        )
        os.close(slave)
        self._raw = b""

    @property
    def output(self) -> str:
        return self._raw.decode(errors="replace")

    def read_until(self, text: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < deadline and self._read(1.0), f"{text!r} did not come: {self.output!r}"

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait(self, seconds: float = 60) -> int:
        """Its exit code, with all that it wrote read."""
        deadline = time.monotonic() + seconds
        while self._read(1.0):
            assert time.monotonic() < deadline, self.output
        os.close(self._master)
        return self._process.wait(10)

    def _read(self, seconds: float) -> bool:
        """False at the end of the output."""
        ready, _, _ = select.select([self._master], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # EIO: nobody has the other side open any more
            return False
        self._raw += data
        return bool(data)

    def lines(self) -> list[str]:
        """What was written, without escape sequences, cut at line feeds and carriage returns."""
        return re.split(r"[\r\n]+", _ESCAPE.sub("", self.output))
