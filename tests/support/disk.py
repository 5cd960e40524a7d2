"""Full and read-only disks for one process: a forked child in which the kernel refuses writes."""

import ctypes
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

NEW_MOUNTS, READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 0x20000, 0x1, 0x20, 0x1000, 0x4000, 0x40000
NO_MOUNT = 77
"""Exit status if this process may not mount."""
FULL = "full"
"""Folder that becomes the full disk."""


def limited() -> None:
    """Stop this process's files from growing, like a quota or `ulimit -f`."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def read_only() -> None:
    """Make the current folder read-only for this process, as after a disk error."""
    here = str(Path.cwd())
    _mount(here, here, None, BIND)
    _mount(here, here, None, BIND | REMOUNT | READ_ONLY)
    os.chdir(here)


def full() -> None:
    """Mount a disk without free space for this process, and put its temporary files there."""
    place = Path(FULL).resolve()
    _mount("tmpfs", str(place), b"size=4096", 0)
    with suppress(OSError):
        (place / "filler").write_bytes(bytes(1 << 20))
    os.environ["TMPDIR"] = tempfile.tempdir = str(place)


@cache
def can_mount() -> bool:
    """Return whether this process may mount."""
    with tempfile.TemporaryDirectory() as folder:
        return run_hurt(Path(folder), read_only, lambda: 0)[0] != NO_MOUNT


def _mount(source: str, place: str, options: bytes | None, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = (source.encode(), place.encode(), b"tmpfs")
    if (
        libc.unshare(NEW_MOUNTS)
        or libc.mount(b"/", b"/", None, RECURSIVE | PRIVATE, None)
        or libc.mount(*words, flags, options)
    ):
        os._exit(NO_MOUNT)


def run_hurt(folder: Path, fault: Callable[[], None], act: Callable[[], int]) -> tuple[int, str]:
    """Run `act` in a fork and a folder under a fault; return exit status and output."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        status = 99
        try:
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            # The existing handlers write to files of the test runner.
            sys.stdout = sys.stderr = os.fdopen(writing, "w", buffering=1)
            os.close(reading)
            os.chdir(folder)
            fault()
            status = act()
            print(f"stayed: {remains()}")
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        os._exit(status)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as words:
        text = words.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def remains() -> list[str]:
    """List the files on the full disk; it disappears with the process."""
    return sorted(path.name for path in Path(FULL).rglob("*") if path.name != "filler")
