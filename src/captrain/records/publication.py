"""Writing of files: aside first and renamed at the end, so that each is whole or not there; and records on disk instead
of in memory.

A file of records has one in a line, as JSON.
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

R = TypeVar("R", bound=Record)


@contextmanager
def place_aside(path: Path, mark: str = "") -> Iterator[Path]:
    """Yield a place beside a file or folder where it is written first. What lies there is removed, before the block and
    after it, however that ends: on a full disk nothing half-written stays.

    Args:
        path: where it is to be renamed to.
        mark: that tells several writers apart, who then do not remove what one that was killed has left.
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
    """Write atomically: aside first, then rename."""
    publish_bytes(path, text.encode())


def publish_bytes(path: Path, content: bytes, flush: bool = False) -> None:
    """Write atomically: aside first, then rename; nothing stays aside where that fails.

    Args:
        path: where the file comes to lie.
        content: all of it.
        flush: have it on the disk before it is renamed, so that no loss of power leaves a file cut off.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with place_aside(path, f".{os.getpid()}") as aside:
        aside.write_bytes(content)
        if flush:
            with aside.open("r+b") as file:
                os.fsync(file.fileno())
        aside.replace(path)


def publish_folder(aside: Path, folder: Path) -> None:
    """Rename a folder that was written aside; one that another process has put there first is as good."""
    try:
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(aside)


def publish_json(path: Path, value: object) -> None:
    """Publish one JSON document, indented, keys as given."""
    publish_text(path, json.dumps(value, indent=1, default=json_value) + "\n")


def publish(path: Path, records: Iterable[Record]) -> None:
    """Publish records as JSON lines, atomically; they are written as they come, so that they need not be in memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with place_aside(path, f".{os.getpid()}") as aside:
        with aside.open("w") as file:
            file.writelines(line_of(record) for record in records)
        aside.replace(path)


def line_of(record: Record) -> str:
    """Format a record as it stands in a file, with the end of its line."""
    return record.model_dump_json(exclude_defaults=True) + "\n"


class Spool(Generic[R]):
    """Records on disk instead of in memory: added one by one, read in that order as often as need be, gone with the
    process however it ends, because no folder has ever named their file for longer than it takes to open it."""

    def __init__(self, kind: type[R]) -> None:
        self._kind, self._count, self._end = kind, 0, 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (it goes with the object)

    def add(self, record: R) -> None:
        """Add a record at the end."""
        self._file.seek(self._end)
        self._end += self._file.write(line_of(record).encode())
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[R]:
        offset = 0
        while offset < self._end:
            self._file.seek(offset)  # others may read and write between two records
            line = self._file.readline()
            offset += len(line)
            yield self._kind.model_validate_json(line)
