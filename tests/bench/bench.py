"""``python -m tests.bench.bench [--short] [--only NAME]``: the project's figures, one JSON object a figure on stdout.

Everything runs as real processes on a real disk (``$STATETAP_BENCH_DIR``, else ``.statetap/`` here) and a private tap in /dev/shm;
all of it is removed and ended at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench import commit_bench, encoding_bench, service_bench, stack_bench, upload_bench
from tests.support.figures import print_figure

Figure = tuple[str, float, str, str]  # name, value, unit, note


def commit(folder: Path, short: bool) -> Iterator[Figure]:
    value, note = commit_bench.commit_over_copy(folder, 5 if short else 9)
    yield "bench.commit_over_copy", value, "ratio", note


def encoding(folder: Path, short: bool) -> Iterator[Figure]:
    found, note = encoding_bench.encodings(folder, 3 if short else 7)
    for name, value in found.items():
        yield name, value, "relative" if name.endswith("error") else "ratio", note


def rows(folder: Path, short: bool) -> Iterator[Figure]:
    rate, fsyncs, note = stack_bench.rows_per_s(folder, 2_000 if short else 8_000)
    yield "bench.rows_per_s", rate, "rows/s", note
    yield (
        "bench.fsyncs_per_row",
        fsyncs,
        "calls/row",
        "os.fsync and os.fdatasync of both workers' batches, wrapped and counted; same run as bench.rows_per_s",
    )


def ingest(folder: Path, short: bool) -> Iterator[Figure]:
    peak, flat, note = stack_bench.ingest_rss(folder, 10_000 if short else 100_000)
    yield "bench.ingest_rss_mib", peak, "MiB", note
    yield "bench.ingest_rss_flatness", flat, "ratio", "that peak over the peak at a tenth of the rows"


def prefill(folder: Path, short: bool) -> Iterator[Figure]:
    seconds, note = stack_bench.submit_to_prefill(folder, 2 if short else 5)
    yield "bench.submit_to_prefill_s", seconds, "s", note


def fairness(folder: Path, short: bool) -> Iterator[Figure]:
    ratio, note = service_bench.small_job_ratio(folder, 20_000 if short else 100_000, 5_000)
    yield "service.small_job_ratio", ratio, "ratio", note


def eta(folder: Path, short: bool) -> Iterator[Figure]:
    error, note = service_bench.eta_error(folder, 1_500 if short else 6_000, 10_000)
    yield "service.eta_error", error, "of the job's time", note


def pause(folder: Path, short: bool) -> Iterator[Figure]:
    seconds, note = service_bench.pause_s(folder, 3 if short else 8)
    yield "service.pause_s", seconds, "s", note


def status(folder: Path, short: bool) -> Iterator[Figure]:
    milliseconds, note = service_bench.status_p99_ms(folder, 1_000, 100, 500 if short else 3_000)
    yield "service.status_p99_ms", milliseconds, "ms", note


def upload(folder: Path, short: bool) -> Iterator[Figure]:
    size = 300_000_000 if short else 10_000_000_000
    growth, rate, note = upload_bench.upload(folder, size)
    yield "service.upload_rss_mib", growth, "MiB", note
    yield "service.upload_gb", size / 1e9, "GB", "bytes of that upload; same run as service.upload_rss_mib"
    yield "service.upload_mib_per_s", rate, "MiB/s", "first byte to dataset, over the interruption; same run as service.upload_rss_mib"


FIGURES: dict[str, Callable[[Path, bool], Iterator[Figure]]] = {
    "commit": commit,
    "encoding": encoding,
    "rows": rows,
    "ingest": ingest,
    "prefill": prefill,
    "fairness": fairness,
    "eta": eta,
    "pause": pause,
    "status": status,
    "upload": upload,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", default=os.environ.get("SHORT") == "1", help="smaller sizes, for CI")
    parser.add_argument("--only", choices=FIGURES, action="append", help="only these figures")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is ended and removed then too
    base = Path(os.environ.get("STATETAP_BENCH_DIR", ".statetap"))
    base.mkdir(parents=True, exist_ok=True)
    command = f"python -m tests.bench.bench{' --short' if args.short else ''}"
    for name in args.only or FIGURES:
        folder = Path(tempfile.mkdtemp(prefix=f"bench-{name}-", dir=base)).resolve()
        try:
            for figure, value, unit, note in FIGURES[name](folder, args.short):
                print_figure(figure, round(value, 3), unit, command, note)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
