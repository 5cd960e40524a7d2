"""Records of a file of rows: JSON lines, a JSON array, a single JSON object, or a CSV, one by one.

A format of rows says of one row whether it is its own, and makes it a row of a chat (`captrain.interop.logs.chat`); so
it need not know how rows are stored, and every format is read from all of these.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from captrain.interop.logs.document import CHUNK, array_elements, is_array
from captrain.interop.logs.source import json_of, reason_of
from captrain.interop.logs.table import is_table, table_rows
from captrain.records import JsonObject, Rollout

FIRST = 20
Row = tuple[str, object]
"""A place in the file, and what stands there: text where it does not read."""


@dataclass(frozen=True)
class RowFormat:
    """A format of rows: its name, whether a row is of it, and the row as a row of a chat, or as a record where it is
    one already, or why it is neither."""

    name: str
    recognizes: Callable[[JsonObject], bool]
    chat_row: Callable[[JsonObject, Path], JsonObject | Rollout | str]


def is_lines(path: Path) -> bool:
    """Return whether the first line is a JSON object of its own, and not all of the file: then so is every line."""
    if path.suffix == ".jsonl":
        return True
    start = length = 0
    with path.open("rb") as file:
        while piece := file.readline(CHUNK):  # a whole document may be one line
            if not length and not piece.strip():
                start += len(piece)
                continue
            length += len(piece)
            if piece.endswith(b"\n"):
                break
        if path.stat().st_size - start - length < len("{}"):
            return False
        file.seek(start)
        first = file.read(length)
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def rows_of(path: Path) -> Iterator[Row]:
    """Yield the rows of a file.

    Raises:
        ValueError: it is neither lines nor a JSON document, nor a table.
    """
    if is_table(path):
        yield from table_rows(path)
        return
    if not is_lines(path):
        entries = array_elements(path) if is_array(path) else [json_of(path)]
        yield from ((f"entry {number}", entry) for number, entry in enumerate(entries, start=1))
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield f"line {number}", json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield f"line {number}", f"it is not JSON: {reason_of(error)}"


def first_objects(path: Path) -> list[JsonObject]:
    """Read the first rows that are objects, by which a file is known."""
    return [*islice((row for _, row in rows_of(path) if isinstance(row, dict)), FIRST)]
