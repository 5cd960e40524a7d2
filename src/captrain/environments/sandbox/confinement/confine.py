# pyright: reportMissingImports=false
"""Confines the current process for good with resource limits, Landlock and seccomp, and proves it.

Call it in a fresh, single-threaded child before any code of an environment runs. Each layer alone has gaps: limits
bound memory, time and files; Landlock closes the file system and TCP, but not processes or datagrams; seccomp refuses
the system calls of all of these. The fork server has no packages, so the filter is assembled here as classic BPF: see
bpf(4) and seccomp(2).
"""

import ctypes
import errno
import mmap
import os
import resource
import socket
import struct
from collections.abc import Callable, Collection
from functools import cache

LIMITS = {
    "AS": 512 << 20,
    "CPU": 20,
    "FSIZE": 0,
    "NOFILE": 32,
    "NPROC": 0,
    "CORE": 0,
    "MEMLOCK": 0,
    "MSGQUEUE": 0,
    "STACK": 8 << 20,
}
"""Bytes of memory, seconds of processor time, and resources that nobody needs."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SIGKILL = 9
LIBC = ctypes.CDLL(None, use_errno=True)
# Looked up once, by the fork server.
PRCTL, SYSCALL = getattr(LIBC, "prctl", None), LIBC.syscall
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446
"""Numbers of system calls, the same on all machines."""


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
"""Index in the tables, and AUDIT_ARCH of linux/audit.h."""
X32 = 0x40000000
"""Bit in the call numbers of x86-64's x32 ABI."""

LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000
"""SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EPERM; SECCOMP_RET_KILL_PROCESS."""
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data; arguments have 64 bits, the lower half first."""


def confine(layers: Collection[str], server: int) -> None:
    """Apply all given layers to this process.

    Args:
        layers: of "rlimits", "landlock", "seccomp".
        server: process id of the fork server; this process ends with it.

    Raises:
        OSError: a layer is not available here.
    """
    if "rlimits" in layers:
        limit(LIMITS)
    if hasattr(os, "pidfd_open"):  # Linux
        control(PR_SET_PDEATHSIG, SIGKILL)
        control(PR_SET_DUMPABLE, 0)
        if os.getppid() != server:
            os._exit(1)
    if "landlock" in layers:
        # Handle every right of this kernel, and grant none. See linux/landlock.h: ABI versions 2, 3 and 5 added rights
        # of files, 4 added TCP, 6 added sockets and signals.
        abi = system_call(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
        files = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1
        rights = struct.pack("QQQ", files, 3, 3)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
        ruleset = system_call(LANDLOCK_CREATE_RULESET, rights, ctypes.c_size_t(len(rights)), ctypes.c_uint(0))
        control(PR_SET_NO_NEW_PRIVS, 1)
        system_call(LANDLOCK_RESTRICT_SELF, ruleset, ctypes.c_uint(0))
        os.close(ruleset)
    if "seccomp" in layers:
        if struct.calcsize("P") != 8:
            raise OSError("no filter for a 32-bit process")
        code = program(os.uname().machine)
        buffer = ctypes.create_string_buffer(code, len(code))
        control(PR_SET_NO_NEW_PRIVS, 1)
        # struct sock_fprog: the number of instructions, and where they are.
        control(PR_SET_SECCOMP, 2, struct.pack("HP", len(code) // 8, ctypes.addressof(buffer)))


def limit(limits: dict[str, int]) -> None:
    """Set resource limits for good, by name without RLIMIT_; macOS lacks some."""
    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            _, hard = resource.getrlimit(kind)
            value = most if hard == resource.RLIM_INFINITY else min(most, hard)
            # Beyond the hard limit of time, SIGKILL would hide the reason.
            most = value + (name == "CPU" and value != hard)
            try:
                resource.setrlimit(kind, (value, most))
            except ValueError as error:
                raise OSError(f"RLIMIT_{name}: {error}") from None


def control(option: int, value: int, more: object = 0) -> None:
    """Call prctl(2)."""
    if PRCTL is None or PRCTL(option, ctypes.c_ulong(value), more, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def system_call(number: int, *arguments: object) -> int:
    """Call syscall(2)."""
    result = SYSCALL(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}")
    return result


@cache
def program(machine: str) -> bytes:
    """Assemble the seccomp filter of a machine, an array of struct sock_filter.

    Calls outside of `CALLS` fail with EPERM. (Newer kernels let x86-64's 335 and 336 past every filter, but they are
    useless outside of kernel probes.) The allowed calls work with memory, clocks and open files. None can open, create,
    connect, start or signal anything.

    Raises:
        OSError: the system calls of this machine are unknown.
    """
    if machine not in MACHINES:
        raise OSError(f"no filter for {machine}")
    place, architecture = MACHINES[machine]
    # An instruction is (operation, value, label if true, label if false); None continues. Strings are labels.
    code: list[tuple[int, int, str | None, str | None] | str] = [
        (LOAD, ARCHITECTURE, None, None),
        (EQUAL, architecture, None, "kill"),
        (LOAD, NUMBER, None, None),
        (AT_LEAST, X32, "refuse", None),
    ]
    code += [(EQUAL, number, "allow", None) for numbers in CALLS.values() if (number := numbers[place]) is not None]
    for number, values in ((FCNTL, COMMANDS), (IOCTL, REQUESTS)):
        # Compare 32 bits of the second argument, as the kernel does.
        past = f"past {number[place]}"
        code += [(EQUAL, number[place], None, past), (LOAD, ARGUMENTS + 8, None, None)]
        code += [(EQUAL, value, "allow", None) for value in values]
        code += [(RETURN, REFUSE, None, None), past]
    # prlimit may only read: both halves of the pointer to new limits, the third argument, must be null.
    code += [
        (EQUAL, PRLIMIT[place], None, "refuse"),
        (LOAD, ARGUMENTS + 16, None, None),
        (EQUAL, 0, None, "refuse"),
        (LOAD, ARGUMENTS + 20, None, None),
        (EQUAL, 0, "allow", "refuse"),
        "refuse",
        (RETURN, REFUSE, None, None),
        "allow",
        (RETURN, ALLOW, None, None),
        "kill",
        (RETURN, KILL, None, None),
    ]
    places: dict[str | None, int] = {}
    instructions: list[tuple[int, int, str | None, str | None]] = []
    for line in code:
        if isinstance(line, str):
            places[line] = len(instructions)
        else:
            instructions.append(line)
    packed = b""
    for index, (operation, value, yes, no) in enumerate(instructions, start=1):
        packed += struct.pack("<HBBI", operation, places.get(yes, index) - index, places.get(no, index) - index, value)
    return packed


def probe() -> dict[str, bool]:
    """Try all `ATTEMPTS`, and return which are blocked."""
    blocked = dict.fromkeys(ATTEMPTS, False)
    for name, attempt in ATTEMPTS.items():
        try:
            attempt()
        except (OSError, MemoryError):
            blocked[name] = True
    return blocked


def create() -> None:
    """Create a file in the first folder that allows it."""
    for folder in (".", "/tmp", "/dev/shm"):
        path = f"{folder}/.captrain-{os.getpid()}"
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except OSError:
            continue
        os.unlink(path)
        return
    raise PermissionError


def connect() -> None:
    """Reach a port of this machine; "connection refused" counts as reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as channel:
        channel.settimeout(1)
        if channel.connect_ex(("127.0.0.1", 1)) not in (0, errno.ECONNREFUSED):
            raise PermissionError


def fork() -> None:
    """Start a process."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def execute() -> None:
    """Run a missing program, so that this process continues."""
    try:
        os.execv("/nothing", ["/nothing"])
    except FileNotFoundError:
        return


def peek() -> None:
    """Read memory of the parent process."""
    vector = struct.pack("QQ", ctypes.addressof(ctypes.create_string_buffer(1)), 1)
    process_vm_readv = {"x86_64": 310, "aarch64": 270}.get(os.uname().machine)
    try:
        os.close(os.open(f"/proc/{os.getppid()}/mem", os.O_RDONLY))
    except OSError:
        if process_vm_readv is None:
            raise
        size = ctypes.c_ulong(1)
        system_call(process_vm_readv, os.getppid(), vector, size, vector, size, ctypes.c_ulong(0))


ATTEMPTS: dict[str, Callable[[], object]] = {
    "reading files": lambda: os.close(os.open("/etc/passwd", os.O_RDONLY)),
    "listing folders": lambda: os.listdir("/"),
    "creating files": create,
    "connecting": connect,
    "sending datagrams": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
    "starting processes": fork,
    "running programs": execute,
    "signalling": lambda: os.kill(os.getppid(), 0),
    "reading memory": peek,
    "taking memory": lambda: mmap.mmap(-1, 1 << 30).close(),
}
"""Attempts to get out, by the capability that is exposed if they succeed."""
