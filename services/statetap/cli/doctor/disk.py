"""The tap and the store: which file system, how much room, and whether it keeps what the commit relies on.

The probes are real files in a folder of their own, which is removed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ...contracts.capture import READY_FILE
from ...contracts.errors import StatetapError
from ...store.probe import NEXT_STEP, promises
from ..units import size
from .finding import Finding, failed, fine, warned

MEMORY = ("tmpfs", "ramfs")
MEMORY_FOLDER = Path("/dev/shm")
TAP_LEAST, TAP_GOOD = 1 << 30, 8 << 30
STORE_LEAST, STORE_GOOD = 1 << 30, 100 << 30
WRITTEN = 256 << 20
BLOCK = 8 << 20
SLOW = 200e6  # bytes/s; below it the disk is slower than one engine of a small model


def file_system(path: Path) -> str:
    """The type of the file system that holds an existing path, by /proc/self/mountinfo; "unknown" where that is not there."""
    found, longest = "unknown", -1
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return found
    real = path.resolve()
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = Path(left.split()[4].encode().decode("unicode_escape"))
        # A later mount on the same point covers an earlier one.
        if real.is_relative_to(mount) and len(mount.parts) >= longest:
            found, longest = right.split()[0], len(mount.parts)
    return found


def tap_findings(tap: Path, *, needed: bool = True) -> Iterator[Finding]:
    """``needed``: engines or workers run here, or somebody named it; without it nothing is worse than a warning."""
    unfit = failed if needed else warned
    if not tap.is_dir():
        yield unfit("tap", f"there is no folder {tap}", "Mount a tmpfs there, or give another as --tap.")
        return
    kind, room = file_system(tap), shutil.disk_usage(tap)
    text = f"{tap} is {kind}, {size(room.free)} free of {size(room.total)}"
    if kind not in MEMORY:
        yield unfit("tap", text, "The tap has to be memory: mount a tmpfs, or use /dev/shm.")
    elif room.free < TAP_LEAST:
        yield unfit(
            "tap", text, "Give it at least 1 GiB (Docker: --shm-size; Kubernetes: an emptyDir of medium Memory), or remove what lies there."
        )
    elif room.free < TAP_GOOD:
        yield warned("tap", text, "Enough for short prompts; 8 GiB and more keep an engine busy.")
    else:
        yield fine("tap", text)
    ready = sorted(p.parent.name for p in tap.glob(f"*/{READY_FILE}"))
    if ready:
        yield fine("tap", f"ready engines: {', '.join(ready)}")


def store_findings(store: Path | None) -> Iterator[Finding]:
    if store is None:
        yield warned("store", "was not looked at", "Give it as --store (STATETAP_STORE).")
        return
    if not store.is_dir():
        yield failed("store", f"there is no folder {store}", "Make or mount it, or correct --store.")
        return
    kind, room = file_system(store), shutil.disk_usage(store)
    text = f"{store} is {kind}, {size(room.free)} free of {size(room.total)}"
    if room.free < STORE_LEAST:
        yield failed("store", text, "Free space: jobs pause as low_disk below 1 GiB (`statetap gc`, `statetap rm`).")
    elif kind in MEMORY or kind == "overlay":
        yield warned("store", text, "What lies there goes with the host or the container: mount a disk or a volume.")
    elif room.free < STORE_GOOD:
        yield warned("store", text, "Little for hidden states: see `statetap estimate`.")
    else:
        yield fine("store", text)
    try:
        folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=store))
    except OSError as e:
        yield failed("store", f"cannot be written: {e.strerror}", "Give this user the right to write there.")
        return
    try:
        yield from _promises(folder)
        yield _speed(folder, room.free)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def bucket_findings(url: str) -> Iterator[Finding]:
    """Of the bucket that STATETAP_SAMPLES names: the coordinator's own probe."""
    if not url:
        return
    from ...store.bucket import probe_bucket  # its library is slow to import, and who has no bucket needs it not

    try:
        probe_bucket(url)
    except StatetapError as e:
        yield failed("samples", e.message, e.next_step)
        return
    yield fine("samples", f"{url} takes an object once, and lists it")


def _promises(folder: Path) -> Iterator[Finding]:
    """As the services look at their start."""
    for promise in promises(folder):
        subject = "store promises"
        yield failed(subject, f"{promise.text}: {promise.broken}", NEXT_STEP) if promise.broken else fine(subject, promise.text)


def _speed(folder: Path, free: int) -> Finding:
    if free < 2 * WRITTEN:
        return warned("store speed", "too little space to measure it", "Free space first.")
    block = os.urandom(BLOCK)  # zeros would be compressed away on some file systems
    fd = os.open(folder / "speed", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    began = time.monotonic()
    try:
        for _ in range(WRITTEN // BLOCK):
            view = memoryview(block)
            while view:
                view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    rate = WRITTEN / (time.monotonic() - began)
    text = f"{size(rate)}/s written and synced ({size(WRITTEN)} in one file)"
    if rate < SLOW:
        return warned("store speed", text, "A GPU captures faster than that: use a faster disk, or expect the job to be bound by commit.")
    return fine("store speed", text)
