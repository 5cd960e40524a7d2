"""Locks on files, which keep two processes from doing one piece of work twice, on all nodes that share the files.

A lock is let go when the process that holds it ends, however that comes about, so that none outlives a kill.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(path: Path, wait: bool = True) -> Iterator[int]:
    """Hold the lock that a file stands for.

    Args:
        path: of the file, which is made where there is none, and stays. Its time of change says when it was locked
            last.
        wait: whether to wait for another process that holds it.

    Yields:
        The file descriptor: a child process that inherits it holds the lock as long as it lives.

    Raises:
        BlockingIOError: another process holds it, and that is not to be waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file.fileno()
