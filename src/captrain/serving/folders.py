"""Copies adapters that requests name out of the folders of `--adapters-from`. Only the copy is checked and loaded.

Anybody with write access to such a folder could replace a file or folder by a link at any moment. So each file is
opened only once, from the root folder downwards, without following links.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from starlette.exceptions import HTTPException

from captrain.models import ADAPTER_FILES
from captrain.records import require_regular

DOWNWARDS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
REMEDY = "name a folder with an adapter"


def copy_adapter_below(roots: Sequence[Path], folder: Path, target: Path) -> None:
    """Copy the files of an adapter.

    Args:
        roots: allowed root folders. The adapter's files must be below one of them.
        folder: folder of the adapter.
        target: an empty folder for the copy.

    Raises:
        HTTPException: a file is outside the root folders.
        UserError: a file is missing, or is no regular file.
    """
    _root_of(roots, folder)
    for name in ADAPTER_FILES:
        require_regular(folder / name, REMEDY)
        root, path = _root_of(roots, folder / name)
        try:
            with open_below(root, path) as source, (target / name).open("wb") as copy:
                shutil.copyfileobj(source, copy)
        except OSError as error:
            raise HTTPException(403, f"{folder / name} changed while it was read: {error.strerror}") from None


def _root_of(roots: Sequence[Path], path: Path) -> tuple[Path, Path]:
    """Return the root folder that contains a path, and the path with links resolved. Raises as `copy_adapter_below`."""
    try:
        place = path.resolve()
    except OSError as error:
        raise HTTPException(403, f"{path} changed while it was read: {error.strerror}") from None
    for root in roots:
        if place.is_relative_to(root):
            return root, place
    named = ", ".join(map(str, roots)) or "none"
    raise HTTPException(403, f"adapters are loaded only from folders named by --adapters-from: {named}")


def open_below(root: Path, path: Path) -> BinaryIO:
    """Open a regular file below a folder without following any link.

    Raises:
        OSError: a part of the path is a link or missing, or the file is not regular.
    """
    *folders, name = path.relative_to(root).parts
    place = os.open(root, DOWNWARDS)
    try:
        for folder in folders:
            inner = os.open(folder, DOWNWARDS, dir_fd=place)
            os.close(place)
            place = inner
        file = os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place), "rb")
    finally:
        os.close(place)
    if not S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(None, "it is no regular file")
    return file
