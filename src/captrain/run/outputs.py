"""Writes a command's output into a user's folder, atomically and without overwriting the user's files.

Output is written to a temporary folder beside the user's folder. The user's other files are hard-linked into it, and
then the two folders exchange their names in one step. So the folder always has either all old files or all new ones.

The file `.captrain-outputs.json` in the folder lists the names and digests of captrain's files. A file that is not
listed, or was changed, belongs to the user. If an output would replace such a file, the command fails and the folder
stays as it is. The temporary folder is removed at the end, or, if the process was killed, by the next run with the same
folder.
"""

import ctypes
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from captrain.errors import UserError
from captrain.records import file_digest, publish_json, read_json
from captrain.run import find_project

LISTING = ".captrain-outputs.json"
"""Relative paths and digests of what captrain wrote into a folder."""

TEMPORARY = ".tmp"

FOLDERS = (
    *(".cache", ".dvc", ".git", ".github", ".venv", "artifacts", "components", "conf", "results", "scripts", "src"),
    *("stages", "tests"),
)
"""Folders of a project that belong to its stages, git or its author."""


@contextmanager
def user_outputs(folder: Path, names: Iterable[str] = (), *, whole: bool = True) -> Iterator[Path]:
    """Yield a temporary folder. If the block succeeds, its files move to `folder` all at once.

    Args:
        folder: the user's folder. It is created if missing.
        names: names of all files that the command may write, if known in advance. A conflict then fails before any
            work is done. Files of these names from an earlier run are removed if this run does not write them.
        whole: replace the folder as a whole. If false, or if the folder cannot be renamed, files are moved one by one.

    Raises:
        UserError: `folder` is a file, or a file that would be replaced is not captrain's.
    """
    require_folder(folder)
    names = {*names}
    _written_before(folder, names)
    is_new, place = not folder.exists(), folder.resolve()
    is_replaced = is_new or (whole and _can_be_replaced(place))
    beside, inside = (place.parent, f".{place.name}."), (place, ".captrain-")
    parent, start = beside if is_replaced else inside
    parent.mkdir(parents=True, exist_ok=True)
    for where, named in (beside, inside):
        _remove_leftovers(where, named)
    aside = parent / f"{start}{secrets.token_hex(4)}{TEMPORARY}"
    lock = _make_locked(aside)
    try:
        yield aside
        paths = [str(path.relative_to(aside)) for path in sorted(aside.rglob("*")) if path.is_file()]
        digests = _written_before(folder, paths)
        stale = names & digests.keys() - {*paths}
        digests |= {path: file_digest(aside / path) for path in paths}
        publish_json(aside / LISTING, {name: digests[name] for name in sorted(digests.keys() - stale)})
        if is_new and not place.exists():
            aside.rename(place)
        elif is_replaced:  # another process may have made it meanwhile
            _link_others(place, aside, {LISTING, *stale})
            _exchange(aside, place)
        else:
            for path in [*paths, LISTING]:
                (place / path).parent.mkdir(parents=True, exist_ok=True)
                (aside / path).replace(place / path)
            for path in stale:
                (place / path).unlink(missing_ok=True)
    finally:
        os.close(lock)
        shutil.rmtree(aside, ignore_errors=True)


def _make_locked(folder: Path) -> int:
    """Make a folder and return the descriptor of its lock. Retry if another run removed the folder before the lock.

    The system releases the lock when the process ends, also when it is killed.
    """
    while True:
        folder.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            with suppress(OSError):  # the file system has no locks: then no run removes a leftover either
                fcntl.flock(lock, fcntl.LOCK_SH)
            if folder.exists():
                return lock
            os.close(lock)


def _remove_leftovers(parent: Path, start: str) -> None:
    """Remove the temporary folders of killed runs: nobody holds their locks."""
    for path in parent.glob(f"{glob.escape(start)}{'[0-9a-f]' * 8}{TEMPORARY}"):
        with suppress(OSError):  # it is no folder, or another run uses or removes it
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _can_be_replaced(folder: Path) -> bool:
    """Return whether a folder can be renamed. A current folder cannot, because the user's shell would lose it."""
    is_current = Path.cwd().is_relative_to(folder)
    return not is_current and not folder.is_mount() and os.access(folder.parent, os.W_OK | os.X_OK)


def _link_others(source: Path, target: Path, left: Collection[str]) -> None:
    """Hard-link the files of `source` into `target`, except those in `left` and those that `target` already has."""

    def link(path: str, copy: str) -> None:
        if not os.path.lexists(copy):
            try:
                os.link(path, copy, follow_symlinks=False)
            except OSError:  # the file system has no hard links
                shutil.copy2(path, copy, follow_symlinks=False)

    def ignored(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if str(Path(folder, name).relative_to(source)) in left]

    shutil.copytree(source, target, symlinks=True, ignore=ignored, copy_function=link, dirs_exist_ok=True)


def _exchange(one: Path, other: Path) -> None:
    """Exchange the names of two folders: atomically on Linux, otherwise in several steps."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None or rename(here, os.fsencode(one), here, os.fsencode(other), exchange):
        old = one.with_name(f"{one.name}.old")
        other.rename(old)
        one.rename(other)
        old.rename(one)


def require_folder(folder: Path) -> None:
    """Check, before any work, that output can be written to a folder.

    Raises:
        UserError: the folder or a parent is a file, or is not writable.
    """
    # Some file systems report a deleted current folder as missing.
    place = next((path for path in (folder, *folder.parents) if path.exists() or path.is_symlink()), Path())
    if not place.is_dir():
        raise UserError(f"{place} is not a folder", "name another folder with --out")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(
            f"{place} cannot be written to",
            "make it writable, or name another folder with --out",
        )


def require_apart(folder: Path) -> None:
    """Check that a folder for outputs is outside the project's own folders.

    Raises:
        UserError: the folder is in one of `FOLDERS`.
    """
    # Check the path itself, and where its links point.
    for place in (Path(os.path.abspath(folder)), folder.resolve()):
        project = find_project(place)
        names = place.relative_to(project).parts[:1] if project else ()
        if names and names[0] in FOLDERS:
            raise UserError(
                f"{folder} is in {names[0]}/, which the project uses itself", "name another folder with --out"
            )


def _written_before(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return name -> digest of captrain's files in a folder.

    Raises:
        UserError: a file with one of these names is not captrain's.
    """
    listing = folder / LISTING
    remedy = "remove it, and what captrain wrote beside it"
    digests = read_json(listing, dict[str, str], remedy) if listing.exists() else {}
    for name in names:
        path = folder / name
        if path.is_symlink() or (path.exists() and not (path.is_file() and digests.get(name) == file_digest(path))):
            raise UserError(
                f"{path} exists, and captrain did not write it",
                "move it away, or name another folder with --out",
            )
    return digests
