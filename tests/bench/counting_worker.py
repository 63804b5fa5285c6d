"""``python -m tests.bench.counting_worker``: the real worker; each batch adds its number of fsync and fdatasync calls to a file.

The calls are counted by wrapping ``os.fsync`` and ``os.fdatasync``, which are the only ways to them in store/.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

from statetap.worker import task
from statetap.worker.__main__ import main


def count(job_id: str, batch: int, attempt: int, *, original: Any = task.run_batch) -> None:
    calls = itertools.count()
    fsync, fdatasync = os.fsync, os.fdatasync
    os.fsync = lambda fd: (next(calls), fsync(fd))[1]
    os.fdatasync = lambda fd: (next(calls), fdatasync(fd))[1]
    try:
        original(job_id=job_id, batch=batch, attempt=attempt)
    finally:
        with open(os.environ["STATETAP_BENCH_FSYNCS"], "a") as f:
            f.write(f"{next(calls)}\n")


if __name__ == "__main__":
    task.run_batch = count  # type: ignore[assignment]
    sys.exit(main())
