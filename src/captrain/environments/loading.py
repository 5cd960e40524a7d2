"""Environments that have been published: their passports, and the files that these were made out for.

A file is opened by its passport only, so that nothing is trained in that was changed after it was checked, and it runs
in the sandbox unless its text is our own.
"""

from pathlib import Path

from pydantic import ValidationError

from captrain.config import Machine
from captrain.contract import Target, load_file
from captrain.errors import UserError
from captrain.records import Passport


def read_passports(folder: Path) -> dict[str, Passport]:
    """The passports in a folder of environments, by capability, in the order of their names.

    Raises:
        UserError: a passport is not whole.
    """
    passports: dict[str, Passport] = {}
    for path in sorted(folder.glob("*.passport.json")):
        try:
            passport = Passport.model_validate_json(path.read_bytes())
        except ValidationError as error:
            problem = error.errors()[0]
            raise UserError(
                f"{path} is not a whole passport ({'.'.join(map(str, problem['loc']))}: {problem['msg']})",
                "run `dvc repro environments` to make it again",
            ) from None
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
    target = load_file(path) if passport.trusted else load_confined(path, machine.sandbox)
    if target.fingerprint != passport.environment:
        raise UserError(
            f"{path} is not the file that {passport.capability}.passport.json was made out for",
            "run `dvc repro environments` to make both again",
        )
    return target
