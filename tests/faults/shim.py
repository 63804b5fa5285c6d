"""Faults at the Nth file operation of a real, unmodified process: a small library between it and libc (LD_PRELOAD), armed from outside.

libfiu's preload makes the same errors, but only by chance or by name, in every file of the process: neither the Nth call nor the store's
files alone can be asked for. This one counts the calls that touch files below ``root`` and lets the Nth fail (ENOSPC, EIO), write half
of what it was given, or take the process down (SIGKILL) before it, after it or in the middle of its write.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from enum import IntEnum
from pathlib import Path

import pytest

_NUMBERS = struct.Struct("<5q")
_SIZE = _NUMBERS.size + 512


class Fault(IntEnum):
    NO_SPACE = 1
    IO = 2
    SHORT = 3
    KILL_BEFORE = 4
    KILL_AFTER = 5
    TORN = 6


class Shim:
    """``env`` goes into the environment of the process. Disarmed at first; arming and disarming works while it runs."""

    def __init__(self, folder: Path, root: Path) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler for the fault shim")
        library, control = folder / "shim.so", folder / "shim.control"
        source = Path(__file__).with_name("shim.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-w", "-o", library, source, "-ldl"], check=True)
        control.write_bytes(bytes(_SIZE))
        with open(control, "r+b") as f:
            self._control = mmap.mmap(f.fileno(), _SIZE)
        self.env = {"LD_PRELOAD": str(library), "FAULTS_CONTROL": str(control), "FAULTS_ROOT": str(root)}

    def arm(self, fault: Fault, nth: int, part: int = -1) -> None:
        """The ``nth`` call from now on. ``part``: bytes that a torn write still writes; -1: half."""
        self._control[:_SIZE] = _NUMBERS.pack(0, nth, fault, part, 0) + bytes(512)

    def disarm(self) -> str:
        """What was hit, as ``operation /path below root``; "" when the run had fewer calls."""
        hits = _NUMBERS.unpack(self._control[: _NUMBERS.size])[4]
        last = self._control[_NUMBERS.size :].split(b"\0")[0].decode()
        self._control[:_SIZE] = bytes(_SIZE)
        return last if hits else ""

    @property
    def hit(self) -> bool:
        return bool(_NUMBERS.unpack(self._control[: _NUMBERS.size])[4])


def step_of(hit: str) -> str:
    """What kind of step of the grouped commit (or of its start and end) a hit is: the operation, and what it was done to."""
    operation, _, path = hit.partition(" ")
    name = path.rpartition("/")[2]
    for mark, what in ((".tmp-", "temp"), ("data_", "file"), ("rows_", "folder"), ("norm", "norm"), ("ledger", "ledger folder")):
        if name.startswith(mark):
            return f"{operation} {'norm' if 'norm' in name else what}"
    return f"{operation} {'ledger' if name.endswith('.jsonl') else name}"
