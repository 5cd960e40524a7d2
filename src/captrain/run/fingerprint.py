"""Fingerprints of work: a digest of its code and of its input.

`reached_code` finds the code that decides a result: the definitions that a script or module reaches, without comments
and docstrings. Stages are keyed by it (`code` in results/spec.yaml). So is everything that can be resumed (journals,
workspaces, cluster jobs), so changed code never resumes the work of other code.

The package `run`, the machine and the paths of files do not count: they decide where work runs and not its result.
(Values of the configuration are params of the stages.)
"""

import ast
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path

from pydantic import BaseModel

from captrain.errors import UserError
from captrain.records import digest, file_digest, publish_text
from captrain.run import Machine, find_project

PACKAGE = Path(__file__).parents[1]
CODE = Path(".cache/code")
"""Folder of a project that keeps the digests of code, with the state of captrain's files that they belong to."""
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
"""Packages of components, each with the module that defines its protocol.

The configuration names components by import path. Code that reaches a protocol may run any component of its package
that the configuration names, so these components count. Without a configuration, the whole package counts.
"""
QUOTED = "benchmarks"
"""The package that hashes the text of its components for fingerprints. Comments and docstrings count there."""
REGISTRIES = {"comparison/baselines": "comparison/baselines/registry.py"}
"""Packages whose modules declare entries of a registry, each with the module that collects the entries.

Code that imports a registry only reads the declarations. So their constants and classes count, but not the functions
that they name.
"""
HARMLESS = {"cache", "contextmanager", "dataclass", "final", "lru_cache", "overload", "runtime_checkable"}
"""Decorators that register nothing. A definition with any other decorator counts even if nothing names it."""
UNSENT = {"ABC", "Exception", "Generic", "Module", "NamedTuple", "Protocol", "TypedDict", "UserError"}
"""Base classes whose subclasses are never sent to a language model as a schema."""
WHOLE, TEXT, DECLARED = "the module", "the file", "the declarations"
"""Used instead of a definition's name: all statements of a module, the bytes of a file, the entries of a registry."""
STRING = r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^\\"\n])*"|\'(?:\\.|[^\\\'\n])*\''
UNCOUNTED = re.compile(rf"({STRING})|[ \t]*#[^\n]*|\n[ \t]*(?=\n|$)", re.DOTALL)
"""Matches strings (group 1), which count, and comments and blank lines, which do not."""

Definition = tuple[Path, str]
"""A file of captrain and the name of a definition in it, or WHOLE, TEXT or DECLARED."""


@dataclass(frozen=True, eq=False)
class Statement:
    """A statement at the top of a module.

    Args:
        text: without comments and docstrings.
        binds: the name that it defines; "" if it runs for its effect.
        kind: import, function, class, call (a value that a call makes) or other.
        names: identifiers in it, also quoted ones.
        reaches: what it imports, and the files and modules that its strings name.
    """

    text: str
    binds: str
    kind: str
    names: frozenset[str]
    reaches: tuple[Definition, ...]


class Module:
    """The statements of a file of captrain. Data files, and code that never changes a result, have none."""

    def __init__(self, path: Path) -> None:
        is_plain = path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0] in PLAIN
        self.is_code = path.suffix == ".py" and path.stem != "__init__" and not is_plain
        self.statements = _statements(path, path.read_bytes()) if self.is_code else ()
        self.defining = dict[str, list[Statement]]()
        for statement in self.statements:
            self.defining.setdefault(statement.binds, []).append(statement)

    def counted(self, name: str) -> Sequence[Statement]:
        """List the statements that a definition stands for, see `Definition`."""
        if name == DECLARED:
            return _declarations(self.statements)
        if name in self.defining:
            return [*self.defining[name], *self.defining.get("", [])]
        return self.statements


def fingerprint(function: Callable[..., object], item: object) -> str:
    """Return the fingerprint of a module-level function applied to an item."""
    return digest(function.__qualname__, code_digest(function), identity_of(item))


@cache
def code_digest(function: Callable[..., object]) -> str:
    """Hash the code that the module of a function or class reaches, see `reached_code`.

    Parsing the code takes up to a second. So a project keeps the digest until a file of captrain changes.
    """
    start = Path(inspect.getfile(function))
    files = files_below(PACKAGE)
    state = digest([start.name, *map(str, files)], file_digest(start, *files))
    project = find_project(Path.cwd())
    if project is None:
        return digest(reached_code([start]))
    kept = project / CODE / function.__module__
    if kept.is_file() and (words := kept.read_text(encoding="utf-8").split())[:-1] == [state]:
        return words[-1]
    code = digest(reached_code([start]))
    with suppress(OSError, UserError):  # a read-only project: the next process parses again
        publish_text(kept, f"{state} {code}\n")
    return code


