"""Two versions of a result or a document, and by how much they differ: what `captrain verify` says of a changed table.

Every value has its place, so that a number that moved is told from a row that was added. Pass rates come with the
interval that they were published with, which says whether a number that moved matters.
"""

import csv
import io
import json
import math
from dataclasses import dataclass

MISSING = object()
"""Stand-in for a value in the version that lacks it."""


@dataclass(frozen=True)
class Rates:
    """The pass rates of two versions of a table: how many rows, and those that lie `beyond` the old interval."""

    rows: int
    beyond: tuple[str, ...]


def value_changes(old: object, new: object) -> dict[str, tuple[object, object]]:
    """List the values at which two JSON documents differ, old and new, by their dotted places in order.

    Lists are compared by position, and numbers by value.
    """
    from deepdiff import DeepDiff
    from deepdiff.helper import notpresent

    tree = DeepDiff(
        old,
        new,
        view="tree",
        ignore_numeric_type_changes=True,
        ignore_nan_inequality=True,
        zip_ordered_iterables=True,
    )
    levels = [level for kind in tree.values() for level in kind]
    changes = {".".join(map(str, level.path(output_format="list"))): (level.t1, level.t2) for level in levels}
    return {
        place: (MISSING if before is notpresent else before, MISSING if after is notpresent else after)
        for place, (before, after) in sorted(changes.items())
    }


def difference(old: str, new: str, suffix: str) -> str:
    """Describe the largest absolute numeric difference of two versions of a .csv, .json or .jsonl file, and other
    changes."""
    try:
        changes = value_changes(_parsed(old, suffix), _parsed(new, suffix))
    except (ValueError, RecursionError, csv.Error) as error:
        return f"cannot be read ({error})"
    distances = {place: _distance(*pair) for place, pair in changes.items()}
    sizes = [(size, place) for place, size in distances.items() if size is not None and math.isfinite(size)]
    parts = [f"largest difference {size:.6g} at {place}" for size, place in sorted(sizes)[-1:]] or ["no number differs"]
    extra = sum(MISSING in pair for pair in changes.values())
    if words := len(changes) - len(sizes) - extra:
        parts.append(f"{words} values that are not numbers differ")
    if extra:
        parts.append(f"{extra} cells are in one version only")
    return ", ".join(parts)


def _parsed(text: str, suffix: str) -> object:
    """Parse a table to its cells, or a document."""
    if suffix == ".csv":
        rows = enumerate(csv.DictReader(io.StringIO(text)), start=2)
        return {f"line {line}, {name}": _number(cell) for line, row in rows for name, cell in row.items()}
    if suffix == ".jsonl":
        return {f"line {number}": json.loads(line) for number, line in enumerate(text.splitlines(), start=1)}
    return json.loads(text)


def _number(cell: str) -> str | float:
    """Parse a cell of a table: a number, or else the word that it is."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return cell


def _distance(old: object, new: object) -> float | None:
    """Return the distance of two numbers, None of anything else."""
    if isinstance(old, bool) or isinstance(new, bool):
        return None
    return abs(old - new) if isinstance(old, int | float) and isinstance(new, int | float) else None


def compare_rates(old: str, new: str) -> Rates | None:
    """Compare the pass rates of a table (.csv with the columns pass_rate, low and high) with the intervals of its older
    version; None of any other table. A row is named by its columns before the rate, and one that a version lacks is
    beyond any interval."""
    before, after = _rates(old), _rates(new)
    if before is None or after is None:
        return None
    beyond = []
    for name in {**before, **after}:
        if name not in before or name not in after:
            beyond.append(f"{name} in one version only")
            continue
        (rate, low, high), (moved, *_) = before[name], after[name]
        undefined = math.isnan(rate) and math.isnan(moved)
        if rate != moved and not undefined and not low <= moved <= high:
            beyond.append(f"{name} {rate:.3f} -> {moved:.3f} ({low:.3f} to {high:.3f})")
    return Rates(len({**before, **after}), tuple(beyond))


def _rates(text: str) -> dict[str, tuple[float, float, float]] | None:
    """Pass rate and interval of each row by its name, an undefined one as NaN; None of a table without them."""
    table = csv.DictReader(io.StringIO(text))
    columns = [*(table.fieldnames or ())]
    if not {"pass_rate", "low", "high"} <= {*columns}:
        return None
    names = [name for name in columns[: columns.index("pass_rate")] if name != "label"]
    return {
        " ".join(str(row[name]) for name in names): (_rate(row["pass_rate"]), _rate(row["low"]), _rate(row["high"]))
        for row in table
    }


def _rate(cell: str) -> float:
    number = _number(cell)
    return number if isinstance(number, float) else math.nan
