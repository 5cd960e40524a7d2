"""Output of commands into a user's folder, without overwriting the user's files.

Files are written to a temporary folder and moved into place together. A list beside them has the names and digests of
captrain's files. A file that is not on the list, or was changed, belongs to the user; then nothing is moved. The
temporary folder is always removed.
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
"""Folders of a project that belong to its stages, git or its author."""


@contextmanager
def user_outputs(folder: Path, names: Iterable[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder whose files move to `folder` if the block succeeds.

    Args:
        folder: of the user; created if missing.
        names: of files that will be written, if known in advance, to fail before any work.

    Raises:
        UserError: `folder` is a file, or a file that would be replaced is not captrain's.
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
                folder.rmdir()  # only if it is empty


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
