"""A coordinator that kills itself at the named place: ``CRASH=<place> python -m tests.integration.crashing_coordinator``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from statetap.coordinator import __main__ as service
from statetap.coordinator import datasets, idempotency, submit


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


match os.environ["CRASH"]:
    case "before the job":  # its id is recorded, nothing of it is on the store
        submit.create_job = die
    case "after its plan":
        real = submit.create_job

        def half(store: Any, spec: Any, batches: Any) -> None:
            real(store, spec, batches)
            (store / "jobs" / spec.job_id / "job.json").unlink()
            die()

        submit.create_job = half
    case "before the dataset":  # the upload's bytes may be linked, dataset.json is not there
        datasets.create_file = die
    case "before the answer":  # all is made, the record is not finished
        idempotency.Claim.finish = die
    case other:
        raise SystemExit(f"CRASH: {other}")

if __name__ == "__main__":
    sys.exit(service.main())
