"""The real ``statetap`` command as a process: exit code, stdout, stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.err.splitlines()[-1])["error"]
        return found


def statetap(*arguments: object, url: str = "", timeout_s: float = 300) -> Ran:
    env = {k: v for k, v in os.environ.items() if not k.startswith("STATETAP_")} | ({"STATETAP_URL": url} if url else {})
    done = subprocess.run(
        [sys.executable, "-m", "statetap.cli", *map(str, arguments)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s
    )
    return Ran(done.returncode, done.stdout, done.stderr)
