"""Hashes of values and files, which name content."""

import hashlib
import json
from pathlib import Path

from pydantic import BaseModel

BLOCK = 1 << 20
"""Bytes of a file that are read at a time."""


def digest(*parts: object) -> str:
    """Hash the canonical JSON of some values: SHA-256, hex, first 16 digits."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=json_value)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def json_value(value: object) -> object:
    """Convert a record to JSON values.

    Raises:
        TypeError: the value is not a record.
    """
    if isinstance(value, BaseModel):
        return value.model_dump()
    raise TypeError(f"not JSON: {type(value).__name__}")


def file_digest(*paths: Path) -> str:
    """Hash the bytes of the files, in the given order: SHA-256, hex, first 16 digits."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                total.update(block)
    return total.hexdigest()[:16]


def bytes_digest(content: bytes) -> str:
    """Hash bytes. The result equals `file_digest` of a file with these bytes."""
    return hashlib.sha256(content).hexdigest()[:16]


def folder_digests(folder: Path) -> dict[str, str]:
    """Return the digests of all files below a folder by their paths in it, in order."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): file_digest(path) for path in paths}
