"""Output of a command into a user's folder: never over a file that captrain did not write there.

Files are written aside, within the folder, and put in place together when all are whole; a list beside them says which
are captrain's, with their digests. A file of that name that is not on the list, or was changed since, is the user's,
and nothing is put in place then. Nothing stays aside, however the writing ends.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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
"""Folders of a project whose files stages, git or its author write."""


@contextmanager
def user_outputs(folder: Path, names: Iterable[str] = ()) -> Iterator[Path]:
    """Yield a folder to write into, whose files come into `folder` when the block ends well.

    Args:
        folder: the user's; made where there is none.
        names: of files that will be written, where they are known before any work is done.

    Raises:
        UserError: `folder` is a file, or a file in it that would be replaced is not captrain's.
    """
    require_folder(folder)
    _written_before(folder, names)
    is_new = not folder.exists()
    aside = folder / f".captrain-{os.getpid()}.tmp"
    try:
        aside.mkdir(parents=True)
        yield aside
        paths = [path.relative_to(aside) for path in sorted(aside.rglob("*")) if path.is_file()]
        digests = _written_before(folder, map(str, paths))
        digests |= {str(path): file_digest(aside / path) for path in paths}
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (aside / path).replace(folder / path)
        publish_json(folder / LISTING, dict(sorted(digests.items())))
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if is_new:
            with suppress(OSError):
                folder.rmdir()  # One in which something lies stays.


def require_folder(folder: Path) -> None:
    """Refuse a folder for outputs that cannot be one, before anything is computed for it.

    Raises:
        UserError: it, or what should be a folder above it, is a file, or may not be written to.
    """
    # Some file systems deny that the current folder is there once it was deleted.
    place = next((path for path in (folder, *folder.parents) if path.exists() or path.is_symlink()), Path())
    if not place.is_dir():
        raise UserError(f"{place} is not a folder", "name another folder with --out")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(
            f"{place} cannot be written to",
            "see that the disk is not read-only and that you may write there, or name another folder with --out",
        )


def require_apart(folder: Path) -> None:
    """Refuse a folder for outputs in which a project keeps its own: stages, or git, would take them for theirs.

    Raises:
        UserError: it is in one of these.
    """
    # By its path, and by where links in it lead.
    for place in (Path(os.path.abspath(folder)), folder.resolve()):
        project = find_project(place)
        names = place.relative_to(project).parts[:1] if project else ()
        if names and names[0] in FOLDERS:
            raise UserError(
                f"{folder} is in {names[0]}/ of the project, which it keeps for its own", "name another --out"
            )


def _written_before(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Read which files captrain wrote into a folder, with their digests; refuse to replace others of these names."""
    listing = folder / LISTING
    remedy = "remove it, and what captrain wrote beside it"
    digests = read_json(listing, dict[str, str], remedy) if listing.exists() else {}
    for name in names:
        path = folder / name
        if path.is_symlink() or (path.exists() and not (path.is_file() and digests.get(name) == file_digest(path))):
            raise UserError(
                f"{path} is there already, and captrain did not write it so",
                "move it away, or name another place with --out",
            )
    return digests
