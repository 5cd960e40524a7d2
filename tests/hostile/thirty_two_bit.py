"""Makes 32-bit system calls, whose numbers mean something else (on x86-64)."""

import ctypes
import mmap

GETPID = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"


def attack(argument):
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(GETPID)
    return str(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
