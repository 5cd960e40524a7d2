"""Messages for errors at the end of a stage or a command. A user who can mend the cause sees one message without a
traceback; anything else is one block that says it is a bug, what to send, and where.

Text of others may stand in any message: it is shown plain, and what looks like a key is taken out.

`pip install captrain` is a light installation: logs are diagnosed, results read and runs planned without torch, and the
packages that only training, drawing and DVC need are ten times as large as the rest. Where something of the kind is
missing, the message names the extra; what is a complement of an answer, such as a figure, is left out and said so.
"""

import errno
import platform
import re
import sys
import textwrap
import traceback
from importlib.util import find_spec
from pathlib import Path

from captrain import __version__
from captrain.errors import InfrastructureError, UserError
from captrain.records import plain, redacted
from captrain.run import find_project

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

EXTRAS = {
    **dict.fromkeys(("submitit", "hydra_plugins"), "slurm"),
    **dict.fromkeys(("accelerate", "datasets", "peft", "safetensors", "tokenizers", "torch", "transformers"), "train"),
    **dict.fromkeys(
        ("deepdiff", "dvc", "fastapi", "gepa", "krippendorff", "matplotlib", "networkx", "openai"), "train"
    ),
    **dict.fromkeys(("openai", "ruamel", "scipy", "seaborn", "sklearn", "statsmodels", "tenacity"), "train"),
    **dict.fromkeys(("httpx2", "huggingface_hub", "trl", "uvicorn"), "train"),
    "sqlalchemy": "awm",
    "zstandard": "inspect",
}
"""Modules that the light installation lacks, each with the extra that it comes with."""


def has_package(module: str) -> bool:
    """Return whether a package is installed, without importing it."""
    return find_spec(module) is not None


def ending(error: BaseException) -> tuple[int, str]:
    """Choose the exit status for an error, and word what is printed of it; "" for nothing."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted; what is whole is kept, and the same command goes on from it"
    if isinstance(error, BrokenPipeError):
        return 0, ""
    status, package = USER, str(error.name).partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if isinstance(error, UserError):
        problem, remedy = error.problem, error.remedy
    elif package in EXTRAS:
        problem = f"this needs {package}, which the light installation leaves out"
        remedy = f"pip install 'captrain[{EXTRAS[package]}]'"
    elif problem := disk_fault(error):
        remedy = FREE
    elif isinstance(error, InfrastructureError):
        problem, remedy = f"infrastructure: {error}", "mend it and run again; what is whole is kept"
    elif isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # what Path.resolve raises
        problem = f"{str(error).removeprefix('Symlink loop from ')} is a link that leads to itself"
        remedy = "remove it, or name another place"
    elif isinstance(error, MemoryError):
        problem, remedy = "memory ran out", "a smaller machine.batch or machine.workers, or a smaller input"
    elif isinstance(error, OSError) and error.filename is not None:
        problem = f"{error.filename}: {(error.strerror or 'it cannot be used').lower()}"
        remedy = "see that it is there, is of that kind, and may be used"
    elif place := _own_place(error):
        problem = f"{place} raised {''.join(traceback.format_exception_only(error)).strip()}"
        remedy = "mend it there: that is code of this project"
    else:
        status, problem = BUG, "this is a bug in captrain and no mistake of yours"
        frames = textwrap.indent("".join(traceback.format_exception(error)).rstrip(), "  ")
        remedy = (
            "open an issue where you have captrain from, with these lines and the command:\n"
            f"  captrain {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
            f"  command: {' '.join(sys.argv)}\n{frames}"
        )
    return status, redacted(plain(f"error: {problem}\n  remedy: {remedy}"))


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
