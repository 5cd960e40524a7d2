"""Messages for errors that end a stage or a command.

If the user can fix the cause, the message has the problem and the remedy, without a traceback. Any other error is
reported as a bug, with the lines to send. Messages may quote untrusted text, so control characters and keys are
removed.

`pip install captrain` is a light installation: it diagnoses logs, reads results and plans runs without torch. Packages
for training, drawing and DVC are ten times as large as the rest. If one of them is missing, the message names the
extra.
"""

import errno
import platform
import re
import sys
import textwrap
import traceback
from pathlib import Path

from captrain import __version__
from captrain.errors import InfrastructureError, UserError
from captrain.records import plain, redacted
from captrain.run import find_project

PACKAGE = Path(__file__).resolve().parents[1]
USER, BUG, INTERRUPTED = 2, 70, 130
"""Exit statuses: an error that the user can fix, a bug (EX_SOFTWARE), an interruption."""
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
"""Error messages of libraries, such as `tempfile` and SQLite, that mean a disk error but have no error number."""
NO_PROCESS = ("can't start new thread", "Resource temporarily unavailable", "unable to fork", "Thread creation failed")
"""Error messages which mean that the system cannot start another process or thread."""
FREE = (
    "free space or lift the limit, and run again. Finished work is kept, and no partial file stays. You can delete "
    ".cache/ except answers and jobs (`make clean`), and old versions in DVC's cache (`dvc gc --workspace`)"
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
"""Modules that the light installation lacks, with their extra."""


def ending(error: BaseException) -> tuple[int, str]:
    """Return the exit status for an error, and the text to print ("" for none)."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted; finished work is kept, and the same command resumes"
    if isinstance(error, BrokenPipeError):
        return 0, ""
    status, package = USER, str(error.name).partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if isinstance(error, UserError):
        problem, remedy = error.problem, error.remedy
    elif package in EXTRAS:
        problem = f"this needs {package}, which the light installation does not include"
        remedy = f"pip install 'captrain[{EXTRAS[package]}]'"
    elif problem := disk_fault(error):
        remedy = FREE
    elif _lacks_processes(error):
        problem = "the system allows no further process or thread (ulimit -u)"
        remedy = "raise the limit, end other programs, or set machine.workers=1 and OMP_NUM_THREADS=1"
    elif isinstance(error, InfrastructureError):
        problem, remedy = f"infrastructure: {error}", "fix it and run again; finished work is kept"
    elif isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # what Path.resolve raises
        problem = f"{str(error).removeprefix('Symlink loop from ')} is a link that leads to itself"
        remedy = "remove it, or choose another path"
    elif isinstance(error, MemoryError):
        problem, remedy = "out of memory", "lower machine.batch or machine.workers, or use a smaller input"
    elif isinstance(error, OSError) and error.filename is not None:
        problem = f"{error.filename}: {(error.strerror or 'it cannot be used').lower()}"
        remedy = "check that it exists, is the right kind of file, and is accessible"
    elif place := _own_place(error):
        problem = f"{place} raised {''.join(traceback.format_exception_only(error)).strip()}"
        remedy = "fix it there: this is code of your project"
    else:
        status, problem = BUG, "this is a bug in captrain, not your mistake"
        frames = textwrap.indent("".join(traceback.format_exception(error)).rstrip(), "  ")
        remedy = (
            "open an issue in captrain's repository with these lines:\n"
            f"  captrain {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
            f"  command: {' '.join(sys.argv)}\n{frames}"
        )
    return status, redacted(plain(f"error: {problem}\n  remedy: {remedy}"))


def _own_place(error: BaseException) -> str:
    """Return the innermost traceback line in the user's project, if the error happened there and not in captrain."""
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


def _lacks_processes(error: BaseException) -> bool:
    """Return whether a process or thread could not be started, however the error is wrapped."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError | RuntimeError) and any(words in str(link) for words in NO_PROCESS):
            return True
        link = link.__cause__ or link.__context__
    return False


def disk_fault(error: BaseException) -> str:
    """Return the disk error that caused an error, even if it is wrapped; "" if there is none."""
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
