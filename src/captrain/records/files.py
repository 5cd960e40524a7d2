"""Reading of files. All code reads files through this module; a test checks it.

A user or another program may have written any file. Content that is invalid raises a `UserError` with the file, the
place and the remedy.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json

from captrain.errors import UserError
from captrain.records.digests import bytes_digest
from captrain.records.record import IndexEntry
from captrain.records.text import json_without_secrets, plain

if TYPE_CHECKING:
    import pandas as pd

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
MOST = 1 << 28
"""Largest document that is read at once, in bytes. captrain's own documents have a few megabytes."""
LARGEST_YAML = 1 << 22
"""Largest YAML document, in bytes: YAML is parsed a hundred times more slowly than JSON."""
MOST_VALUES, DEEPEST = 1_000_000, 100
"""Limits of a YAML document, whose aliases can expand a few bytes to very many or infinitely many values."""
MOST_SIGNS = 1 << 24
"""Most characters of a YAML document with its aliases expanded."""
REPRO = "run `dvc repro` to make it again"
SEAL = b',"digest":"'
"""Text before the digest in a line of a journal."""


def require_regular(path: Path, remedy: str = REPRO) -> None:
    """Check that a path is a regular file.

    Raises:
        UserError: the path is missing, or is a folder, a pipe or a device.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is missing", remedy) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", remedy) from None
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe" if path.is_fifo() else "no regular file"
        raise UserError(f"{path} is {kind}", "name a file")


def read_bytes(path: Path, remedy: str = REPRO, most: int = MOST) -> bytes:
    """Read the content of a file.

    Args:
        path: path of the file.
        remedy: what the user can do if the file cannot be read.
        most: largest size in bytes.

    Raises:
        UserError: the file is missing, unreadable, not a regular file, or too large.
    """
    require_regular(path, remedy)
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}", remedy) from None
    if len(content) > most:
        size = f"{most >> 20} MiB" if most >> 20 else f"{most >> 10} KiB"
        raise UserError(f"{path} has more than {size}, more than any file of its kind", remedy)
    return content


def read_text(path: Path, remedy: str = REPRO, most: int = MOST) -> str:
    """Read the content of a file as text.

    Raises:
        UserError: as `read_bytes`, or the text is not UTF-8.
    """
    content = read_bytes(path, remedy, most)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8 (byte {error.start})", remedy) from None


def read_json(path: Path, kind: type[T], remedy: str = REPRO) -> T:
    """Read the JSON document in a file and validate it as a value of type `kind`.

    Raises:
        UserError: as `read_bytes`; or the document is damaged, has another type, or holds NaN or infinity. The message
            names the first place.
    """
    content = read_bytes(path, remedy)
    try:
        json.dumps(from_json(content), allow_nan=False)
        return _adapter(kind).validate_json(content)
    except ValidationError as error:
        raise _not_whole(str(path), kind, error, remedy) from None
    except ValueError as error:
        raise UserError(f"{path} is not whole JSON ({plain(str(error))})", remedy) from None


def read_yaml(path: Path, kind: type[T], remedy: str = REPRO) -> T:
    """Read the YAML document in a file, as `read_json` reads JSON.

    Raises:
        UserError: as `read_text`, or the document is damaged or has another type. The message names the first place.
    """
    return parse_yaml(read_text(path, remedy, LARGEST_YAML), kind, str(path), remedy)


class _Loader(yaml.CSafeLoader):
    """Loader of plain values that refuses duplicate keys. It is libyaml's, which takes a sixth of the time."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """See `yaml.SafeLoader`."""
        pairs = node.value if isinstance(node, yaml.MappingNode) else []  # any node may be tagged
        names = Counter(name.value for name, _ in pairs if isinstance(name, yaml.ScalarNode))
        if twice := [name for name, count in names.items() if count > 1 and name != "<<"]:
            raise yaml.YAMLError(f"it names {twice[0]} twice (line {node.start_mark.line + 1} and below)")
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, kind: type[T], place: str, remedy: str = REPRO, most: int = MOST_SIGNS) -> T:
    """Parse a YAML text as `read_yaml` does, with at most `most` characters. `place` names the document in errors."""
    try:
        # libyaml recurses without a limit, so depth is checked before it builds the document.
        depth = 0
        for event in yaml.parse(text, yaml.CSafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise RecursionError
        value = yaml.load(text, _Loader)
        # Aliases may repeat values many times, or put a value into itself.
        count, signs, pending = 0, 0, [(value, 0)]
        while pending:
            (element, depth), count = pending.pop(), count + 1
            signs += len(element) if isinstance(element, str) else 1
            if depth > DEEPEST or count > MOST_VALUES or signs > most:
                raise ValueError("nested too deeply, or its aliases make too much of it")
            inner = element.values() if isinstance(element, dict) else element if isinstance(element, list) else ()
            pending += [(part, depth + 1) for part in inner]
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise _not_whole(place, kind, error, remedy) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else plain(" ".join(str(error).split()))
        raise UserError(f"{place} is not YAML: {reason}", remedy) from None


def _not_whole(place: str, kind: type[object], error: ValidationError, remedy: str) -> UserError:
    name = kind.__name__.lstrip("_") if isinstance(kind, type) and issubclass(kind, BaseModel) else "document"
    return UserError(f"{place} is not a whole {name} ({first_fault(error)})", remedy)


def read_index(path: Path, remedy: str = REPRO) -> dict[str, IndexEntry]:
    """Read the index of a stage: its adapters and prompts, by name.

    Raises:
        UserError: as `read_json`.
    """
    return read_json(path, dict[str, IndexEntry], remedy)


def read_table(
    path: Path,
    remedy: str = REPRO,
    *,
    columns: Collection[str] = (),
    numbers: Collection[str] = (),
    words: bool = False,
    kinds: "Mapping[str, type] | type[str] | None" = None,
) -> "pd.DataFrame":
    """Read the CSV table in a file, as `parse_table` reads it.

    Raises:
        UserError: as `read_text`, or the text is not a complete table.
    """
    return parse_table(
        read_text(path, remedy), str(path), remedy, columns=columns, numbers=numbers, words=words, kinds=kinds
    )


def parse_table(
    text: str,
    place: str,
    remedy: str = REPRO,
    *,
    columns: Collection[str] = (),
    numbers: Collection[str] = (),
    words: bool = False,
    kinds: "Mapping[str, type] | type[str] | None" = None,
) -> "pd.DataFrame":
    """Parse a CSV table, in which an empty cell is NaN.

    Args:
        text: the table.
        place: name of the table in errors.
        remedy: what the user can do if the table is invalid.
        columns: required columns.
        numbers: required columns of numbers.
        words: keep words such as "NA", which pandas would read as NaN.
        kinds: type of all columns, or column -> type. pandas infers the other types.

    Raises:
        UserError: the table has no heading, lacks a column or ends in the middle of a line; a line has another number
            of fields; or a cell does not have its column's type.
    """
    import pandas as pd

    options: dict[str, Any] = {"dtype": kinds}
    options |= {"keep_default_na": False, "na_values": [""]} if words else {}
    try:
        if not text.endswith("\n"):
            raise ValueError("its last line has no end" if text.strip() else "it is empty")
        lengths = [len(row) for row in csv.reader(io.StringIO(text, newline="")) if row]
        for number, length in enumerate(lengths, 1):
            if length != lengths[0]:
                raise ValueError(f"row {number} has {length} fields, and the heading {lengths[0]}")
        frame = pd.read_csv(io.StringIO(text), **options)
        for column in (*columns, *numbers):
            if column not in frame:
                raise ValueError(f"it has no column {column}")
            if column in numbers and len(frame) and not pd.api.types.is_numeric_dtype(frame[column]):
                raise ValueError(f"column {column} does not hold numbers alone")
    except (ValueError, OverflowError, csv.Error) as error:
        raise UserError(f"{place} is not a whole table ({plain(str(error))})", remedy) from None
    return frame


def load(path: Path, kind: type[M], remedy: str = "") -> list[M]:
    """Read all records of a JSON-lines file. Empty lines are ignored.

    Raises:
        UserError: the file is missing, or a line is corrupt, truncated or not a record of this kind.
    """
    return [record for _, record in scan(path, kind, remedy)]


def scan(path: Path, kind: type[M], remedy: str = "") -> Iterator[tuple[int, M]]:
    """Yield (byte offset of the line, record) for each line of a JSON-lines file.

    Raises:
        As `load`, when the line is reached.
    """
    require_regular(path, remedy or REPRO)
    offset = 0
    # Bytes, because text mode breaks lines at more characters than JSON lines do.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                if line.strip():
                    yield offset, kind.model_validate_json(line.rstrip(b"\r\n"))
            except ValidationError as error:
                raise UserError(
                    f"{path}, line {number} is not a whole {kind.__name__} record ({first_fault(error)})",
                    remedy or f"delete {path} and run `dvc repro`: what is cached is restored, the rest is made again",
                ) from None
            offset += len(line)


def remains(path: Path, kind: type[T]) -> list[T | None]:
    """Read a journal of `sealed` lines. Its writer may still be running, or may have been killed.

    Returns:
        One value for each line; None if the line is cut off, altered, from another journal, or has no digest. [] if the
        file does not exist.

    Raises:
        UserError: the path is not a regular file.
    """
    if not path.exists():
        return []
    require_regular(path)
    values: list[T | None] = []
    with path.open("rb") as file:
        for line in file:
            text = line.rpartition(SEAL)[0] + b"}"
            try:
                values.append(_adapter(kind).validate_json(text) if line == _with_digest(path, text) else None)
            except ValidationError:
                values.append(None)
    return values


def sealed(path: Path, text: str) -> bytes:
    """Return the line of a journal for a JSON object: the object with its digest as a further field, and a newline.

    Keys of the environment are removed. The digest covers the names of the file and its folder, so that a line copied
    from another journal is not accepted."""
    return _with_digest(path, json_without_secrets(text).encode())


def _with_digest(path: Path, text: bytes) -> bytes:
    place = "/".join(path.parts[-2:]).encode(errors="surrogateescape")
    return text[:-1] + SEAL + bytes_digest(place + text).encode() + b'"}\n'


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


def first_fault(error: ValidationError) -> str:
    """Describe the first error of a validation and its place."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    location = ".".join(str(part) for part in first["loc"])
    return plain(f"{first['msg']}{f' at {location}' if location else ''}")
