"""One stack with the real SGLang for all tests that do not need their own: a start takes half a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from statetap.engine.tiny import make_tiny
from tests.support.stack import Up, start_up


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def up(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    running = start_up(folder / "store", model, folder / "up.log", "--data-dir", str(folder), "--", "--chunked-prefill-size", "512")
    yield running
    if running.process.poll() is None:
        running.stop()
