"""Runs an export and ends it by SIGKILL at each of its durable steps, again and again; each time the next run must bring it to its end.

This process only forks and looks at files: the children run the export, and so start without any thread of torch or Arrow.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from statetap.store.export import run
from statetap.store.export.listing import LIST
from statetap.store.export.registry import FORMATS

CALLS = ("write", "fsync", "fdatasync", "replace", "unlink")
WRITES_APART = 29  # torch and Arrow write a file in many small pieces


def in_a_child(do: Callable[[], object]) -> int:
    """Its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            do()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def killed_at(nth: int, do: Callable[[], object]) -> None:
    """Run it, and die in the nth counted call: of a write half is done."""
    count, writes = itertools.count(), itertools.count()
    for name in CALLS:
        real = getattr(os, name)

        def call(*args: Any, name: str = name, real: Callable[..., Any] = real) -> Any:
            if (name != "write" or next(writes) % WRITES_APART == 0) and next(count) == nth:
                if name == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        setattr(os, name, call)
    do()


def files_of(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file() and p.name != run.MARKER}


def look(out: Path, want: dict[str, bytes]) -> list[str]:
    """What is wrong with an export that was cut off."""
    wrong = []
    have = files_of(out) if out.exists() else {}
    for name, data in have.items():
        if name.startswith(".tmp-"):
            wrong += [f"{name} may be taken for a row"] if Path(name).suffix else []
        elif name == LIST:
            whole = data[: data.rfind(b"\n") + 1]
            wrong += [] if want[LIST].startswith(whole) else ["the list differs"]
            listed = [json.loads(line)["path"] for line in whole.splitlines()[1:]]
            wrong += [f"{path} is listed and not there" for path in listed if path not in have]
        elif data != want.get(name):
            wrong.append(f"{name} is not whole")
    if (out / run.MARKER).exists() and have != want:
        wrong.append("EXPORT.json is there, and the export is not whole")
    return wrong


def main() -> None:
    job_dir, folder, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    run.GROUP_ROWS = 1
    reference, out = folder / "reference", folder / "out"

    def export(to: Path) -> Callable[[], object]:
        return lambda: run.export_job(job_dir, to, FORMATS[name], threads=1)  # type: ignore[index]

    assert in_a_child(export(reference)) == 0
    want = files_of(reference)
    points, wrong = 0, []
    for nth in itertools.count():
        shutil.rmtree(out, ignore_errors=True)
        if in_a_child(lambda nth=nth: killed_at(nth, export(out))) == 0:  # type: ignore[misc]
            break
        points += 1
        wrong += [f"cut off at {nth}: {w}" for w in look(out, want)]
        if in_a_child(export(out)) != 0 or files_of(out) != want or not (out / run.MARKER).exists():
            wrong.append(f"cut off at {nth}: the next run did not finish it")
    print(json.dumps({"points": points, "wrong": wrong, "files": len(want)}))


if __name__ == "__main__":
    main()
