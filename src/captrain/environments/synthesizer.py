"""The interface of synthesizers: the request for an environment, earlier attempts, and who writes it.

A synthesizer is a component of this package (`conf/synthesizer`). It returns the text of one self-contained file. The
passport decides whether the file is worth training in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Protocol

from jinja2 import BaseLoader, Environment, StrictUndefined

from captrain.errors import UserError
from captrain.records import Capability, JsonObject, Passport, Rollout
from captrain.run import Component


def render(name: str, **values: object) -> str:
    """Fill in a template of `prompts/`: a question to a model, or a passport's page."""
    text = files("captrain").joinpath("environments/prompts", name).read_text(encoding="utf-8")
    environment = Environment(loader=BaseLoader(), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(text).render(**values)


@dataclass(frozen=True)
class Brief:
    """A request for an environment.

    It has the capability to train, the schemas of the target's tools, and discovery rollouts: first failed ones that
    lack the capability, then passed ones. `benchmark` is the target, if environments may be derived from it.
    """

    capability: Capability
    tools: list[JsonObject]
    examples: Sequence[Rollout] = ()
    benchmark: Component | None = None


@dataclass(frozen=True)
class Attempt:
    """A written text and its passport."""

    text: str
    passport: Passport


class NoTemplate(UserError):
    """The synthesizer has no environment for this capability."""


class Synthesizer(Protocol):
    """Writes environments."""

    trusted: bool
    """True if it writes our own text, which runs outside of the sandbox."""

    def synthesize(self, brief: Brief, attempts: Sequence[Attempt]) -> str:
        """Write a self-contained environment file that trains the capability with the target's tools.

        Args:
            brief: the request.
            attempts: earlier attempts, which failed their passports. The next one must differ.
        """
        ...
