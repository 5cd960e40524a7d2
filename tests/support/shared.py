"""Files that are made once a suite, whichever of its processes asks first."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from captrain.run import exclusive


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder below the suite's temporary one, which all workers of xdist share, made by the first that asks; the
    others wait. Whoever changes anything there changes it for all: it is for reading and copying.

    Args:
        factory: the fixture.
        name: of the folder; one for each way to make it.
        make: fills the folder, which is there and empty.
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
