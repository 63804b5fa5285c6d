"""The main job from end to end, by the command line that users have: extract examples/conversations.jsonl through the real SGLang
on this CPU, verify every file, compare some with transformers' forward, and print a table.

    make demo            (or: python examples/demo.py [--figures])

``--figures`` prints the figures of docs/figures.json as JSON lines too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".statetap" / "demo"
DATA = ROOT / "examples" / "conversations.jsonl"
TOLERANCE = 1e-5
SAMPLES = 16


def statetap(*args: str | Path, quiet: bool = False) -> tuple[int, str]:
    """Run the CLI; its output is shown unless ``quiet``. Returns exit code and stdout."""
    command = [sys.executable, "-m", "statetap.cli", *map(str, args)]
    if not quiet:
        return subprocess.run(command, cwd=ROOT).returncode, ""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return done.returncode, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figures", action="store_true")
    figures = parser.parse_args().figures
    began = time.monotonic()
    model, store = WORK / "model", WORK / "store"
    WORK.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(store, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "statetap.engine.tiny", model], check=True, stdout=subprocess.DEVNULL)

    code, _ = statetap("run", DATA, "--cpu", "--model", model, "--out", store)
    if code != 0:
        print(f"statetap run ended with {code}; logs: {store / '.stack' / 'logs'}", file=sys.stderr)
        return code
    ran = time.monotonic()
    verify_code, out = statetap("verify", store, "--json", quiet=True)
    verify = json.loads(out)
    parity_code, out = statetap("parity", store, "--model", model, "--samples", SAMPLES, "--json", quiet=True)
    parity = json.loads(out)
    complete = json.loads(next(store.glob("jobs/*/COMPLETE")).read_text())
    rows_in = sum(1 for line in DATA.open() if line.strip())

    table = [
        ("rows in the dataset", rows_in),
        ("rows done / failed / skipped", f"{complete['done']} / {complete['failed']} / {complete['skipped']}"),
        ("tokens captured", complete["tokens"]),
        ("bytes committed", complete["bytes"]),
        ("files verified", f"{verify['files']}, problems: {verify['counts'] or 'none'}"),
        ("rows compared with transformers", f"{parity['rows']} ({parity['tokens']} tokens)"),
        *(
            (f"largest relative error, {'boundary ' if name.isdigit() else ''}{name}", f"{error:.2g}")
            for name, error in parity["errors"].items()
        ),
        ("nearest shifted control (must differ)", f"{parity['shifted']:.2g}"),
        ("seconds: extraction with start / whole", f"{ran - began:.0f} / {time.monotonic() - began:.0f}"),
        ("job", next(store.glob("jobs/*")).relative_to(ROOT)),
    ]
    width = max(len(name) for name, _ in table)
    print()
    for name, value in table:
        print(f"  {name:<{width}}  {value}")
    ok = verify_code == 0 and parity_code == 0 and parity["worst"] < TOLERANCE and complete["done"] == rows_in == complete["rows"]
    print(f"\n  {'OK' if ok else 'NOT OK'}: every row extracted, verified and equal to transformers\n")
    if figures:
        sys.path.insert(0, str(ROOT))
        from tests.support.figures import print_figure

        command = "python examples/demo.py --figures"
        note = f"fp32 states against transformers' forward, {parity['rows']} rows, every boundary and the final state"
        print_figure("demo.max_rel_error", parity["worst"], "relative", command, note)
        print_figure(
            "demo.rows", complete["done"], "rows", command, f"of {rows_in} in examples/conversations.jsonl, {complete['tokens']} tokens"
        )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
