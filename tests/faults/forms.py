"""Two forms of the fault tests: short in CI, full by ``make faults`` (STATETAP_FAULTS=full). Seeds are fixed; STATETAP_SEED=random draws one.

``figure`` prints one JSON object a line, for tests.support.figures, where STATETAP_FIGURES is set.
"""

from __future__ import annotations

import os
import random

from tests.support.figures import print_figure

FULL = os.environ.get("STATETAP_FAULTS") == "full"
COMMAND = "STATETAP_FIGURES=1 make faults"

_asked = os.environ.get("STATETAP_SEED", "20251129")
SEED = random.SystemRandom().randrange(1 << 32) if _asked == "random" else int(_asked)
print(f"tests.faults: form={'full' if FULL else 'short'} STATETAP_SEED={SEED}", flush=True)


def times(short: int, full: int) -> int:
    """``short`` in CI, ``full`` by ``make faults``."""
    return full if FULL else short


def figure(name: str, value: float, unit: str, note: str = "") -> None:
    """Print a figure, where figures are asked for."""
    if os.environ.get("STATETAP_FIGURES"):
        print_figure(name, value, unit, COMMAND, f"seed {SEED}; {note}" if note else f"seed {SEED}")
