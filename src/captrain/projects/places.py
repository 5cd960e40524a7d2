"""Lines of the user's own code, for messages: `file:line`, the file as seen from where captrain was called.

The user's own is the file that has the benchmark, and whatever lies beside or below it; of what was not built, every
file that is neither captrain's, nor an installed package's, nor Python's.
"""

import ast
import inspect
import os
import sys
import sysconfig
import textwrap
import traceback
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
INSTALLED = {"site-packages", "dist-packages"}


def source_file(owner: type) -> Path | None:
    """Find the file that has a class; None where it is of none."""
    try:
        return Path(inspect.getfile(owner)).resolve()
    except (TypeError, OSError):
        return None


def place_at(path: str | Path, line: int) -> str:
    """Format a line as messages name it."""
    return f"{os.path.relpath(path)}:{line}"


def is_own(path: str, source: Path | None) -> bool:
    """Return whether a file is the user's.

    Args:
        path: as a frame has it.
        source: the file that has the benchmark; None where nothing was built.
    """
    place = Path(path).resolve()
    if not place.is_file():
        return False
    if source is not None and (place == source or (_has_siblings(source) and place.is_relative_to(source.parent))):
        return True
    return not (_is_installed(place) or place.is_relative_to(PACKAGE) or place.is_relative_to(STANDARD_LIBRARY))


def _is_installed(place: Path) -> bool:
    return bool(INSTALLED & {*place.parts})


def _has_siblings(source: Path) -> bool:
    """Return whether the neighbours of a file are of the same hand: not where packages of all kinds lie."""
    return source.parent.name not in INSTALLED


def raising_place(error: BaseException, source: Path | None) -> str:
    """Find the innermost line of the user's own code that an error came through, "" where it came through none."""
    if isinstance(error, SyntaxError) and error.filename and is_own(error.filename, source):
        return place_at(error.filename, error.lineno or 1)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_own(frame.filename, source):
            return place_at(frame.filename, frame.lineno or 1)
    return ""


def calling_place(source: Path | None) -> str:
    """Find the innermost line of the user's own code that is being run, "" where none is."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_own(frame.f_code.co_filename, source):
            return place_at(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def definition(owner: type, name: str) -> str:
    """Find the line that defines a member of a class: a method, a property, or a value; "" where the class has none."""
    for base in owner.__mro__:
        if name in vars(base):
            return _function_place(vars(base)[name]) or _value_place(base, name)
    return ""


def _function_place(member: object) -> str:
    inner = next((getattr(member, key) for key in ("fget", "func", "__func__") if hasattr(member, key)), member)
    code = getattr(inspect.unwrap(inner), "__code__", None) if callable(inner) else None
    return place_at(code.co_filename, code.co_firstlineno) if code else ""


def _value_place(owner: type, name: str) -> str:
    """Find the line that gives a member of a class its value, or else that of the class."""
    try:
        lines, start = inspect.getsourcelines(owner)
        [body] = ast.parse(textwrap.dedent("".join(lines))).body
        path = inspect.getfile(owner)
    except (TypeError, OSError, SyntaxError, ValueError):
        return ""
    for node in getattr(body, "body", []):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return place_at(path, start + node.lineno - 1)
    return place_at(path, start)