def reached_code(starts: Iterable[Path], components: Collection[str] | None = None) -> dict[str, str]:
    """Return the code of captrain that scripts or modules reach.

    Names are followed through modules: imports at the top and within functions, data files and modules that strings
    name, files beside a module that uses `__file__`, components (`PROTOCOLS`) and declarations (`REGISTRIES`). A
    definition counts if in doubt.

    Args:
        starts: Python files, which count whole.
        components: import paths that the configuration names; None for all components.

    Returns:
        Path in the package, or name of a script -> the statements that count, or the digest of a data file.
    """
    modules, found, scripts = dict[Path, Module](), set[Definition](), [start.resolve() for start in starts]
    queue = [(script, WHOLE) for script in scripts]
    while queue:
        path, name = queue.pop()
        if (path, name) in found:
            continue
        found.add((path, name))
        if path not in modules:
            modules[path] = Module(path)
            queue += _behind(path, components)
        if name == TEXT:
            queue.append((path, WHOLE))
        elif name != DECLARED:
            module = modules[path]
            for statement in module.counted(name):
                queue += [*statement.reaches, *((path, other) for other in statement.names & module.defining.keys())]
    parts = dict[Path, set[str]]()
    for path, name in found:
        parts.setdefault(path, set()).add(name)
    code = dict[str, str]()
    for path in sorted(parts):
        counted = {statement for name in parts[path] for statement in modules[path].counted(name)}
        texts = dict.fromkeys(statement.text for statement in modules[path].statements if statement in counted)
        is_text = TEXT in parts[path] or path.suffix != ".py"
        place = path.name if path in scripts else path.relative_to(PACKAGE).as_posix()
        code[place] = file_digest(path) if is_text else "\n".join(texts)
    return {name: text for name, text in code.items() if text}


def _behind(path: Path, components: Collection[str] | None) -> list[Definition]:
    """Return what importing a module may run: the components of a protocol's package, or a registry's declarations."""
    definitions = list[Definition]()
    for package, protocol in PROTOCOLS.items():
        if path == PACKAGE / protocol:
            definitions += _components(package, components)
    for package, registry in REGISTRIES.items():
        if path == PACKAGE / registry:
            definitions += [(file, DECLARED) for file in PACKAGE.joinpath(package).glob("*.py")]
    return definitions


def _components(package: str, components: Collection[str] | None) -> list[Definition]:
    """Return the modules of a package with configured components. All its files if `components` is None."""
    if components is None:
        files = [path for path in files_below(PACKAGE / package) if path.suffix != ".pyi"]
    else:
        modules = [re.split(r"[.:]\w+$", target)[0] for target in components]
        prefix = f"{PACKAGE.name}.{package}"
        files = [path for module in modules if f"{module}.".startswith(f"{prefix}.") for path in _module_files(module)]
    return [(path, TEXT if package == QUOTED else WHOLE) for path in files]


def _module_files(module: str) -> list[Path]:
    """Return the file of a module of captrain, or all files of a package."""
    place = PACKAGE.joinpath(*module.split(".")[1:])
    if (file := place.with_suffix(".py")).exists() or not place.is_dir():
        return [file]
    return [path for path in files_below(place) if path.suffix != ".pyi"]


def _declarations(statements: Sequence[Statement]) -> list[Statement]:
    """Return a module's assignments of call results, and the constants and classes that these calls name."""
    values = {statement.binds: statement for statement in statements if statement.kind in ("class", "call", "other")}
    queue, found = [statement for statement in values.values() if statement.kind == "call"], list[Statement]()
    while queue:
        statement = queue.pop()
        if statement not in found:
            found.append(statement)
            queue += [values[name] for name in statement.names & values.keys()]
    return found


@cache
def _statements(path: Path, source: bytes) -> tuple[Statement, ...]:
    """Read the statements of a module. Docstrings, comments and imports for type checkers are left out."""
    tree, lines = ast.parse(source, str(path)), source.decode("utf-8").split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            continue
        for text in node.body[isinstance(node, ast.ClassDef) and _may_be_schema(node) :]:
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                _blank(lines, text)
    statements = list[Statement]()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            statements += _import_statements(node)
            continue
        decorators = getattr(node, "decorator_list", [])
        first = min(place.lineno for place in (node, *decorators))
        text = UNCOUNTED.sub(r"\1", "\n".join(lines[first - 1 : node.end_lineno])).strip()
        if text and not text.startswith("if TYPE_CHECKING"):
            kind, parts = _kind_of(node), [*ast.walk(node)]
            names, reaches = _names_in(parts), tuple(_reached(parts, path))
            statements += [Statement(text, name, kind, names, reaches) for name in _bound_by(node)]
    used = {name for statement in statements if statement.kind != "import" for name in statement.names}
    # An import that nothing names runs for its effect.
    return tuple(
        replace(statement, binds="") if statement.kind == "import" and statement.binds not in used else statement
        for statement in statements
    )


