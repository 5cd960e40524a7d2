"""Environments that have been published: their passports, and the files that these were made out for.

A file is opened by its passport only, so that nothing is trained in that was changed after it was checked. Name, bytes
and kind are checked before anything of it runs, and what runs are the bytes that were checked: in the sandbox, unless
their text is our own, whatever the passport says.
"""

from pathlib import Path

from captrain.config import Machine
from captrain.contract import Target, file_fingerprint
from captrain.environments.own_text import is_own_text, world_of
from captrain.environments.worlds import load_own
from captrain.errors import UserError
from captrain.records import Passport, read_bytes, read_json

REMEDY = "run `dvc repro environments` to make it again"
ENDING = ".passport.json"


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


def load_environment(folder: Path, passport: Passport, machine: Machine) -> Target:
    """The environment that a passport was made out for, confined unless its text is our own.

    Raises:
        UserError: the file is missing, is another one than was checked, or the sandbox is weaker than asked for.
        EnvironmentFault: the file does not load.
    """
    from captrain.environments.sandbox.confined import load_confined

    path = folder / f"{passport.capability}.py"
    source = read_bytes(path, "run `dvc repro environments` to write it again")
    fingerprint = file_fingerprint(path.stem, source)
    if (world := world_of(source.decode(errors="replace"))) is not None:
        narrowed = load_own(path, machine, source)
        if narrowed.fingerprint == passport.environment:
            return narrowed
        raise UserError(
            f"{path} is not the file that {passport.capability}{ENDING} was made out for, or {world.target} is not "
            "installed as it was then",
            "run `dvc repro environments` to make both again",
        )
    if passport.trusted and fingerprint == passport.environment and is_own_text(source.decode(errors="replace")):
        return load_own(path, machine, source)
    # What a file says of itself is a part of its fingerprint, and nobody knows it before it has run: confined.
    confined = load_confined(path, machine.sandbox, source=source) if _may_say_more(passport, fingerprint) else None
    if confined is None or confined.fingerprint != passport.environment:
        raise UserError(
            f"{path} is not the file that {passport.capability}{ENDING} was made out for",
            "run `dvc repro environments` to make both again",
        )
    return confined


def _may_say_more(passport: Passport, fingerprint: str) -> bool:
    """Tell if the file may be the one that was checked, once it is loaded: our own say nothing of themselves, and must
    have the fingerprint of the passport already."""
    return fingerprint == passport.environment or not passport.trusted
