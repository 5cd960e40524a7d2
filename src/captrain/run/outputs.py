"""Output of commands into a user's folder, without overwriting the user's files.

Files are written to a temporary folder beside the folder of the user. It gets hard links to the user's other files, and
one exchange of names puts it in place: at any time the folder has all old files or all new ones. A list among them has
the names and digests of captrain's files. A file that is not on the list, or was changed, belongs to the user; if it
has the name of an output, nothing is put in place. The temporary folder is always removed.
"""

import ctypes
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from captrain.errors import UserError
from captrain.records import file_digest, publish_json, read_json
from captrain.run import find_project

LISTING = ".captrain-outputs.json"
"""Relative paths and digests of what captrain wrote into a folder."""

FOLDERS = (
    *(".cache", ".dvc", ".git", ".github", ".venv", "artifacts", "components", "conf", "results", "scripts", "src"),
    *("stages", "tests"),
)
"""Folders of a project that belong to its stages, git or its author."""


@contextmanager
def user_outputs(folder: Path, names: Iterable[str] = (), *, whole: bool = True) -> Iterator[Path]:
    """Yield a temporary folder whose files get to `folder` together if the block succeeds.

    Args:
        folder: of the user; created if missing.
        names: of all files that the command may write, if known in advance, to fail before any work. Those that an
            earlier run wrote, and this one does not, are removed.
        whole: put the folder in place as a whole. Otherwise, and where it cannot be renamed, files move one by one.

    Raises:
        UserError: `folder` is a file, or a file that would be replaced is not captrain's.
    """
    require_folder(folder)
    names = {*names}
    _written_before(folder, names)
    is_new, place = not folder.exists(), folder.resolve()
    is_replaced = is_new or (whole and _can_be_replaced(place))
    mark = f"{os.getpid()}.tmp"
    aside = place.with_name(f".{place.name}.{mark}") if is_replaced else place / f".captrain-{mark}"
    try:
        aside.mkdir(parents=True)
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
        shutil.rmtree(aside, ignore_errors=True)


def _can_be_replaced(folder: Path) -> bool:
    """Whether a folder can be renamed without harm: a shell whose current folder it is would lose it."""
    is_current = Path.cwd().is_relative_to(folder)
    return not is_current and not folder.is_mount() and os.access(folder.parent, os.W_OK | os.X_OK)


def _link_others(source: Path, target: Path, left: Collection[str]) -> None:
    """Link the files of a folder, except those to leave, into another one that does not have them."""

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
    """Exchange the names of two folders in one step; in two where the system cannot, as outside of Linux."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None or rename(here, os.fsencode(one), here, os.fsencode(other), exchange):
        old = one.with_name(f"{one.name}.old")
        other.rename(old)
        one.rename(other)
        old.rename(one)


def require_folder(folder: Path) -> None:
    """Check that a folder can take outputs, before any work.

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
        UserError: it is in one of `FOLDERS`.
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
    """Read the digests of captrain's files in a folder; fail if another file has one of these names."""
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
