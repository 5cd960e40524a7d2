"""Folders that are made once per test run, by the first process that needs them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from captrain.run import exclusive


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that all xdist workers share; the first one to ask makes it, the others wait.

    Tests may read and copy it, not change it.

    Args:
        factory: the pytest fixture.
        name: name of the folder, one for each way to make it.
        make: fills the folder, which exists and is empty.
    """
    suite = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        suite = suite.parent
    folder, whole = suite / "shared" / name, suite / "shared" / f"{name}.whole"
    with exclusive(suite / "shared" / f"{name}.lock"):
        if not whole.exists():
            folder.mkdir()
            make(folder)
            whole.touch()
    return folder
