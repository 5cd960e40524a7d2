"""Fingerprints of work: a digest of its code and of its input.

`code_closure` lists the code that decides a result. Stages list it in dvc.yaml, and everything that can be resumed
(journals, workspaces, cluster jobs) is named by its digest, so changed code never resumes the work of other code.

The package `run`, the machine and the paths of files do not count: they decide where work runs and not its result.
(Values of the configuration are params of the stages.)
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
"""Packages and modules that never change a result."""
PROTOCOLS = {
    "agents": "agents/policy.py",
    "benchmarks": "benchmarks/loading.py",
    "capabilities": "capabilities/analyst.py",
    "environments": "environments/synthesizer.py",
    "routing": "routing/router.py",
    "training": "training/recipe.py",
}
"""Packages of components, each with the module that defines its protocol. Components are named by import path in the
configuration, so code that imports the protocol may run any of them: the whole package counts."""
REGISTRIES = {"comparison/baselines": "comparison/baselines/registry.py"}
"""Packages whose modules declare entries, each with the module that collects them. Code that imports a registry only
reads the declarations: registry imports count as files, not as transitive code."""


def fingerprint(function: Callable[..., object], item: object) -> str:
    """Return the fingerprint of a module-level function applied to an item."""
    return digest(function.__qualname__, code_digest(function), identity_of(item))


@cache
def code_digest(function: Callable[..., object]) -> str:
    """Hash the code of a function or class, see `code_closure`."""
    start = Path(inspect.getfile(function))
    return file_digest(start, *code_closure(start))


def code_closure(start: Path) -> list[Path]:
    """List the files of captrain that a script or module depends on.

    These are its transitive imports, at the top and within functions, the data files that it names, whole packages of
    components (see `PROTOCOLS`), and the modules of registries (see `REGISTRIES`).

    Args:
        start: a Python file. It is included if it is part of captrain.

    Returns:
        Sorted paths without `__init__` files.
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
        for package, protocol in PROTOCOLS.items():
            if path == PACKAGE / protocol:
                queue += files_below(PACKAGE / package)
        for package, registry in REGISTRIES.items():
            if path == PACKAGE / registry:
                declaring.update(PACKAGE.joinpath(package).glob("*.py"))
    return sorted(path for path in closure | declaring if path.is_relative_to(PACKAGE) and path.stem != "__init__")


@cache
def _references(path: Path, text: bytes) -> list[Path]:
    """List the files of captrain that a module imports, and the data files or folders that its strings name."""
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
    """Return the file behind `from module import name`; for a package, the module that it exports the name from."""
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
def _exports(package: Path) -> dict[str, str]:
    """Map each exported name of a package to the path of its module, relative to the package."""
    listing = package / "__init__.pyi"
    tree = ast.parse(listing.read_bytes()) if listing.exists() else ast.Module([], [])
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.asname or alias.name: str(node.module).replace(".", "/") for node in imports for alias in node.names}


def files_below(folder: Path) -> list[Path]:
    """List all files below a folder in order, without hidden files and `__pycache__`."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path for path in paths if not any(part == "__pycache__" or part[0] == "." for part in path.parts[-3:])]


def identity_of(value: object) -> object:
    """Reduce a value to the JSON that decides a result.

    A path becomes the digest of its content, a machine becomes None, an object with `identity()` its return value, and
    any other object its fields.
    """
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
