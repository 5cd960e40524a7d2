"""Loads environment files: our own text in this process, any other text in the sandbox.

A passport could claim that a file is ours, but whoever changes a file can also change its passport. So the text itself
decides. Our own text consists of a docstring, the service desk's source, settings with plain values, and templates of
this package, byte for byte. A file that another version of captrain wrote runs in the sandbox, with equal results.

A file that is derived from a benchmark in workers has no desk source. It names the benchmark and receives it when it is
loaded. All files of a benchmark share its workers, because each worker holds the benchmark's packages in memory.

A published file is loaded by its passport only: name, bytes and kind are checked before anything runs, and exactly the
checked bytes run. So nothing is trained in a file that was changed after its check.
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
"""Line of the template that the values replace."""
IMPORTS = "\n\nimport json\nimport re\n\n\n"
"""Text before the template."""
IN_WORKERS = ("captrain.benchmarks.bfcl.Bfcl", "captrain.benchmarks.tau2.Tau2")
"""Benchmarks in workers that have reference solutions: only these are loaded for a file."""
HEADER = re.compile(r'"""(?:(?!""")[^\\])*"""\n')
SETTING = re.compile(r"[A-Z]+ = (.+)\n")
CONSTANT = re.compile(r"    (\w+) = (.+)")
REMEDY = "run `dvc repro environments` to write it again"
ENDING = ".passport.json"
WORLDS: dict[str, Environment] = {}
"""Benchmarks that are loaded in this process."""


@cache
def _our_parts() -> tuple[str, list[str]]:
    """Read the desk's source without its docstring, and the templates, longest first: one may be a prefix."""
    _, _, world = files("captrain").joinpath(WORLD).read_text(encoding="utf-8").partition('\n"""\n')
    folder = files("captrain").joinpath(TEMPLATES)
    texts = [entry.read_text(encoding="utf-8") for entry in folder.iterdir() if entry.name.endswith(".py.txt")]
    return world, sorted(filter(None, texts), key=len, reverse=True)


def is_own_text(text: str) -> bool:
    """Return whether a file is our own text, apart from its docstring and plain values."""
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
    """Read the template of derived files, before and behind the values."""
    before, _, after = files("captrain").joinpath(DERIVED).read_text(encoding="utf-8").partition(MARK)
    return IMPORTS + before, after


def derived_from(text: str) -> str:
    """Return the class that a file was derived from, as its docstring says; "" if it does not end with our template."""
    match = re.search(r"^Derived from (\S+)\.$", text, re.MULTILINE)
    return match[1] if match is not None and text.endswith(_derived_parts()[1]) else ""


def world_of(text: str) -> Component | None:
    """Return the benchmark in workers that a text of our own needs; None for other texts."""
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
        path: the file.
        machine: where benchmarks are installed.
        source: its bytes, if they were read and checked before.

    Raises:
        UserError: the file is missing, or its benchmark is not installed.
        EnvironmentFault: the file does not load.
    """
    source = read_bytes(path, REMEDY) if source is None else source
    component = world_of(source.decode(errors="replace"))
    if component is None:
        return load_file(path, source)
    # A forked process does not have its parent's workers.
    key = digest(os.getpid(), component.model_dump_json(), machine.model_dump_json())
    if key not in WORLDS:
        WORLDS[key] = _open_world(path, component, machine)
    return load_file(path, source, WORLDS[key])


@contextmanager
def reopened(path: Path, machine: Machine | None) -> Iterator[CheckedEnvironment]:
    """Load a file in fresh processes: our own text with new workers of its benchmark, any other text without packages.

    Args:
        path: the file.
        machine: where benchmarks are installed; None for a file without a benchmark.
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
    """Read the passports in a folder, by capability and in order of their names.

    Raises:
        UserError: a passport is damaged, or belongs to a file of another name.
    """
    passports: dict[str, Passport] = {}
    for path in sorted(folder.glob(f"*{ENDING}")):
        passport = read_json(path, Passport, REMEDY)
        if f"{passport.capability}{ENDING}" != path.name:
            raise UserError(f"{path} is the passport of {passport.capability}, which is not its own name", REMEDY)
        passports[passport.capability] = passport
    return passports


def load_environment(folder: Path, passport: Passport, machine: Machine) -> CheckedEnvironment:
    """Load the environment of a passport, in the sandbox unless its text is our own.

    Raises:
        UserError: the file is missing or differs from the checked one, or the sandbox is weaker than required.
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
        # `about` is a part of the fingerprint and is known only after the file has run in the sandbox. Our own files
        # have no `about`, so their fingerprint must match before they run.
        loaded = load_confined(path, machine.sandbox, source=source)
    if loaded is None or loaded.fingerprint != passport.environment:
        raise UserError(
            f"{path} is not the file that {passport.capability}{ENDING} was made for{installed}",
            "run `dvc repro environments` to make both again",
        )
    return loaded
