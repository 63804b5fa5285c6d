"""The stack in containers, once for all tests of this folder: the host's Docker where it has one, else an engine of our own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.containers.compose import Stack
from tests.containers.private import PrivateEngine


@pytest.fixture(scope="session")
def docker_environment() -> Iterator[dict[str, str]]:
    """What docker's command line needs, as environment."""
    looks = (["docker", "compose", "version"], ["docker", "info"])
    if shutil.which("docker") and all(subprocess.run(look, capture_output=True).returncode == 0 for look in looks):
        yield dict(os.environ)
        return
    if os.geteuid():
        pytest.skip("neither a Docker engine nor root, who could start one")
    with PrivateEngine() as engine:
        yield engine.environment


@pytest.fixture(scope="session")
def stack(docker_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Built and up, healthy. Everything of it is removed at the end."""
    with Stack(docker_environment, tmp_path_factory.mktemp("compose")) as made:
        yield made
