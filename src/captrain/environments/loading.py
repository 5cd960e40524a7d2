"""Files of environments, opened: text of our own in this process, anything else in the sandbox.

A passport can say that a file is ours, and whoever can change a file can change its passport, too; so it is the text
that is asked. Ours is a docstring, the desk's own source, settings that are plain values, and templates of this
package, to the byte, and nothing else. A text of another version of captrain is not ours, either: it runs in the
sandbox, with equal results. What is derived from a benchmark in workers has no source of a desk, and a benchmark of
ours among its values; it is given that benchmark when it is opened, and files of one benchmark share its workers,
because each of these has the benchmark's packages in memory.

A published file is opened by its passport only, so that nothing is trained in that was changed after it was checked.
Name, bytes and kind are checked before anything of it runs, and what runs are the bytes that were checked.
"""

import ast
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path

from captrain.benchmarks import load_benchmark
from captrain.contract import CheckedEnvironment, Environment, file_fingerprint, load_file
from captrain.errors import EnvironmentFault, UserError
from captrain.records import Passport, digest, read_bytes, read_json
from captrain.run import Component, Machine, nested

WORLD = "benchmarks/servicedesk.py"
TEMPLATES = "environments/templates"
DERIVED = "environments/templates/derived.py.txt"
MARK = "#constants\n"
"""Place of its values in it."""
IMPORTS = "\n\nimport json\nimport re\n\n\n"
"""Text before it."""
IN_WORKERS = ("captrain.benchmarks.bfcl.Bfcl", "captrain.benchmarks.tau2.Tau2")
"""Benchmarks of ours that run in workers and have reference solutions: nothing else is opened for a file."""
HEADER = re.compile(r'"""(?:(?!""")[^\\])*"""\n')
SETTING = re.compile(r"[A-Z]+ = (.+)\n")
CONSTANT = re.compile(r"    (\w+) = (.+)")
REMEDY = "run `dvc repro environments` to write it again"
ENDING = ".passport.json"
WORLDS: dict[str, Environment] = {}
"""Benchmarks that are open in this process."""


@cache
def _our_parts() -> tuple[str, list[str]]:
    """Read the desk's source without its docstring, and the templates, the longest first: one may begin as another
    does."""
    _, _, world = files("captrain").joinpath(WORLD).read_text().partition('\n"""\n')
    folder = files("captrain").joinpath(TEMPLATES)
    texts = [entry.read_text() for entry in folder.iterdir() if entry.name.endswith(".py.txt")]
    return world, sorted(filter(None, texts), key=len, reverse=True)


def is_own_text(text: str) -> bool:
    """Tell if all of a file is text of ours, but for its docstring and plain values."""
    if world_of(text) is not None:
        return True
    header, (world, parts) = HEADER.match(text), _our_parts()
    if header is None or not text.startswith(world, header.end()):
        return False
    remainder = text[header.end() + len(world) :].lstrip("\n")
    while setting := SETTING.match(remainder):
        if not _is_plain(setting[1]):
            return False
        remainder = remainder[setting.end() :]
    remainder = remainder.lstrip("\n")
    while part := next((part for part in parts if remainder.startswith(part)), ""):
        remainder = remainder[len(part) :]
    return not remainder


@cache
def _derived_parts() -> tuple[str, str]:
    """Read the template of derived files: before and behind its values."""
    before, _, after = files("captrain").joinpath(DERIVED).read_text().partition(MARK)
    return IMPORTS + before, after


def derived_from(text: str) -> str:
    """The class that a program derived a file from, as its first lines name it; "" where its last are not our own."""
    match = re.search(r"^Derived from (\S+)\.$", text, re.MULTILINE)
    return match[1] if match is not None and text.endswith(_derived_parts()[1]) else ""


def world_of(text: str) -> Component | None:
    """The benchmark in workers that a text of ours is given when it is opened; None: it is another text."""
    (before, after), header = _derived_parts(), HEADER.match(text)
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


