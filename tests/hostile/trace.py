"""Tries to attach to its parent as a debugger, and to read and write its memory."""

import ctypes
import os
import platform
import struct


def attack(argument):
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(8)
    vector = struct.pack("QQ", ctypes.addressof(buffer), 8)
    read = {"x86_64": 310, "aarch64": 270}[platform.machine()]
    held = [
        libc.ptrace(16, os.getppid(), 0, 0),
        libc.syscall(read, os.getppid(), vector, 1, vector, 1, 0),
        libc.syscall(read + 1, os.getppid(), vector, 1, vector, 1, 0),
    ]
    return f"{sum(result >= 0 for result in held)} of {len(held)}"
