"""Rows of a CSV whose cells hold JSON, numbers and words."""

import ast
import csv
import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from captrain.interop.logs.source import reason_of

LONGEST = 1 << 26
"""Characters of a cell: a dialogue is long, and a quote that nothing closes takes all that follows."""
OF_JSON = (".json", ".jsonl", ".eval")
DELIMITERS = ",;\t"
TRUTHS = {"true": True, "false": False}
WRITTEN_BY_PANDAS = 1 << 20
"""Characters of a list in Python's notation that is read, as `DataFrame.to_csv` writes one."""


def is_table(path: Path) -> bool:
    """Tell whether a file is no JSON by its name nor by its first character."""
    if path.suffix in OF_JSON:
        return False
    with path.open("rb") as file:
        beginning = file.read(1 << 10).removeprefix(b"\xef\xbb\xbf").lstrip()
    return bool(beginning) and beginning[:1] not in (b"{", b"[") and any(ord(sign) in beginning for sign in DELIMITERS)


def has_columns(path: Path, names: Collection[str]) -> bool:
    """Tell whether a table has one of these columns."""
    _, row = next(iter(table_rows(path)), ("", None))
    return isinstance(row, dict) and bool({*names} & {*row})


def table_rows(path: Path) -> Iterator[tuple[str, object]]:
    """Yield each row as an object, by the names in the first; text from where on the table does not read."""
    csv.field_size_limit(LONGEST)
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header = file.readline(LONGEST)
        file.seek(0)
        rows = csv.DictReader(file, delimiter=max(DELIMITERS, key=header.count))
        try:
            for number, row in enumerate(rows, start=2):
                yield f"row {number}", {name: _value(cell) for name, cell in row.items() if isinstance(name, str)}
        except csv.Error as error:
            yield "the remainder", f"it is not a table: {reason_of(ValueError(str(error)))}"


def _value(cell: object) -> object:
    """Read a cell: nothing, JSON, a list in Python's notation, or words."""
    if not isinstance(cell, str) or not cell.strip():
        return None
    if cell.lower() in TRUTHS:
        return TRUTHS[cell.lower()]
    with suppress(ValueError, RecursionError):
        return json.loads(cell)
    if cell.startswith("[{") and len(cell) <= WRITTEN_BY_PANDAS:
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return ast.literal_eval(cell)
    return cell
