"""Packed logs: `.gz`, `.zip` and `.tar`, unpacked into a folder that is removed after reading."""

import gzip
import shutil
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

from captrain.errors import UserError

LARGEST = 1 << 35
"""Most bytes that are unpacked of one file."""
BROKEN = (
    OSError,
    EOFError,
    ValueError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
    tarfile.TarError,
    NotImplementedError,
    RuntimeError,
)
"""Exceptions of reading a damaged file."""


def is_packed(path: Path) -> bool:
    """Return whether a file is packed: by its first bytes, and not an archive of Inspect.

    A zip with a damaged directory counts as packed, so that unpacking it says what is wrong.
    """
    with path.open("rb") as file:
        if file.read(2) == b"\x1f\x8b":
            return True
    if zipfile.is_zipfile(path):
        if path.suffix == ".eval":
            return False
        try:
            with zipfile.ZipFile(path) as archive:
                return not {"header.json", "_journal/start.json"} & {*archive.namelist()}
        except BROKEN:
            return True
    return path.suffix in (".tar", ".tgz") and tarfile.is_tarfile(path)


def unpacked(path: Path, folder: Path) -> Path:
    """Unpack a file into an empty folder, and return what to read instead: a file or the folder.

    Raises:
        UserError: it is damaged, or larger than `LARGEST`.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                _require_bounded(path, sum(entry.file_size for entry in archive.infolist()))
                archive.extractall(folder)
            return folder
        if tarfile.is_tarfile(path):
            with tarfile.open(path) as archive:
                _require_bounded(path, sum(entry.size for entry in archive))
                archive.extractall(folder, filter="data")
            return folder
        name = folder / (path.stem if path.suffix == ".gz" else path.name)
        with gzip.open(path) as packed, name.open("wb") as file:
            while piece := packed.read(1 << 20):
                _require_bounded(path, file.tell())
                file.write(piece)
    except BROKEN as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(
            f"{path} cannot be unpacked: {type(error).__name__}", "pack it again, or name the files in it"
        ) from None
    return name


def _require_bounded(path: Path, size: int) -> None:
    if size > LARGEST:
        raise UserError(f"{path} unpacks to more than {LARGEST >> 30} GiB", "unpack it, and name the files in it")
