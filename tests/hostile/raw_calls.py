"""Makes every system call by number, except those that only exit or wait."""

import ctypes
import errno
import platform

HARMLESS = {
    "x86_64": {0, 1, 3, 7, 8, 9, 10, 11, 12, 13, 14, 15, 20, 23, 24, 25, 28, 32, 35, 39, 60, 96, 97, 98, 102, 104, 107,
               108, 110, 131, 186, 201, 202, 204, 219, 228, 229, 230, 231, 270, 271, 273, 318, 334},
    "aarch64": {57, 62, 63, 64, 66, 72, 73, 93, 94, 98, 99, 101, 113, 114, 115, 123, 124, 128, 132, 134, 135, 139, 163,
                165, 169, 172, 173, 174, 175, 176, 177, 178, 214, 215, 216, 222, 226, 233, 23, 278, 293},
}  # fmt: skip
X32 = 0x40000000


def attack(argument):
    libc = ctypes.CDLL(None, use_errno=True)
    harmless = HARMLESS[platform.machine()]
    through = []
    for number in [*range(512), *(X32 + number for number in range(512))]:
        # 335 and 336 of x86-64 pass every filter: outside of a probe of the kernel's they end the caller, or fail.
        if number in harmless or (platform.machine() == "x86_64" and number in (335, 336)):
            continue
        ctypes.set_errno(0)
        # Of fcntl, ioctl and prlimit64 these are no commands that anybody may give.
        result = libc.syscall(number, 3, 8, 1, 0, 0, 0)
        if result != -1 or ctypes.get_errno() != errno.EPERM:
            through.append(number)
    return f"through: {through}"
