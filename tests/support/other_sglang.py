"""Another release of SGLang beside the environment's own, for the engine's tests: ``python -m tests.support.other_sglang VERSION FOLDER``

Its package alone is installed (``--no-deps``); torch, transformers and the rest are the environment's. Put FOLDER first on PYTHONPATH.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# transformers has come to know these model types itself, and takes no second registration
_REGISTER = re.compile(r"(AutoConfig\.register\((?!.*exist_ok).*)\)$", re.M)


def install(version: str, folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--upgrade", "--target", str(folder)]
    subprocess.run([*pip, f"sglang=={version}"], check=True)
    for file in (folder / "sglang" / "srt" / "configs").glob("*.py"):
        text = file.read_text()
        if (changed := _REGISTER.sub(r"\1, exist_ok=True)", text)) != text:
            file.write_text(changed)


if __name__ == "__main__":
    install(sys.argv[1], Path(sys.argv[2]))
