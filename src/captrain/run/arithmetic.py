"""A process that computes with torch on a CPU: one thread, and memory that it keeps."""

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt(3)."""
NEVER = 2**31 - 1
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}
"""Variables by which a user asks glibc to give memory back; they go before what is set here."""


def prepare_torch() -> None:
    """Make this process fit for many small products of matrices.

    One thread: threads wait for each other by spinning, and other processes use the other cores better
    (`captrain.models.passes`). And the C library
    keeps what is freed: glibc gives every block above 128 KiB back to the system at once, and to get its pages again
    for the next activation took half of the time of training. What a process has once used it keeps until its end.
    """
    import torch

    torch.set_num_threads(1)
    if GIVING_BACK & os.environ.keys():
        return
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(MMAP_MAX, 0)
        library.mallopt(TRIM_THRESHOLD, NEVER)
