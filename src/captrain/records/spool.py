"""Records on disk instead of in memory."""

import tempfile
from collections.abc import Iterator
from typing import Generic, TypeVar

from captrain.records.publication import line_of
from captrain.records.record import Record

R = TypeVar("R", bound=Record)


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

    def __contains__(self, record: object) -> bool:
        return any(entry == record for entry in self)

    def __iter__(self) -> Iterator[R]:
        offset = 0
        while offset < self._end:
            self._file.seek(offset)  # others may read and write between two records
            line = self._file.readline()
            offset += len(line)
            yield self._kind.model_validate_json(line)
