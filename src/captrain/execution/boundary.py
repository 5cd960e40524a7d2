"""Messages for errors at the end of a stage or a command. A user who can mend the cause sees one message without a
traceback; anything else is one block that says it is a bug, what to send, and where.

Text of others may stand in any message: it is shown plain, and what looks like a key is taken out.
"""

import errno
import platform
import re
import sys
import traceback
from pathlib import Path

from captrain import __version__
from captrain.config import find_project
from captrain.errors import InfrastructureError, UserError
from captrain.records import plain, redacted

PACKAGE = Path(__file__).resolve().parents[1]
USER, BUG, INTERRUPTED = 2, 70, 130
"""Exit statuses: of what the user can mend, of a bug (EX_SOFTWARE), of an interruption."""
DISK = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of this disk is used up",
    errno.EROFS: "the disk is read-only",
    errno.EFBIG: "a file would be larger than a limit allows (ulimit -f)",
    errno.EIO: "the disk does not read or write",
}
DISK_WORDS = {
    "No space left on device": DISK[errno.ENOSPC],
    "database or disk is full": DISK[errno.ENOSPC],
    "disk I/O error": f"{DISK[errno.EIO]}, or {DISK[errno.EFBIG]}",
    "attempt to write a readonly database": DISK[errno.EROFS],
    "No usable temporary directory": "no folder takes temporary files: the disk is full or read-only, or a file would "
    "be larger than a limit allows (ulimit -f)",
}
"""Words of libraries for faults of the disk without an error number, Python's `tempfile` and SQLite among them."""
FREE = (
    "free space or lift the limit, and run again: what is whole is kept, and nothing half-written stays. What may go "
    "first: .cache/ but for answers and jobs (`make clean`), old versions in DVC's cache (`dvc gc --workspace`)"
)

LINK = "remedy: remove it, or name another place"


def ending(error: BaseException) -> tuple[int, str]:
    """Choose the exit status for an error, and word what is printed of it; "" for nothing."""
    status, text = _ending(error)
    return status, redacted(plain(text))


def _ending(error: BaseException) -> tuple[int, str]:
    if isinstance(error, UserError):
        return USER, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted; what is whole is kept, and the same command goes on from it"
    if isinstance(error, BrokenPipeError):
        return 0, ""
    if fault := disk_fault(error):
        return USER, f"error: {fault}\n  remedy: {FREE}"
    if isinstance(error, InfrastructureError):
        return USER, f"error: infrastructure: {error}\n  remedy: mend it and run again; what is whole is kept"
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # what Path.resolve raises
        return USER, f"error: {str(error).removeprefix('Symlink loop from ')} is a link that leads to itself\n  {LINK}"
    if isinstance(error, MemoryError):
        return USER, "error: memory ran out\n  remedy: a smaller machine.batch or machine.workers, or a smaller input"
    if isinstance(error, OSError) and error.filename is not None:
        place, reason = str(error.filename), (error.strerror or "it cannot be used").lower()
        return USER, f"error: {place}: {reason}\n  remedy: see that it is there, is of that kind, and may be used"
    if place := _own_place(error):
        fault = "".join(traceback.format_exception_only(error)).strip()
        return USER, f"error: {place} raised {fault}\n  remedy: mend it there: that is code of this project"
    return BUG, _bug(error)


def _own_place(error: BaseException) -> str:
    """Name the innermost line of the project's own, where no code of captrain was called from there; "" otherwise."""
    project = find_project(Path.cwd())
    if project is None or project.resolve() / "src/captrain" == PACKAGE:
        return ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path, installed = Path(frame.filename).resolve(), {"site-packages", "dist-packages"}
        if path.is_relative_to(PACKAGE):
            return ""
        if path.is_file() and path.is_relative_to(project.resolve()) and not installed & {*path.parts}:
            return f"{path.relative_to(project.resolve())}, line {frame.lineno}"
    return ""


def disk_fault(error: BaseException) -> str:
    """Say what is wrong with the disk where that raised an error, whoever wrapped it; "" where it did not."""
    link: BaseException | None = error
    while link is not None:
        number = link.errno if isinstance(link, OSError) else None
        if number is None and (match := re.search(r"\(?(?:os error|code:|errno) (\d+)", str(link), re.IGNORECASE)):
            number = int(match[1])
        if number in DISK:
            place = getattr(link, "filename", None)
            return f"{DISK[number]}{f' ({place})' if place else ''}"
        if words := next((words for words in DISK_WORDS if words in str(link)), ""):
            return DISK_WORDS[words]
        link = link.__cause__ or link.__context__
    return ""


def _bug(error: BaseException) -> str:
    frames = "".join(traceback.format_exception(error)).rstrip()
    block = "\n".join(f"  {line}" for line in frames.splitlines())
    return (
        "error: this is a bug in captrain and no mistake of yours\n"
        "  remedy: open an issue where you have captrain from, with these lines and the command:\n"
        f"  captrain {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
        f"  command: {' '.join(sys.argv)}\n{block}"
    )
