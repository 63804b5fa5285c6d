"""ENGINE_FAILED.json: why an engine did not start, where its supervisor looks for it."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from ..contracts.errors import StatetapError

logger = logging.getLogger("statetap.engine")

FAILED_FILE = "ENGINE_FAILED.json"


def write_failure(tap: Path, error: StatetapError) -> None:
    """Keep the first reason only: it is the cause, those that follow are its consequences."""
    path = tap / FAILED_FILE
    logger.error("%s (next: %s)", error, error.next_step)
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"code": error.code.value, "message": error.message}))
        part.replace(path)
