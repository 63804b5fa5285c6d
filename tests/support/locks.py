"""``python -m tests.support.locks``: the pinned requirements of the images, out of requirements/lock.txt.

control.txt is what the control plane's extras need, engine-cpu.txt what SGLang and the engine's extra need beside torch, each with all that
those need in turn, as far as the lock has it (SGLang names packages that only a CUDA host needs). A test holds both to what this makes.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parents[2] / "requirements"
IMAGES = {
    "control.txt": ["statetap[coordinator,worker,datasets,cli]"],
    "engine-cpu.txt": [
        "sglang",
        "statetap[engine]",
        "sentencepiece",
        "dill",
        "jsonschema",
    ],  # the last three it imports without naming them
}
OURS: dict[str, list[str]] = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
LEAST = "3.11.0"  # the first Python that we support: some packages are needed on its first releases alone
NOT_HERE = {"torch", "statetap"}  # torch has a file of its own, since its builds differ; the wheel is the image's own


def locked() -> dict[str, str]:
    """Canonical name -> line of the lock."""
    lines = (FOLDER / "lock.txt").read_text().splitlines()
    return {canonicalize_name(re.split(r"[=@ ]", line)[0]): line for line in lines if line and not line.startswith("#")}


def closure(wanted: Iterable[str]) -> set[str]:
    """Canonical names of all that these requirements need, themselves included, as installed here."""
    found: set[tuple[str, str]] = set()
    todo = [(r.name, extra) for r in map(Requirement, wanted) for extra in (*r.extras, "")]
    while todo:
        name, extra = todo.pop()
        key = (canonicalize_name(name), extra)
        if key in found:
            continue
        try:
            needs = OURS.get(extra, []) if name == "statetap" else metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(key)
        for need in map(Requirement, needs):
            if (
                name == "statetap"
                or need.marker is None
                or need.marker.evaluate({**default_environment(), "python_full_version": LEAST, "extra": extra})
            ):
                todo += [(need.name, e) for e in (*need.extras, "")]
    return {name for name, _ in found}


def requirements(file: str) -> str:
    lock = locked()
    lines = sorted(lock[name] for name in closure(IMAGES[file]) - NOT_HERE if name in lock)
    return f"# Of lock.txt, for an image: made by python -m tests.support.locks. Installed --no-deps.\n{chr(10).join(lines)}\n"


if __name__ == "__main__":
    for file in IMAGES:
        (FOLDER / file).write_text(requirements(file))
