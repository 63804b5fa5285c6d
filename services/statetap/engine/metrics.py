"""What the engine counts, as Prometheus text at ``GET /statetap/metrics`` of SGLang's HTTP process.

The scheduler's process counts (each thread in a tally of its own, plain numbers, no lock) and sends absolute values to the HTTP process
twice a second at most. Invariant: a counter never falls while the engine runs, and a request is counted once, when its outcome is known.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .channel import Sender

FACT = "metrics"
REPORT_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Described:
    """One metric. ``label`` is the name of its only label, or empty."""

    name: str
    type: str  # counter | gauge
    help: str
    label: str = ""


def _counter(name: str, help: str, label: str = "") -> Described:
    return Described(name=f"statetap_engine_{name}_total", type="counter", help=help, label=label)


def _gauge(name: str, help: str) -> Described:
    return Described(name=f"statetap_engine_{name}", type="gauge", help=help)


METRICS: dict[str, Described] = {
    # of the scheduler's process: names of a Tally, and of what report_forever adds
    "captured_requests": _counter("captured_requests", "Requests whose tap file is whole and has its name."),
    "captured_tokens": _counter("captured_tokens", "Prompt tokens of those requests."),
    "captured_bytes": _counter("captured_bytes", "Bytes of those files."),
    "errors": _counter("errors", "Requests whose capture failed, by error code.", "code"),
    "aborted_requests": _counter("aborted_requests", "Requests that were aborted, or whose client went away, before their file was whole."),
    "forwards": _counter("forwards", "Forwards of which rows were captured."),
    "copied_bytes": _counter("copied_bytes", "Bytes of states and ids that forwards handed to the ring."),
    "copy_seconds": _counter("copy_seconds", "Seconds that copies from the GPU into the ring took (CUDA events; 0 without a GPU)."),
    "written_bytes": _counter("written_bytes", "Bytes written into the tap, those of requests that failed later too."),
    "write_seconds": _counter("write_seconds", "Seconds that the writer threads spent on these writes, summed over the threads."),
    "open_files": _gauge("open_files", "Tap files that are being written."),
    "ring_used_bytes": _gauge("ring_used_bytes", "Bytes of the ring that wait for the writers."),
    "ring_limit_bytes": _gauge("ring_limit_bytes", "Bytes of the ring (STATETAP_ENGINE_RING_BYTES)."),
    # of the HTTP process
    "replies": _counter("replies", "Replies of requests that asked for capture: ok, an error code, or gone (no reply was made).", "result"),
    "reply_wait_seconds": _counter("reply_wait_seconds", "Seconds that replies waited for their tap file after the prefill had ended."),
    "replies_waiting": _gauge("replies_waiting", "Requests that asked for capture and have no reply yet."),
}


@dataclass(kw_only=True)
class Tally:
    """What one thread counted. Only that thread writes; others read whole numbers that may lag behind each other."""

    captured_requests: int = 0
    captured_tokens: int = 0
    captured_bytes: int = 0
    aborted_requests: int = 0
    forwards: int = 0
    copied_bytes: int = 0
    copy_seconds: float = 0.0
    written_bytes: int = 0
    write_seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)


def total(tallies: Iterable[Tally]) -> dict[str, Any]:
    """The sum of ``tallies``, by field."""
    out: dict[str, Any] = vars(Tally()) | {"errors": Counter()}
    for tally in tallies:
        for name, value in vars(tally).items():
            if name == "errors":
                out["errors"].update(dict(value))  # a copy: its thread may add a code meanwhile
            else:
                out[name] += value
    return out


def report_forever(sender: Sender, read: Callable[[], dict[str, Any]]) -> None:
    """Send what ``read`` says, whenever it says something new. For a thread of its own."""
    sent: dict[str, Any] = {}
    while True:
        values = read()
        if values != sent:
            sender.send({"fact": FACT, "value": values})
            sent = values
        time.sleep(REPORT_EVERY_S)


def report(sender: Sender, read: Callable[[], dict[str, Any]]) -> None:
    threading.Thread(target=report_forever, args=(sender, read), name="statetap-metrics", daemon=True).start()


def render(values: dict[str, Any]) -> str:
    """Prometheus text of what is in ``values`` (names of :data:`METRICS`; a labelled one is a dict of label value -> number)."""
    return "".join(f"{line}\n" for name, m in METRICS.items() if name in values for line in _lines(m, values[name]))


def _lines(m: Described, value: Any) -> Iterator[str]:
    yield f"# HELP {m.name} {m.help}"
    yield f"# TYPE {m.name} {m.type}"
    if m.label:
        for label, n in sorted(value.items()):  # ours: error codes and the like, nothing that needs escaping
            yield f'{m.name}{{{m.label}="{label}"}} {n}'
    else:
        yield f"{m.name} {value}"
