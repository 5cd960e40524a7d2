"""Writing of files: to a temporary name first and then renamed, so that a file is complete or absent.

Values of environment variables that hold keys are removed from all text (`without_secrets`).

A file of records has one per line, as JSON. `Spool` keeps records on disk instead of in memory.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from captrain.records.digests import json_value
from captrain.records.record import Record
from captrain.records.text import forms_of_environment, json_without_secrets, without_secrets

R = TypeVar("R", bound=Record)
CHUNK = 1 << 16
"""Bytes of a `Spool` that are read at once."""


@contextmanager
def place_aside(path: Path, mark: str = "") -> Iterator[Path]:
    """Yield a temporary path beside a file or folder.

    The temporary path is removed before and after the block, so that a full disk leaves no half-written file.

    Args:
        path: final path. The caller renames the temporary path to it.
        mark: distinguishes parallel writers, so that they do not remove each other's temporary files.
    """
    aside = path.with_name(f".{path.name}{mark}.tmp")
    _discard(aside)
    try:
        yield aside
    finally:
        _discard(aside)


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def publish_text(path: Path, text: str) -> None:
    """Write text atomically. Values of environment variables that hold keys are removed."""
    publish_bytes(path, without_secrets(text).encode())


def publish_bytes(path: Path, content: bytes, flush: bool = False) -> None:
    """Write a file atomically.

    Args:
        path: path of the file.
        content: content of the file.
        flush: flush the file to the disk before it is renamed, so that a power failure cannot leave a truncated file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with place_aside(path, f".{os.getpid()}") as aside:
        aside.write_bytes(content)
        if flush:
            with aside.open("r+b") as file:
                os.fsync(file.fileno())
        aside.replace(path)


def publish_folder(aside: Path, folder: Path) -> None:
    """Rename a finished folder to its final path, or remove it if another process was first."""
    try:
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(aside)


def publish_json(path: Path, value: object) -> None:
    """Write a JSON document, indented, with keys in the given order."""
    text = json.dumps(value, indent=1, default=json_value)
    publish_bytes(path, f"{json_without_secrets(text)}\n".encode())


def publish(path: Path, records: Iterable[Record]) -> None:
    """Write records as JSON lines, atomically. They are written one by one, so an iterator needs little memory."""
    forms = forms_of_environment()
    publish_lines(path, (_line_of(record, forms) for record in records))


def publish_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines of a `Spool` atomically: secrets are removed from them already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with place_aside(path, f".{os.getpid()}") as aside:
        with aside.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        aside.replace(path)


def _line_of(record: Record, forms: tuple[str, ...]) -> str:
    return json_without_secrets(record.model_dump_json(exclude_defaults=True), forms) + "\n"


class Spool(Generic[R]):
    """List of records on disk. It is backed by an unlinked temporary file, which vanishes with the process."""

    def __init__(self, kind: type[R]) -> None:
        self._kind, self._count, self._end, self._forms = kind, 0, 0, forms_of_environment()
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the object)

    def add(self, record: R) -> None:
        """Append a record."""
        self._end += self._file.write(_line_of(record, self._forms).encode())
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[R]:
        return map(self._kind.model_validate_json, self._lines())

    @property
    def lines(self) -> Iterator[str]:
        """The records as lines of JSON, without secrets of the environment."""
        return (f"{line.decode()}\n" for line in self._lines())

    def _lines(self) -> Iterator[bytes]:
        offset, size = 0, CHUNK
        while offset < self._end:
            self._file.flush()
            # `pread` does not move the file position, at which `add` goes on writing.
            lines, _, _ = os.pread(self._file.fileno(), size, offset).rpartition(b"\n")
            yield from lines.split(b"\n") if lines else ()
            offset += len(lines) + bool(lines)
            size = CHUNK if lines else 2 * size  # the line is longer
