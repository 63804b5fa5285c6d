"""``statetap doctor``: one finding for each thing that a run needs, with what to do where it is not right.

Invariant: a part that is missing or broken is a finding and never the end of the examination; no finding holds a secret.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ...contracts.errors import StatetapError
from . import disk, host, redis_server, service
from .finding import Finding, failed

__all__ = ["Finding", "examine"]


def examine(*, url: str | None, store: Path | None, tap: Path | None, redis_url: str | None, cpu: bool) -> Iterator[Finding]:
    """Findings as they are made. ``url`` None: the default one, where a missing coordinator is only a warning; ``tap`` None: /dev/shm."""
    parts: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("host", lambda: host.findings(cpu=cpu)),
        ("tap", lambda: disk.tap_findings(tap or disk.MEMORY_FOLDER, needed=tap is not None or host.has_engine())),
        ("store", lambda: disk.store_findings(store)),
        ("samples", lambda: disk.bucket_findings(os.environ.get("STATETAP_SAMPLES", ""))),
        ("redis", lambda: redis_server.findings(redis_url)),
        ("coordinator", lambda: service.findings(url)),
    ]
    for subject, part in parts:
        try:
            yield from part()
        except StatetapError as e:
            yield failed(subject, str(e), e.next_step)
        except (OSError, ValueError, KeyError, TypeError) as e:
            yield failed(subject, f"could not be examined ({type(e).__name__}: {e})", "Report it with this line.")
