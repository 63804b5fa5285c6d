"""The images' requirements are what the lock says, and all that their extras need."""

from __future__ import annotations

import pytest

from tests.support.locks import FOLDER, IMAGES, closure, requirements


@pytest.mark.parametrize("file", sorted(IMAGES))
def test_the_images_pins_are_those_of_the_lock(file: str) -> None:
    """Seen to fail with a package left out of control.txt."""
    assert (FOLDER / file).read_text() == requirements(file), "run python -m tests.support.locks"


def test_what_the_first_pythons_need_is_there() -> None:
    """redis wants async-timeout before Python 3.11.3; Debian 12 has 3.11.2."""
    assert "async-timeout" in closure(IMAGES["control.txt"])
    assert "torch" not in requirements("control.txt").replace("torch_", "")
