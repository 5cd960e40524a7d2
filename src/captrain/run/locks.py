"""Locks on files, so that two processes never do one piece of work twice.

The system releases a lock when its process ends, also when it is killed. A lock holds on all nodes that share the file.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file.

    Args:
        path: the lock file. It is created if it is missing, and it stays; its modification time tells when it was
            locked last.
        wait: whether to wait for another process that holds the lock.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is false.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