def load_own(path: Path, machine: Machine, source: bytes | None = None) -> CheckedEnvironment:
    """Load a file whose text is our own.

    Args:
        path: of the file.
        machine: where installations of benchmarks lie.
        source: its bytes, where somebody has read and checked them.

    Raises:
        UserError: the file is missing, or its benchmark is not installed.
        EnvironmentFault: the file does not load.
    """
    source = read_bytes(path, REMEDY) if source is None else source
    component = world_of(source.decode(errors="replace"))
    if component is None:
        return load_file(path, source)
    # A process that was forked has none of its parent's workers.
    key = digest(os.getpid(), component.model_dump_json(), machine.model_dump_json())
    if key not in WORLDS:
        WORLDS[key] = _open_world(path, component, machine)
    return load_file(path, source, WORLDS[key])


@contextmanager
def reopened(path: Path, machine: Machine | None) -> Iterator[CheckedEnvironment]:
    """Load a file in fresh processes for as long as it is looked at: text of ours with its benchmark in workers of its
    own, any other in one that has no packages.

    Args:
        path: of the file.
        machine: where installations of benchmarks lie; None: the file is given no benchmark.
    """
    from captrain.environments.sandbox.confined import load_confined

    source = read_bytes(path, REMEDY)
    component = None if machine is None else world_of(source.decode(errors="replace"))
    if component is None or machine is None:
        yield load_confined(path, "none", source=source)
        return
    world = _open_world(path, component, machine)
    try:
        yield load_file(path, source, world)
    finally:
        world.pool.close()  # pyright: ignore[reportAttributeAccessIssue]


def _open_world(path: Path, component: Component, machine: Machine) -> Environment:
    try:
        return load_benchmark(component, machine).environment
    except TypeError as error:
        raise EnvironmentFault(
            f"environment file {path} does not load: {component.target} takes other settings ({error})", REMEDY
        ) from None


def read_passports(folder: Path) -> dict[str, Passport]:
    """The passports in a folder of environments, by capability, in the order of their names.

    Raises:
        UserError: a passport is not whole, or is made out for a file of another name.
    """
    passports: dict[str, Passport] = {}
    for path in sorted(folder.glob(f"*{ENDING}")):
        passport = read_json(path, Passport, REMEDY)
        if f"{passport.capability}{ENDING}" != path.name:
            raise UserError(f"{path} is the passport of {passport.capability}, not of a file of its own name", REMEDY)
        passports[passport.capability] = passport
    return passports


def load_environment(folder: Path, passport: Passport, machine: Machine) -> CheckedEnvironment:
    """Load the environment that a passport was made out for, confined unless its text is our own.

    Raises:
        UserError: the file is missing, is another one than was checked, or the sandbox is weaker than asked for.
        EnvironmentFault: the file does not load.
    """
    from captrain.environments.sandbox.confined import load_confined

    path = folder / f"{passport.capability}.py"
    source, loaded, installed = read_bytes(path, REMEDY), None, ""
    text, fingerprint = source.decode(errors="replace"), file_fingerprint(path.stem, source)
    if (world := world_of(text)) is not None:
        loaded, installed = load_own(path, machine, source), f", or {world.target} is not installed as it was then"
    elif passport.trusted and fingerprint == passport.environment and is_own_text(text):
        loaded = load_own(path, machine, source)
    elif fingerprint == passport.environment or not passport.trusted:
        # What a file says of itself is a part of its fingerprint, and nobody knows it before it has run: confined. Our
        # own say nothing of themselves, and must have the fingerprint of the passport already.
        loaded = load_confined(path, machine.sandbox, source=source)
    if loaded is None or loaded.fingerprint != passport.environment:
        raise UserError(
            f"{path} is not the file that {passport.capability}{ENDING} was made out for{installed}",
            "run `dvc repro environments` to make both again",
        )
    return loaded
