"""``python -m tests.faults.killer_worker``: the real worker, but a row with the token KILLER takes its horse down with it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from statetap.store.rows import Row
from statetap.store.sample import SampleWriter, Staged
from statetap.worker.__main__ import main

KILLER = 6666


class KillingWriter(SampleWriter):
    def stage(self, row: Row, generation: int, tap_file: Path) -> Staged:
        if KILLER in row.input_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().stage(row, generation, tap_file)


if __name__ == "__main__":
    import statetap.worker.batch

    statetap.worker.batch.SampleWriter = KillingWriter  # type: ignore[misc]
    sys.exit(main())
