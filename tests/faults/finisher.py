"""``python -m tests.faults.finisher JOB ROWS CONTROL STRIDE``, under the shim: the job's end with a fault at each (or every STRIDE-th) of its
file operations.

Prints {"points": fault -> runs that met one, "false": what stood there that must not}.
"""

from __future__ import annotations

import itertools
import json
import mmap
import shutil
import struct
import sys
from pathlib import Path

from statetap.contracts.errors import StatetapError
from statetap.store.complete import finish_job, load_completion
from statetap.store.verify import verify_job

FAULTS = {"no_space": 1, "io": 2, "short": 3}


def main() -> int:
    job, rows, control_path = map(Path, sys.argv[1:4])
    (job / "COMPLETE").unlink()
    (job / "manifest.parquet").unlink()
    with open(control_path, "r+b") as f:
        control = mmap.mmap(f.fileno(), 552)
    points: dict[str, int] = {}
    false: list[str] = []
    for name, fault in FAULTS.items():
        for nth in itertools.count(1, int(sys.argv[4])):
            copy = job.with_name("job-copy")
            shutil.copytree(job, copy)
            control[:40] = struct.pack("<5q", 0, nth, fault, -1, 0)
            failed = False
            try:
                finish_job(copy, rows)
            except StatetapError:
                failed = True
            hits = struct.unpack("<5q", control[:40])[4]
            last = control[40:].split(b"\0")[0].decode()
            control[:40] = bytes(40)
            what = f"{name} {nth} {last}"
            report = verify_job(copy, rows)
            if (copy / "COMPLETE").exists() and not report.ok:
                false.append(f"COMPLETE without its manifest: {what}")
            if not failed and load_completion(copy) is None:
                false.append(f"no COMPLETE and no error: {what}")
            finish_job(copy, rows)
            if not verify_job(copy, rows).ok:
                false.append(f"not whole after another try: {what}")
            shutil.rmtree(copy)
            if not hits:
                break
            points[name] = nth
    print(json.dumps({"points": points, "false": false}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
