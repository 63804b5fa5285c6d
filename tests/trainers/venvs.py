"""A virtual environment for each trainer's package, which sees the one it is made from.

python -m tests.trainers.venvs FOLDER     makes those that are not there or whose requirements changed (`make trainers`)
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
NAMES = sorted(p.stem for p in REQUIREMENTS.glob("*.txt"))


def python_of(folder: Path, name: str) -> Path:
    return folder / name / "bin" / "python"


def make(folder: Path, name: str) -> None:
    """Its packages come first, then those of this environment (torch and transformers are not installed again)."""
    wanted = f"{sys.version}\n{(REQUIREMENTS / f'{name}.txt').read_text()}"
    stamp = folder / name / ".made"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"making {folder / name}", flush=True)
    venv.create(folder / name, clear=True, with_pip=True)
    python = python_of(folder, name)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", "install", "--no-deps"]
    done = subprocess.run([*pip, "-r", str(REQUIREMENTS / f"{name}.txt")], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr[-4000:])
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, capture_output=True, text=True
    )
    Path(site.stdout.strip(), "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    stamp.write_text(wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name in NAMES:
        make(folder, name)


if __name__ == "__main__":
    main()
