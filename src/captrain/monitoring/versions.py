"""Two versions of a result or a document, and by how much they differ: what `captrain verify` says of a changed table.

Everything is compared cell by cell, by its place, so that a number that moved is told from a row that was added.
"""

import csv
import io
import json
import math
from collections.abc import Mapping
from typing import Any


def difference(old: str, new: str, suffix: str) -> str:
    """The largest absolute numeric difference of two versions of a .csv, .json or .jsonl file, and other changes."""
    try:
        before, after = _cells(old, suffix), _cells(new, suffix)
    except ValueError as error:
        return f"cannot be read ({error})"
    largest, where, words = 0.0, "", 0
    for key in before.keys() & after.keys():
        one, two = _number(before[key]), _number(after[key])
        if one is None or two is None:
            words += before[key] != after[key]
        elif (abs(one - two), key) > (largest, where):
            largest, where = abs(one - two), key
    parts = [f"largest difference {largest:.6g} at {where}" if largest else "no number differs"]
    if words:
        parts.append(f"{words} values that are not numbers differ")
    if extra := before.keys() ^ after.keys():
        parts.append(f"{len(extra)} cells are in one version only")
    return ", ".join(parts)


def _cells(text: str, suffix: str) -> dict[str, Any]:
    """Every value of a table or document by its place."""
    if suffix == ".csv":
        rows = enumerate(csv.DictReader(io.StringIO(text)), start=2)
        return {f"line {line}, {name}": value for line, row in rows for name, value in row.items()}
    if suffix == ".jsonl":
        return flat({f"line {line}": json.loads(one) for line, one in enumerate(text.splitlines(), start=1)})
    return flat(json.loads(text))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None  # a word, compared as such
    return number if math.isfinite(number) else None


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings and lists by dotted path; an empty mapping or list is a leaf."""
    pairs: Any = None
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, list | tuple):
        pairs = enumerate(value)
    if not pairs:
        return {prefix: value} if prefix else {}
    return {
        key: leaf
        for name, inner in pairs
        for key, leaf in flat(inner, f"{prefix}.{name}" if prefix else str(name)).items()
    }
