"""Figures: printed as one JSON object a line, kept in docs/figures.json.

python -m tests.support.figures < lines      merges lines that a benchmark printed into docs/figures.json, by name
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures.json"
KEYS = ("name", "value", "unit", "command", "date", "machine", "note")


def machine() -> str:
    """This machine in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{os.cpu_count()} cores of {model}, {memory:.0f} GiB, {gpus()}, Linux {platform.release().split('-')[0]}"


def gpus() -> str:
    """``1 NVIDIA H200``, or ``no GPU``."""
    if not (found := shutil.which("nvidia-smi")):
        return "no GPU"
    names = subprocess.run([found, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True).stdout.split("\n")
    counts = Counter(n.strip() for n in names if n.strip())
    return ", ".join(f"{n} {name}" for name, n in counts.items()) or "no GPU"


def figure(name: str, value: float, unit: str, command: str, note: str = "") -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "note": note,
    }


def print_figure(name: str, value: float, unit: str, command: str, note: str = "") -> None:
    print(json.dumps(figure(name, value, unit, command, note)), flush=True)


def merge(lines: list[dict[str, Any]]) -> None:
    """Replace figures of equal name, keep the others; sorted by name."""
    have = {f["name"]: f for f in json.loads(FIGURES.read_text())} if FIGURES.exists() else {}
    for line in lines:
        have[line["name"]] = {k: line[k] for k in KEYS}
    FIGURES.write_text(json.dumps([have[n] for n in sorted(have)], indent=1, ensure_ascii=False) + "\n")


README = FIGURES.parents[1] / "README.md"
BEGIN, END = "<!-- figures: written by python -m tests.support.figures -->", "<!-- end of figures -->"

DATASETS = {"sharegpt_multiturn": "ShareGPT, 500 conversations", "gsm8k_messages": "GSM8K, 7,473 questions"}
ROWS = [
    ("bench.commit_over_copy", "bytes committed (checked, hashed, durable) over a plain read-write-fsync copy", ">= 0.9"),
    ("bench.rows_per_s", "rows/s at 64 KiB a row, 2 workers, everything durable", ">= 400"),
    ("bench.fsyncs_per_row", "fsync and fdatasync calls a row", ""),
    ("bench.ingest_rss_mib", "peak RSS of coordinator + ingestion, 100,000 rows of 2,000 tokens, MiB", "< 700"),
    ("bench.ingest_rss_flatness", "that over the peak at 10,000 rows", "1"),
    ("bench.submit_to_prefill_s", "seconds from submit to the first prefill, idle stack", "< 2"),
    ("service.small_job_ratio", "time of a 500-row job beside one of 100,000 rows, over its time alone", "<= 2.5"),
    ("service.eta_error", "largest error of the ETA after the first 5 %, of the job's whole time", "<= 0.10"),
    ("service.pause_s", "seconds from pause to the last prefill, the slowest of 8", "<= 2"),
    ("service.status_p99_ms", "p99 of GET on jobs with 1,000 jobs and 100 watchers by SSE, ms", ""),
    ("service.upload_rss_mib", "MiB by which the coordinator grows over an upload of 10 GB, cut once", "<= 64"),
    ("store.fp8_over_raw", "captured bytes a second with FP8 over those of raw files, 2 threads", ""),
    ("store.zstd_over_raw", "the same with zstd", ""),
    ("store.zstd_size", "bytes of zstd files over raw ones (normal numbers in bfloat16)", ""),
    ("service.undocumented_5xx", "undocumented 5xx that schemathesis finds in the whole OpenAPI", "0"),
    ("gpu.capture_over_plain", "prefill with capture to the tap over without, 8B shape, one H200", ">= 0.99"),
    ("gpu.disk_over_min", "the whole way to disk over the smaller of prefill and disk", ">= 0.95"),
    ("gpu.tap_tok_s", "tok/s with capture to the tap", ">= 40,000"),
    ("gpu.small_model_over_plain", "with capture over without at 4.2 GB/s of states, 1B shape", ">= 0.97"),
    ("gpu.min_cosine", "mean cosine of the worst boundary against transformers, bf16, three architectures", ">= 0.999"),
    ("cpu.models_matched", "architectures whose states match transformers' (fp32, CPU)", ""),
    ("demo.max_rel_error", "largest relative error of the demo's states against transformers (fp32)", "< 1e-5"),
]


def readme_table() -> str:
    """The README's figures, from docs/figures.json."""
    have = {f["name"]: f["value"] for f in json.loads(FIGURES.read_text())}
    lines = ["| Figure | Seen | Goal |", "|---|---|---|"]
    lines += [
        f"| {text} | {have[name]:,.0f} | {goal} |" if have[name] >= 1000 else f"| {text} | {have[name]:.4g} | {goal} |"
        for name, text, goal in ROWS
    ]
    lines += [
        "",
        "| Real SGLang on this CPU, tiny model | rows/s | tok/s | RSS: coordinator | ingestion | worker (of 2) | engine |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, text in DATASETS.items():
        v = {
            k: have[f"real_data.{key}.{k}"]
            for k in ("rows_per_s", "tok_per_s", *(f"rss_{s}_mib" for s in ("coordinator", "ingest", "worker", "engine")))
        }
        rss = " | ".join(f"{v[f'rss_{s}_mib']:.0f} MiB" for s in ("coordinator", "ingest", "worker", "engine"))
        lines.append(f"| {text} | {v['rows_per_s']:.0f} | {v['tok_per_s']:,.0f} | {rss} |")
    return "\n".join(lines)


def write_readme() -> None:
    head, _, rest = README.read_text().partition(BEGIN)
    README.write_text(f"{head}{BEGIN}\n{readme_table()}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    merge([json.loads(line) for line in sys.stdin if line.startswith("{")])
    write_readme()
