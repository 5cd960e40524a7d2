"""Settings for a process that computes with torch on a CPU: one thread, and no returned memory."""

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt(3)."""
NEVER = 2**31 - 1
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}
"""Environment variables of glibc. If the user sets one, the settings here do not apply."""


def prepare_torch() -> None:
    """Tune this process for many small matrix products.

    It gets one thread, because threads spin while they wait, and other processes use the cores better
    (`captrain.models.passes`). And glibc keeps freed memory: by default it returns blocks above 128 KiB to the system
    at once, and getting the pages back took half of the training time.
    """
    import torch

    torch.set_num_threads(1)
    if GIVING_BACK & os.environ.keys():
        return
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(MMAP_MAX, 0)
        library.mallopt(TRIM_THRESHOLD, NEVER)
