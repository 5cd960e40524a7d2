"""Allowlist of the system calls of a confined process, as a program for the kernel's seccomp filter.

What is not named here fails with EPERM, but for x86-64's 335 and 336, which newer kernels let past every filter, and
which are of no use outside of their own probes. What is named can work with memory, clocks and files that are open
already; nothing can open, create, connect, start or signal anything.
The fork server runs without any package, so the filter is put together here: classic BPF, see bpf(4) and seccomp(2).
"""

import struct
from functools import cache

CALLS = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "poll": (7, None),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "writev": (20, 66),
    "select": (23, None),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "dup": (32, 23),
    "nanosleep": (35, 101),
    "getpid": (39, 172),
    "exit": (60, 93),
    "gettimeofday": (96, 169),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "getppid": (110, 173),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "time": (201, None),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    "set_robust_list": (273, 99),
    "getrandom": (318, 278),
    "rseq": (334, 293),
}
"""Allowed with any arguments: numbers on x86-64 and on aarch64, from the kernel's asm/unistd_64.h and asm-generic."""
FCNTL, IOCTL, PRLIMIT = (72, 25), (16, 29), (302, 261)
COMMANDS = (0, 1, 2, 3, 1030)
"""Commands of fcntl: duplicate, and read or set a descriptor's flags. F_SETOWN and F_SETSIG could signal others."""
REQUESTS = (0x5401, 0x5450, 0x5451)
"""Requests of ioctl: TCGETS (is it a terminal?), FIONCLEX, FIOCLEX."""
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Place in the tables, and AUDIT_ARCH of linux/audit.h."""
X32 = 0x40000000
"""Set in the numbers of x86-64's other calling convention."""

LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000
"""SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EPERM; SECCOMP_RET_KILL_PROCESS."""
NUMBER, ARCHITECTURE = 0, 4
"""Offsets in struct seccomp_data."""


@cache
def program(machine: str) -> bytes:
    """The filter for a machine, as an array of struct sock_filter.

    Raises:
        OSError: its system calls are not known here.
    """
    if machine not in MACHINES:
        raise OSError(f"no filter for {machine}")
    place, architecture = MACHINES[machine]
    # Of a jump: where to if it holds, and if not; None is the next instruction.
    code: list[tuple[int, int, str | None, str | None] | str] = [
        (LOAD, ARCHITECTURE, None, None),
        (EQUAL, architecture, None, "kill"),
        (LOAD, NUMBER, None, None),
        (AT_LEAST, X32, "refuse", None),
    ]
    code += [(EQUAL, number, "allow", None) for numbers in CALLS.values() if (number := numbers[place]) is not None]
    for number, argument, values in ((FCNTL, 1, COMMANDS), (IOCTL, 1, REQUESTS)):
        # The kernel, too, takes these commands for 32 bits.
        past = f"past {number[place]}"
        code += [(EQUAL, number[place], None, past), (LOAD, low(argument), None, None)]
        code += [(EQUAL, value, "allow", None) for value in values]
        code += [(RETURN, REFUSE, None, None), past]
    # Limits may be read: the pointer to new ones has to be null in both its halves.
    code += [
        (EQUAL, PRLIMIT[place], None, "refuse"),
        (LOAD, low(2), None, None),
        (EQUAL, 0, None, "refuse"),
        (LOAD, low(2) + 4, None, None),
        (EQUAL, 0, "allow", "refuse"),
        "refuse",
        (RETURN, REFUSE, None, None),
        "allow",
        (RETURN, ALLOW, None, None),
        "kill",
        (RETURN, KILL, None, None),
    ]
    return assemble(code)


def low(argument: int) -> int:
    """Offset of the lower half of an argument, on a little-endian machine."""
    return 16 + 8 * argument


def assemble(code: list[tuple[int, int, str | None, str | None] | str]) -> bytes:
    """Instructions, with names for places to jump to among them, as bytes."""
    places: dict[str, int] = {}
    instructions: list[tuple[int, int, str | None, str | None]] = []
    for line in code:
        if isinstance(line, str):
            places[line] = len(instructions)
        else:
            instructions.append(line)

    def distance(index: int, to: str | None) -> int:
        return 0 if to is None else places[to] - index - 1

    return b"".join(
        struct.pack("<HBBI", operation, distance(index, yes), distance(index, no), value)
        for index, (operation, value, yes, no) in enumerate(instructions)
    )
