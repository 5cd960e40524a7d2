"""Synthesized training environments: one self-contained file per capability, trusted after its passport only."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from captrain.config import Machine
from captrain.contract import Target, load_file
from captrain.errors import UserError
from captrain.records import Capability, Passport, Rollout


@dataclass(frozen=True)
class Brief:
    """What an environment is asked to train, and what its author may know of the target: the schemas of its tools,
    and discovery rollouts, first failed ones that lack the capability, then passed ones."""

    capability: Capability
    tools: list[dict[str, Any]]
    examples: Sequence[Rollout] = ()


@dataclass(frozen=True)
class Attempt:
    """A text that was written, and what its passport found."""

    text: str
    passport: Passport


class Synthesizer(Protocol):
    """Writes environments."""

    trusted: bool
    """Whether what it writes is text of our own, which need not be confined."""

    def synthesize(self, brief: Brief, attempts: Sequence[Attempt]) -> str:
        """The text of a self-contained environment file that trains the capability with the target's tools.

        Args:
            brief: what is asked for.
            attempts: earlier ones, which failed their passports: a later one must differ, and may learn from them.
        """
        ...


def passports(folder: Path) -> dict[str, Passport]:
    """The passports in a folder of environments, by capability, in the order of their names.

    Raises:
        UserError: a passport is not whole.
    """
    found: dict[str, Passport] = {}
    for path in sorted(folder.glob("*.passport.json")):
        try:
            passport = Passport.model_validate_json(path.read_bytes())
        except ValidationError as error:
            problem = error.errors()[0]
            raise UserError(
                f"{path} is not a whole passport ({'.'.join(map(str, problem['loc']))}: {problem['msg']})",
                "run `dvc repro environments` to make it again",
            ) from None
        found[passport.capability] = passport
    return found


def load(folder: Path, passport: Passport, machine: Machine) -> Target:
    """The environment that a passport was made out for, confined unless its text is our own.

    Raises:
        UserError: the file is missing, is another one than was checked, or the sandbox is weaker than asked for.
        EnvironmentFault: the file does not load.
    """
    from captrain.environments.sandbox.confined import confined

    path = folder / f"{passport.capability}.py"
    target = load_file(path) if passport.trusted else confined(path, machine.sandbox)
    if target.fingerprint != passport.environment:
        raise UserError(
            f"{path} is not the file that {passport.capability}.passport.json was made out for",
            "run `dvc repro environments` to make both again",
        )
    return target
