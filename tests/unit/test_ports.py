"""Ports of processes that bind them long after they were chosen."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from statetap.cli.ports import LOWEST, RANGE, lasting_free_port
from statetap.contracts.errors import EngineError
from statetap.engine import launcher
from statetap.engine.failure import FAILED_FILE
from statetap.engine.port import check_port, is_taken


def test_a_port_is_not_one_that_the_kernel_gives_to_connections(tmp_path: Path) -> None:
    """Seen to fail with the port that the kernel gives for 0: an engine lost it to a connection while its model was loaded."""
    first = int(RANGE.read_text().split()[0])
    found = {lasting_free_port() for _ in range(20)}
    assert all(LOWEST <= port < first for port in found) and len(found) > 1
    assert not any(is_taken("127.0.0.1", port) for port in found)
    (tmp_path / "range").write_text("1024 65535")
    assert not is_taken("127.0.0.1", lasting_free_port(tmp_path / "range"))  # where there is nothing below


def test_a_taken_port_ends_the_engine_before_anything_is_loaded(tmp_path: Path) -> None:
    """Seen to fail without the look: SGLang said so after it had loaded the model."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(EngineError, match=f"port {port}"):
            check_port("127.0.0.1", port, patience_s=0.5)
        assert time.monotonic() - began < 3
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(launcher, "check_port", lambda host, number: check_port(host, number, 0.0))
            launcher.main(["--model", "none", "--tap", str(tmp_path), "--port", str(port)])
        assert f"port {port} of 127.0.0.1 is taken" in json.loads((tmp_path / FAILED_FILE).read_text())["message"]
    check_port("127.0.0.1", port, patience_s=0.0)  # free again, though connections to it may linger
