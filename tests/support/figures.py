"""Figures: printed as one JSON object a line, kept in docs/figures.json.

python -m tests.support.figures < lines      merges lines that a benchmark printed into docs/figures.json, by name
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures.json"
KEYS = ("name", "value", "unit", "command", "date", "machine", "note")


def machine() -> str:
    """This machine in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, no GPU, Linux"


def figure(name: str, value: float, unit: str, command: str, note: str = "") -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "note": note,
    }


def print_figure(name: str, value: float, unit: str, command: str, note: str = "") -> None:
    print(json.dumps(figure(name, value, unit, command, note)), flush=True)


def merge(lines: list[dict[str, Any]]) -> None:
    """Replace figures of equal name, keep the others; sorted by name."""
    have = {f["name"]: f for f in json.loads(FIGURES.read_text())} if FIGURES.exists() else {}
    for line in lines:
        have[line["name"]] = {k: line[k] for k in KEYS}
    FIGURES.write_text(json.dumps([have[n] for n in sorted(have)], indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    merge([json.loads(line) for line in sys.stdin if line.startswith("{")])
