"""Whether the text of an environment file is this package's own, and may run in this process.

A passport can say so, and whoever can change a file can change its passport, too; so it is the text that is asked. Ours
is a docstring, the desk's own source, settings that are plain values, and templates of this package, to the byte, and
nothing else. A text of another version of captrain is not ours, either: it runs in the sandbox, with equal results.
What is derived from a benchmark in workers has no source of a desk, and a benchmark of ours among its values.
"""

import ast
import re
from functools import cache
from importlib.resources import files

from captrain.config import Component, nested

WORLD = "benchmarks/servicedesk.py"
TEMPLATES = "environments/templates"
DERIVED = "environments/templates/derived.py.txt"
MARK = "#constants\n"
"""Where its values stand in it."""
IMPORTS = "\n\nimport json\nimport re\n\n\n"
"""What stands before it."""
IN_WORKERS = ("captrain.benchmarks.bfcl.Bfcl", "captrain.benchmarks.tau2.Tau2")
"""Benchmarks of ours that run in workers and have reference solutions: nothing else is opened for a file."""
HEADER = re.compile(r'"""(?:(?!""")[^\\])*"""\n')
SETTING = re.compile(r"[A-Z]+ = (.+)\n")
CONSTANT = re.compile(r"    (\w+) = (.+)")


def is_own_text(text: str) -> bool:
    """Whether all of a file is text of ours, but for its docstring and plain values."""
    header, world = HEADER.match(text), _world()
    if world_of(text) is not None:
        return True
    if header is None or not text.startswith(world, header.end()):
        return False
    remainder = text[header.end() + len(world) :].lstrip("\n")
    while setting := SETTING.match(remainder):
        if not _is_plain(setting[1]):
            return False
        remainder = remainder[setting.end() :]
    remainder = remainder.lstrip("\n")
    while part := next((part for part in _parts() if remainder.startswith(part)), ""):
        remainder = remainder[len(part) :]
    return not remainder


def derived_from(text: str) -> str:
    """The class that a program derived a file from, as its first lines name it; "" where its last are not our own."""
    _, _, after = files("captrain").joinpath(DERIVED).read_text().partition(MARK)
    match = re.search(r"^Derived from (\S+)\.$", text, re.MULTILINE)
    return match[1] if match is not None and text.endswith(after) else ""


def world_of(text: str) -> Component | None:
    """The benchmark in workers that a text of ours is given when it is opened; None: it is another text."""
    before, _, after = files("captrain").joinpath(DERIVED).read_text().partition(MARK)
    before, header = IMPORTS + before, HEADER.match(text)
    if header is None or not (text.startswith(before, header.end()) and text.endswith(after)):
        return None
    lines = text[header.end() + len(before) : len(text) - len(after)].split("\n")
    matches = [CONSTANT.fullmatch(line) for line in lines[:-1]]
    constants = {match[1]: match[2] for match in matches if match is not None}
    if None in matches or lines[-1] or not all(map(_is_plain, constants.values())):
        return None
    target, settings = (ast.literal_eval(constants.get(name, "None")) for name in ("TARGET", "SETTINGS"))
    if target not in IN_WORKERS or not isinstance(settings, dict) or any(nested(*item) for item in settings.items()):
        return None
    return Component.model_validate({**settings, "_target_": target})


def _is_plain(expression: str) -> bool:
    try:
        ast.literal_eval(expression)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return True


@cache
def _world() -> str:
    _, _, world = files("captrain").joinpath(WORLD).read_text().partition('\n"""\n')
    return world


@cache
def _parts() -> tuple[str, ...]:
    """The templates, the longest first: one may begin as another does."""
    folder = files("captrain").joinpath(TEMPLATES)
    texts = [entry.read_text() for entry in folder.iterdir() if entry.name.endswith(".py.txt")]
    return tuple(sorted(filter(None, texts), key=len, reverse=True))
