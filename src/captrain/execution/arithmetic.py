"""A process that computes with torch on a CPU: how many threads it has, and that it keeps its memory."""

import ctypes
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt(3)."""
NEVER = 2**31 - 1


def prepare_torch(threads: int = 1) -> None:
    """Make this process fit for many small products of matrices.

    One thread, unless it has the machine for itself: other processes use the other cores better. And the C library
    keeps what is freed: glibc gives every block above 128 KiB back to the system at once, and to get its pages again
    for the next activation took half of the time of training. What a process has once used it keeps until its end.
    """
    import torch

    torch.set_num_threads(threads)
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(MMAP_MAX, 0)
        library.mallopt(TRIM_THRESHOLD, NEVER)
