"""Python, packages, GPUs, limits of this process."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator

from .finding import Finding, failed, fine, warned

PACKAGES = ("torch", "transformers", "redis", "rq")  # beside statetap and sglang
TESTED_SGLANG = ("0.5.17", "0.5.23")  # by make test and on a GPU; others have to pass the engine's self-check
OPEN_FILES = 4096  # 64 files a grouped commit, the window's connections, RQ's
NVIDIA_SMI_S = 20.0


def findings(*, cpu: bool) -> Iterator[Finding]:
    yield _python()
    yield _sglang()
    for name in PACKAGES:
        version = _version(name)
        yield (
            fine(f"package {name}", version)
            if version
            else warned(f"package {name}", "is not installed here", "Needed where engines and workers run.")
        )
    yield from gpus(cpu=cpu)
    yield _open_files()


def _python() -> Finding:
    return fine("python", f"{platform.python_version()} ({sys.executable}), statetap {_version('statetap') or 'not installed'}")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def has_engine() -> bool:
    """Whether an engine, and with it workers, may run here."""
    return bool(_version("sglang"))


def _sglang() -> Finding:
    version = _version("sglang")
    if not version:
        return warned("package sglang", "is not installed here", "Needed where the engine runs: install it, or use the engine's image.")
    if version not in TESTED_SGLANG:
        tested = ", ".join(TESTED_SGLANG)
        return warned("package sglang", f"{version} was not tested ({tested} were)", "It serves only if the engine's self-check passes.")
    return fine("package sglang", f"{version}, tested")


def gpus(*, cpu: bool) -> Iterator[Finding]:
    """One finding a GPU, by nvidia-smi: importing torch for it would take seconds."""
    path = shutil.which("nvidia-smi")
    if path is None:
        yield _no_gpu("no nvidia-smi on the PATH", cpu)
        return
    query = [path, "--query-gpu=index,name,memory.total,memory.used,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_S)
    except subprocess.TimeoutExpired:
        yield failed("gpu", f"nvidia-smi gives no answer within {NVIDIA_SMI_S:.0f} s", "The driver hangs: look at dmesg, restart the host.")
        return
    lines = [line for line in done.stdout.splitlines() if line.count(",") >= 4]
    if done.returncode != 0 or not lines:
        yield _no_gpu(f"nvidia-smi: {' '.join((done.stderr or done.stdout).split())[:200] or 'lists none'}", cpu)
    for line in lines:
        index, name, total, used, driver = (part.strip() for part in line.split(",", 4))
        text = f"{name}, {used} of {total} MiB used, driver {driver}"
        busy = used.isdigit() and total.isdigit() and int(used) > int(total) // 2
        yield (
            warned(f"gpu {index}", text, "More than half is taken: end what runs there, or give CUDA_VISIBLE_DEVICES.")
            if busy
            else fine(f"gpu {index}", text)
        )


def _no_gpu(text: str, cpu: bool) -> Finding:
    return fine("gpu", f"{text}; --cpu") if cpu else warned("gpu", text, "Without a GPU only `--cpu` works, for small models.")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        return warned("open files", f"the limit is {soft} (at most {hard})", f"Raise it: `ulimit -n {OPEN_FILES}`.")
    return fine("open files", f"the limit is {soft}")
