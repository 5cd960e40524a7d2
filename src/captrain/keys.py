"""What decides a result, as a digest: the code that makes it, and the content of what it is made of.

Work that is sent away is known by such a key, so that whoever asks for the same again finds it. Never part of it: the
machine, and where files lie.
"""

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from captrain.machine import Machine
from captrain.records import digest, file_digest

PACKAGE = Path(__file__).parent
PLAIN = {"components", "conf", "dispatch", "errors", "jobs", "keys", "launch", "machine", "spec"}
"""Parts of this package that never change what a function computes."""


def key_of(function: Callable[[Any], Any], item: Any) -> str:
    """The key of applying a module-level function to an item."""
    return digest(function.__qualname__, code_of(function), content(item))


@cache
def code_of(function: Callable[..., Any]) -> str:
    """Digest of the source of a function's module and of every part of captrain that this imports, at its top or
    within functions; a subpackage counts as a whole, because components are named by path and not imported."""
    waiting, reached = {Path(inspect.getfile(function))}, set[Path]()
    while waiting:
        path = waiting.pop()
        reached.add(path)
        names = _imports(path) if path.suffix == ".py" else set()
        for part in {name.split(".")[1] for name in names if name.startswith("captrain.")} - PLAIN:
            folder = PACKAGE / part
            waiting |= set(_files(folder) if folder.is_dir() else [folder.with_suffix(".py")]) - reached
    return file_digest(*sorted(path for path in reached if path.exists()))


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())) if path.exists() else ():
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _files(folder: Path) -> list[Path]:
    """All files below a folder that are somebody's work."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path for path in paths if not any(part == "__pycache__" or part[0] == "." for part in path.parts[-3:])]


def content(value: Any) -> Any:
    """What a value says, as JSON: of a path the content that lies there, of a machine nothing, of an object that
    defines `identity()` what this returns."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Machine):
        return None
    if hasattr(value, "identity"):
        return content(value.identity())
    if isinstance(value, Path):
        if value.is_dir():
            return [[str(path.relative_to(value)), file_digest(path)] for path in _files(value)]
        return file_digest(value) if value.exists() else "missing"
    if isinstance(value, BaseModel):
        return {name: content(one) for name, one in value}
    if is_dataclass(value):
        return {field.name: content(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): content(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [content(one) for one in value]
    return value
