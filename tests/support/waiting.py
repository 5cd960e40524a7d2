"""Waits for another thread or process.

A slow or busy machine may take long, which is not a failure. PATIENCE is far above the duration of any test; it only
ends what would wait forever.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

PATIENCE = 600.0
Found = TypeVar("Found")


def until(holds: Callable[[], Found]) -> Found:
    """Wait until a function returns something true, and return it."""
    deadline = time.monotonic() + PATIENCE
    while not (found := holds()):
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.01)
    return found


def alive(process: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
