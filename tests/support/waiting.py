"""Waits for what another thread or process does.

A machine that is slow or busy makes that late, and late is no failure: PATIENCE is far beyond all work of a test, and
only ends what would never end.
"""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = 600.0
Found = TypeVar("Found")


def until(holds: Callable[[], Found]) -> Found:
    """Wait for a function to return something true, and return that."""
    deadline = time.monotonic() + PATIENCE
    while not (found := holds()):
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.01)
    return found