def _may_be_schema(node: ast.ClassDef) -> bool:
    """Return whether a class may be sent to a language model as a schema. A schema contains the docstring."""
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return not {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in bases} <= UNSENT


def _blank(lines: list[str], node: ast.stmt) -> None:
    """Blank out the lines of a statement, unless they hold other code too."""
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before = lines[first].encode()[: node.col_offset].strip()
    after = lines[last].encode()[node.end_col_offset :].strip()
    if not before and (not after or after.startswith(b"#")):
        lines[first : last + 1] = [""] * (last + 1 - first)


def _import_statements(node: ast.Import | ast.ImportFrom) -> list[Statement]:
    """Split an import at the top of a module by the names that it binds."""
    source = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
    return [
        Statement(
            f"{source}import {alias.name} as {alias.asname or alias.name}",
            alias.asname or alias.name.split(".")[0],
            "import",
            frozenset(),
            tuple(_imported_by(node, alias.name)),
        )
        for alias in node.names
    ]


def _kind_of(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "function"
    if isinstance(node, ast.ClassDef):
        return "class"
    return "call" if isinstance(getattr(node, "value", None), ast.Call) else "other"


def _bound_by(node: ast.stmt) -> list[str]:
    """List the names that a statement defines; [""] if it may also have an effect."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        calls = [place.func if isinstance(place, ast.Call) else place for place in node.decorator_list]
        decorators = {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}
        return [node.name] if decorators <= HARMLESS else [""]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = [name for target in targets for name in (target.elts if isinstance(target, ast.Tuple) else [target])]
    is_plain = isinstance(node, ast.Assign | ast.AnnAssign) and all(isinstance(name, ast.Name) for name in names)
    return [name.id for name in names if isinstance(name, ast.Name)] if is_plain else [""]


def _names_in(parts: Sequence[ast.AST]) -> frozenset[str]:
    """List the identifiers in a statement, and the strings that may be quoted ones."""
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    quoted = (text for text in _strings(parts) if re.fullmatch(r"\w+( ?[\[|].*)?", text))
    return frozenset(names.union(*(re.findall(r"\w+", text) for text in quoted)))


def _strings(parts: Sequence[ast.AST]) -> list[str]:
    """List the strings in a statement that may be a name or a path."""
    texts = (part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))
    return [text for text in texts if 0 < len(text) < 200 and not {"\n", "\0"} & {*text}]


def _reached(parts: Sequence[ast.AST], path: Path) -> Iterator[Definition]:
    """Yield what a statement imports, and the files and modules that its strings name."""
    for part in parts:
        if isinstance(part, ast.Import | ast.ImportFrom):
            for alias in part.names:
                yield from _imported_by(part, alias.name)
    has_place = any(isinstance(part, ast.Name) and part.id == "__file__" for part in parts)
    for text in _strings(parts):
        # Only modules: a class is named as a component, which runs if the configuration names it.
        if re.fullmatch(rf"{PACKAGE.name}(\.\w+)+", text):
            file = PACKAGE.joinpath(*text.split(".")[1:]).with_suffix(".py")
            yield from [(file, WHOLE)] * file.is_file()
        beside = (text, f"{text}.py", f"{path.stem}{text}") if has_place else ()
        inside = [text] if "/" in text and text[0] != "/" else []
        for file in [*(path.parent / name for name in beside), *(PACKAGE / name for name in inside)]:
            if file.is_file() and file.is_relative_to(PACKAGE):
                yield file, TEXT
            elif file.is_dir() and file not in (PACKAGE, path.parent) and ".." not in file.parts:
                within = [part for part in files_below(file) if part.suffix != ".pyi"]
                yield from [(part, TEXT) for part in within if has_place or part.suffix != ".py"]


def _imported_by(node: ast.Import | ast.ImportFrom, name: str) -> Iterator[Definition]:
    """Yield the definition of captrain that an import brings. For a package, this is the definition that it exports."""
    if isinstance(node, ast.Import):
        module, exported = name, WHOLE
    else:
        module, exported = "" if node.level else node.module or "", name
    package, *parts = module.split(".")
    place = PACKAGE.joinpath(*parts)
    if package != PACKAGE.name:
        return
    if (file := place.with_suffix(".py")).exists() or not place.is_dir():  # a module may share its name with a folder
        yield file, exported
        return
    if (place / f"{exported}.py").exists():
        yield place / f"{exported}.py", WHOLE
    if exported in (exports := _exports(place)):
        yield place / f"{exports[exported]}.py", exported
    elif (place / exported).is_dir():
        yield from ((file, WHOLE) for file in files_below(place / exported) if file.suffix == ".py")


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
    """Reduce a value to JSON that contains everything that can change a result, and nothing else.

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
