"""Children that do not outlive their parent, even one that is killed. Linux."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from functools import partial

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # now: after a fork nothing may be loaded


def tie(parent: int, number: int) -> None:
    """In a child of process ``parent``: the signal ``number`` comes when that ends (prctl(2), PR_SET_PDEATHSIG)."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the line above, and nothing would ever come
        os.kill(os.getpid(), signal.SIGKILL)


def dies_with_me(number: int) -> Callable[[], None]:
    """A ``preexec_fn`` that does so to the child of this process."""
    return partial(tie, os.getpid(), number)
