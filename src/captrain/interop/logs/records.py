"""Reads the rows of a file: JSON lines, a JSON array, a single JSON object, or a CSV whose cells may hold JSON.

A row format recognizes its rows and converts each to a `ChatRow`. It does not depend on how rows are stored.
"""

import csv
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from captrain.interop.logs.document import ARRAY, CHUNK, JsonDocument
from captrain.interop.logs.source import Foreign, Read, literal, reason_of
from captrain.interop.logs.verdicts import names_outcome, outcome_number
from captrain.records import plain

FIRST = 20
SHARED = ("model", "model_name", "task_id", "instance_id")
"""Fields of a document that hold for all of its rows."""
IDS = ("trace_id", "session_id", "instance_id", "task_id", "run_id", "episode_id", "conversation_id", "id")
"""Fields by which a row is joined to what another member of its document says of it."""
SUBJECTS = ("metric", "metric_name", "name")
"""Fields by which an object in a list says what it is about. It is then not about the row in its place."""
LONGEST = 1 << 26
"""Longest CSV cell in characters. Dialogues are long, but an unclosed quote would read the rest of the file."""
OF_JSON = (".json", ".jsonl", ".eval", ".traj", ".ndjson")
CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
DELIMITERS = ",;\t"
TRUTHS = {"true": True, "false": False}


@dataclass(frozen=True)
class ChatRow:
    """A dialogue with its outcome, as the file has it.

    messages: in any format of `captrain.interop.logs.chat`. reference: assistant messages of a solution. script:
    instructions of the simulated user. injections: texts that AgentDojo put into its environment. fault: an error that
    was not the agent's fault. limit, grading, submission, expected: see `captrain.records.TaskFacts`. agent, keys,
    missing, result: see `Entry`.
    """

    messages: Sequence[object]
    reward: object
    task_id: object = None
    trial: object = None
    model: object = "unknown"
    tools: object = None
    reference: object = None
    script: object = None
    injections: Mapping[str, object] = field(default_factory=dict[str, object])
    fault: str = ""
    limit: str = ""
    grading: object = None
    submission: object = None
    expected: Mapping[str, object] = field(default_factory=dict[str, object])
    agent: object = None
    keys: tuple[str, ...] = ()
    missing: str = ""
    result: str = ""


@dataclass(frozen=True)
class RowFormat:
    """A row format. `convert` returns a chat, a finished rollout, or the reason why the row is neither."""

    name: str
    recognizes: Callable[[Foreign], bool]
    convert: Callable[[Foreign, Path], ChatRow | Read]


@dataclass(frozen=True)
class FileFormat:
    """A format in which the rows of a file form one dialogue, or one for each group that `groups` returns.

    `recognizes` gets the first rows. `convert` gets the rows of one dialogue.
    """

    name: str
    recognizes: Callable[[Sequence[Foreign]], bool]
    convert: Callable[[Sequence[Foreign], Path], ChatRow | Read]
    groups: Callable[[Sequence[Foreign]], Sequence[Sequence[Foreign]]] = lambda rows: [rows]


def is_lines(path: Path) -> bool:
    """Return whether a file is JSON lines: its first line is a JSON object, and more lines follow."""
    if path.suffix == ".jsonl":
        return True
    start = length = 0
    with path.open("rb") as file:
        while piece := file.readline(CHUNK):  # read in chunks, because a whole document may be one line
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


def rows_of(path: Path) -> Iterator[tuple[str, object]]:
    """Yield (place, row) for the rows of a file. A row that is a text is the reason why it could not be parsed.

    Raises:
        ValueError: the file is neither JSON lines nor a JSON document nor a table.
    """
    if is_table(path):
        yield from table_rows(path)
        return
    if not is_lines(path):
        document = JsonDocument(path)
        entries = document.elements(ARRAY) if ARRAY in document.counts else [document.members]
        yield from ((f"entry {number}", entry) for number, entry in enumerate(entries, start=1))
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield f"line {number}", json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield f"line {number}", f"it is not JSON: {reason_of(error)}"


def rows_in(document: Foreign, is_row: Callable[[Foreign], bool]) -> Iterator[tuple[str, object]]:
    """Yield (place, row) for the rows inside a JSON document.

    The rows are the document's longest list of objects, if possible one with rows of a known format, as `is_row` tells.
    Such a list may also be in the only member that holds one. Without a list, they are the document's members if nearly
    all of these are objects; a member's name is then its `task_id`. The document's model and task are added to every
    row, and what the document's other members say of it.
    """
    shared = {name: document[name] for name in SHARED if isinstance(document.get(name), str)}
    lists = {name: objects for name, part in document.items() if (objects := _objects(part))}
    known = [name for name, objects in lists.items() if any(map(is_row, objects[:FIRST]))]
    holders = [part for part in [*document.values()][:FIRST] if isinstance(part, dict) and not known]
    holders = [part for part in holders if not is_row(part) and _has_rows(part, is_row)]
    if len(holders) == 1:
        yield from rows_in({**shared, **holders[0]}, is_row)
        return
    if lists:
        name = max(known or lists, key=lambda name: len(document[name]))
        rows = [(f"{name} {number}", row) for number, row in enumerate(with_siblings(document, name), start=1)]
    else:
        objects = {name: row for name, row in document.items() if isinstance(row, dict)}
        is_table = len(objects) >= max(1, len(document) - len(shared) - 2)
        rows = [(f"entry {plain(name)}", {"task_id": name, **row}) for name, row in objects.items()] if is_table else []
    yield from ((place, {**shared, **row} if isinstance(row, dict) else row) for place, row in rows)


