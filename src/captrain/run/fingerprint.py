"""The fingerprint of a piece of work: a digest of the code that does it and of the identity of what it is done on.

Identity is what decides a result, as JSON; a digest is a hash of bytes or of JSON, whatever it stands for.

The one answer to which code decides a result is `code_closure`: stages list it in dvc.yaml, and whatever can be gone on
from (journals, workspaces, jobs of a cluster) is named by its digest, so that changed code never goes on from what
other code began. Where and how wide work runs decides nothing: neither the rooms `config` and `execution`, whose values
are params, nor the machine, nor where files lie.
"""

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

from pydantic import BaseModel

from captrain.records import digest, file_digest
from captrain.run import Machine

PACKAGE = Path(__file__).parents[1]
PLAIN = ("run", "errors.py")
"""Rooms and modules that never change what a function computes."""
PROTOCOLS = {
    "agents": "agents/policy.py",
    "benchmarks": "benchmarks/loading.py",
    "capabilities": "capabilities/analyst.py",
    "environments": "environments/synthesizer.py",
    "routing": "routing/router.py",
    "training": "training/recipe.py",
}
"""Rooms of components, each with the module that says what its components are. Components are named by import path and
not imported: whoever reaches that module may run any of them, so that the room counts as a whole."""
REGISTRIES = {"comparison/baselines": "comparison/baselines/registry.py"}
"""Rooms whose modules declare entries, each with the module that collects these: whoever reaches it reads what the
room's modules declare, and runs nothing else of them, so that their files count and what they import does not."""


def fingerprint(function: Callable[..., object], item: object) -> str:
    """Fingerprint the application of a module-level function to an item."""
    return digest(function.__qualname__, code_digest(function), identity_of(item))


@cache
def code_digest(function: Callable[..., object]) -> str:
    """Hash the code that a function or class runs, as `code_closure` has it."""
    start = Path(inspect.getfile(function))
    return file_digest(start, *code_closure(start))


def code_closure(start: Path) -> list[Path]:
    """List the files of captrain that a script or module runs: what it imports at its top or within functions, and the
    data of the package that it names; rooms of components as a whole (see `PROTOCOLS`), and the modules that registries
    read (see `REGISTRIES`).

    Args:
        start: a Python file. It is in the closure itself if it is part of the package.

    Returns:
        Paths in order, without the `__init__` files, which compute nothing.
    """
    queue, closure, declaring = [start.resolve()], set[Path](), set[Path]()
    while queue:
        path = queue.pop()
        is_ours = path.is_relative_to(PACKAGE)
        if path in closure or (is_ours and path.relative_to(PACKAGE).parts[0] in PLAIN):
            continue
        closure.add(path)
        if path.suffix == ".py":
            queue += _references(path, path.read_bytes())
        for room, protocol in PROTOCOLS.items():
            if path == PACKAGE / protocol:
                queue += files_below(PACKAGE / room)
        for room, registry in REGISTRIES.items():
            if path == PACKAGE / registry:
                declaring.update(PACKAGE.joinpath(room).glob("*.py"))
    return sorted(path for path in closure | declaring if path.is_relative_to(PACKAGE) and path.stem != "__init__")


@cache
def _references(path: Path, text: bytes) -> list[Path]:
    """List the files of this package that a module of this text imports, and those that a string in it names as path or
    as beginning of one, which are not code."""
    references = list[Path]()
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.Import):
            references += [file for alias in node.names for file in _imported(alias.name, "")]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            references += [file for alias in node.names for file in _imported(node.module, alias.name)]
        elif isinstance(node, ast.Constant) and isinstance(name := node.value, str) and "/" in name[:200]:
            place = PACKAGE / name
            if len(name) < 200 and "\n" not in name and name[0] != "/" and place.exists() and place != PACKAGE:
                files = files_below(place) if place.is_dir() else [place]
                references += [file for file in files if file.suffix != ".py"]
    return references


def _imported(module: str, name: str) -> list[Path]:
    """List the file that `from module import name` runs; of a room, the one that it exports the name from."""
    package, *parts = module.split(".")
    place = PACKAGE.joinpath(*parts)
    if package != PACKAGE.name:
        return []
    if not place.is_dir():
        return [place.with_suffix(".py")]
    if (place / f"{name}.py").exists():
        return [place / f"{name}.py"]
    return [place / f"{exported}.py" for exported in [_exports(place).get(name)] if exported]


@cache
def _exports(room: Path) -> dict[str, str]:
    """Read the names that a room exports, each with the path below the room of the module that defines it."""
    listing = room / "__init__.pyi"
    tree = ast.parse(listing.read_bytes()) if listing.exists() else ast.Module([], [])
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.asname or alias.name: str(node.module).replace(".", "/") for node in imports for alias in node.names}


def files_below(folder: Path) -> list[Path]:
    """List all files below a folder that are somebody's work, in order."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path for path in paths if not any(part == "__pycache__" or part[0] == "." for part in path.parts[-3:])]


def identity_of(value: object) -> object:
    """Reduce a value to what decides a result, as JSON: of a path the content of the file or folder, of a machine
    nothing, of an object with `identity()` what this returns, of any other all its fields."""
    if isinstance(value, Machine):
        return None
    if callable(identity := getattr(value, "identity", None)):
        return identity_of(identity())
    if isinstance(value, Path):
        if value.is_dir():
            return [[str(path.relative_to(value)), file_digest(path)] for path in files_below(value)]
        return file_digest(value) if value.exists() else "missing"
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping | BaseModel):
        return {str(name): identity_of(entry) for name, entry in dict(value).items()}
    if isinstance(value, list | tuple):
        return [identity_of(entry) for entry in value]
    return value
