"""Removes what dead workers left in the tap: lease folders whose heartbeat stopped.

Invariant: a folder is removed only when its lease file is older than LEASE_DEAD_AFTER_S, so a live worker never loses a file.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from pathlib import Path

from ..contracts.capture import LEASE_DEAD_AFTER_S, LEASE_FILE

logger = logging.getLogger(__name__)

SWEEP_EVERY_S = 10.0
_LEASE = re.compile(r"[0-9a-f]{16}")


def sweep(tap: Path, now: float) -> list[str]:
    """Remove dead lease folders; their names are returned. ``now`` is seconds since the epoch."""
    removed = []
    for folder in tap.iterdir():
        if not _LEASE.fullmatch(folder.name) or not folder.is_dir():
            continue
        try:
            beat = (folder / LEASE_FILE).stat().st_mtime
        except FileNotFoundError:
            try:
                beat = folder.stat().st_mtime  # just made, or half removed
            except FileNotFoundError:
                continue
        if now - beat > LEASE_DEAD_AFTER_S:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
    return removed


def sweep_forever(tap: Path) -> None:
    while True:
        time.sleep(SWEEP_EVERY_S)
        try:
            for lease in sweep(tap, time.time()):
                logger.info("statetap: lease %s is dead: its folder was removed", lease)
        except OSError as e:
            logger.warning("statetap: sweep of the tap: %s", e)
