"""Tries to remove its confinement."""

import ctypes
import os
import resource


def attack(argument):
    libc = ctypes.CDLL(None, use_errno=True)
    off = [libc.prctl(option, value, 0, 0, 0) for option, value in ((22, 0), (22, 2), (4, 1), (1, 0), (38, 0), (47, 2))]
    off += [libc.setuid(0), libc.unshare(0x10000000), libc.chroot(b"/"), libc.personality(0x0040000)]
    loosened = sum(result != -1 for result in off)
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):
        try:
            resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            loosened += 1
        except (OSError, ValueError):
            continue
    return f"loosened {loosened} as {len(str(os.getpid())) > 0}"