def _has_rows(holder: Foreign, is_row: Callable[[Foreign], bool]) -> bool:
    """Return whether a list of an object has rows of a known format."""
    return any(is_row(row) for part in holder.values() for row in _objects(part)[:FIRST])


def _objects(value: object) -> list[Foreign]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def with_siblings(document: Foreign, name: str) -> Sequence[object]:
    """Return the rows in a list of a document, each with what the other members say of it. Its own fields win.

    These members are read:

    - a list of as many values, in the order of the rows
    - a list of as many flat objects without ids or names, in the order of the rows, if no row has an outcome
    - a list of objects that hold a row's id
    - an object whose names are the rows' ids
    """
    rows: Sequence[object] = document[name]
    for other, value in document.items():
        if other != name:
            rows = _joined(rows, other if other.endswith("ss") else other.removesuffix("s"), value)
    return rows


def _joined(rows: Sequence[object], field: str, value: object) -> Sequence[object]:
    """Return the rows with the facts in one value. `field` names a fact that is not an object."""
    if isinstance(value, list) and not any(isinstance(fact, dict | list) for fact in value):
        pairs = zip(value, rows, strict=True) if len(value) == len(rows) else ()
        return [{field: fact, **row} if isinstance(row, dict) else row for fact, row in pairs] or rows
    objects = [row for row in rows if isinstance(row, dict)]
    is_open = not any(key in row for row in objects for key in IDS) and not any(map(_is_judged, objects))
    if is_open and len(flat := _flat(value)) == len(objects) == len(rows):
        return [{**fact, **row} for fact, row in zip(flat, objects, strict=True)]
    for key in IDS:
        facts = _by_id(value, key, field)
        ids = {str(row[key]) for row in objects if key in row}
        # If several rows share an id, the facts may be about only one of them.
        if len(ids) == len(rows) and ids & facts.keys():
            return [{**facts.get(str(row[key]), {}), **row} for row in objects]
    return rows


def _flat(value: object) -> list[Foreign]:
    """Return the objects in a list if each may be about one row; else [].

    Each value is a text, number or truth value. An object with an id or with a name, as of a metric, does not count.
    """
    objects = _objects(value)
    is_flat = all(
        not isinstance(part, dict | list) and name not in (*IDS, *SUBJECTS)
        for row in objects
        for name, part in row.items()
    )
    return objects if is_flat and isinstance(value, list) and len(objects) == len(value) else []


def _is_judged(row: Foreign) -> bool:
    """Return whether a row, or an object inside it, has an outcome of its own."""
    inner = any(_is_judged(value) for value in row.values() if isinstance(value, dict))
    return inner or any(names_outcome(str(name)) and outcome_number(value) is not None for name, value in row.items())


def _by_id(value: object, key: str, field: str) -> dict[str, Foreign]:
    """Return id -> facts for the objects in a list that hold an id, or for the members of an object."""
    if isinstance(value, dict):
        return {name: fact if isinstance(fact, dict) else {field: fact} for name, fact in value.items()}
    facts = [fact for fact in value if isinstance(fact, dict) and key in fact] if isinstance(value, list) else []
    found: dict[str, Foreign] = {str(fact[key]): fact for fact in facts}
    return found if len(found) == len(facts) else {}


def is_binary(path: Path) -> bool:
    """Return whether a file is binary: it has control characters, and is not in UTF-16 or UTF-32."""
    with path.open("rb") as file:
        beginning = file.read(1 << 12)
    if beginning and not beginning.strip(b"\0"):  # zeros pass for UTF-32, and a sparse file has gigabytes of them
        return True
    return json.detect_encoding(beginning) in ("utf-8", "utf-8-sig") and bool(CONTROL.search(beginning))


def first_objects(rows: Iterable[tuple[str, object]]) -> list[Foreign]:
    """Return the first rows that are objects, from which the format is detected."""
    return [*islice((row for _, row in rows if isinstance(row, dict)), FIRST)]


def is_table(path: Path) -> bool:
    """Return whether a file looks like a table: it has delimiters, and neither its name nor its start is JSON's."""
    if path.suffix in OF_JSON:
        return False
    with path.open("rb") as file:
        beginning = file.read(1 << 10).removeprefix(b"\xef\xbb\xbf").lstrip()
    return bool(beginning) and beginning[:1] not in (b"{", b"[") and any(ord(sign) in beginning for sign in DELIMITERS)


def has_columns(path: Path, names: Collection[str]) -> bool:
    """Return whether a table has one of these columns."""
    _, row = next(iter(table_rows(path)), ("", None))
    return isinstance(row, dict) and bool({*names} & {*row})


def table_rows(path: Path) -> Iterator[tuple[str, object]]:
    """Yield (place, row) for each row of a table. If the rest is unreadable, the last item is the reason."""
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
    """Convert a cell: None if empty, else a truth value, JSON, a Python list, or text."""
    if not isinstance(cell, str) or not cell.strip():
        return None
    if cell.lower() in TRUTHS:
        return TRUTHS[cell.lower()]
    with suppress(ValueError, RecursionError):
        return json.loads(cell)
    return literal(cell) if cell.startswith("[{") else cell
