# pyright: reportMissingImports=false
"""Means by which a process gives up what it could do to others, for good: limits, Landlock, seccomp; and the proof.

To be called in a fresh, single-threaded child before any code of an environment runs. Each layer alone has gaps:
limits bound memory, time and files; Landlock closes the file system and TCP, but neither processes nor datagrams;
seccomp closes all of them at the door of the kernel.
"""

import ctypes
import errno
import mmap
import os
import resource
import socket
import struct
from collections.abc import Callable, Collection

from seccomp import program

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
"""Bytes of memory, seconds of processor time, and what nobody needs."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SIGKILL = 9
LIBC = ctypes.CDLL(None, use_errno=True)
# Looked up here, by the fork server, and not anew in each of its processes.
PRCTL, SYSCALL = getattr(LIBC, "prctl", None), LIBC.syscall
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446
"""Numbers of system calls, the same on all machines."""


def confine(layers: Collection[str], server: int) -> None:
    """Apply layers to this process, all that are named or none of its code may run.

    Args:
        layers: of "rlimits", "landlock", "seccomp".
        server: process id of the fork server, without which this process must not live.

    Raises:
        OSError: a layer is not to be had here.
    """
    if "rlimits" in layers:
        limit(LIMITS)
    if hasattr(os, "pidfd_open"):  # Linux
        control(PR_SET_PDEATHSIG, SIGKILL)
        control(PR_SET_DUMPABLE, 0)
        if os.getppid() != server:
            os._exit(1)
    if "landlock" in layers:
        landlock()
    if "seccomp" in layers:
        seccomp()


def limit(limits: dict[str, int]) -> None:
    """Set resource limits, by their names without RLIMIT_, and never back; macOS has fewer of them."""
    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            _, hard = resource.getrlimit(kind)
            value = most if hard == resource.RLIM_INFINITY else min(most, hard)
            # Past the hard limit of time comes SIGKILL, which does not say why.
            most = value + (name == "CPU" and value != hard)
            try:
                resource.setrlimit(kind, (value, most))
            except ValueError as error:
                raise OSError(f"RLIMIT_{name}: {error}") from None


def landlock() -> None:
    """Handle every right that this kernel knows, and grant none."""
    abi = system_call(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    # See linux/landlock.h: rights of files grew with versions 2, 3 and 5, TCP came with 4, sockets and signals with 6.
    files = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1
    rights = struct.pack("QQQ", files, 3, 3)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = system_call(LANDLOCK_CREATE_RULESET, rights, ctypes.c_size_t(len(rights)), ctypes.c_uint(0))
    control(PR_SET_NO_NEW_PRIVS, 1)
    system_call(LANDLOCK_RESTRICT_SELF, ruleset, ctypes.c_uint(0))
    os.close(ruleset)


class Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def seccomp() -> None:
    """Leave this process the system calls of `seccomp.program`, and its children, if it had any."""
    if struct.calcsize("P") != 8:
        raise OSError("no filter for a 32-bit process")
    code = program(os.uname().machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_program = Program(len(code) // 8, ctypes.addressof(buffer))
    control(PR_SET_NO_NEW_PRIVS, 1)
    control(PR_SET_SECCOMP, 2, ctypes.byref(filter_program))


def control(option: int, value: int, more: object = 0) -> None:
    """prctl(2)."""
    if PRCTL is None or PRCTL(option, ctypes.c_ulong(value), more, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def system_call(number: int, *arguments: object) -> int:
    """syscall(2)."""
    result = SYSCALL(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}")
    return result


def probe() -> dict[str, bool]:
    """Try everything that this process should not be able to do: name -> it is blocked."""
    return {name: blocked(attempt) for name, attempt in ATTEMPTS.items()}


def blocked(attempt: Callable[[], object]) -> bool:
    """Make an attempt and tell if it is refused."""
    try:
        attempt()
    except (OSError, MemoryError):
        return True
    return False


def create() -> None:
    """Create a file, in the first place where one could."""
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
    """Reach a port of this machine; that nobody listens is an answer, too."""
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
    """Run a program; one that is not there, so that this process goes on."""
    try:
        os.execv("/nothing", ["/nothing"])
    except FileNotFoundError:
        return


def peek() -> None:
    """Read memory of the process that started this one."""
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
"""By what stays open where one of them is not refused."""
