"""The synthesizer's interface: what an environment is asked for, what came of earlier attempts, and who writes it.

A synthesizer is a component of this room (`conf/synthesizer`). It returns the text of one self-contained file; whether
that file is worth training in is for its passport to say, and never for its author.
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
    """Fill in a text of `prompts/`: what a model is asked, or the page of a passport."""
    text = files("captrain").joinpath("environments/prompts", name).read_text()
    environment = Environment(loader=BaseLoader(), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(text).render(**values)


@dataclass(frozen=True)
class Brief:
    """Task of an environment's author: the capability to train, and what may be known of the target: the schemas of
    its tools, and discovery rollouts, first failed ones that lack the capability, then passed ones; `benchmark`: the
    target itself, where environments may be derived from it."""

    capability: Capability
    tools: list[JsonObject]
    examples: Sequence[Rollout] = ()
    benchmark: Component | None = None


@dataclass(frozen=True)
class Attempt:
    """A text that was written, and what its passport found."""

    text: str
    passport: Passport


class NoTemplate(UserError):
    """A capability that this synthesizer has no environment for."""


class Synthesizer(Protocol):
    """Writes environments."""

    trusted: bool
    """True if what it writes is text of our own, which need not be confined."""

    def synthesize(self, brief: Brief, attempts: Sequence[Attempt]) -> str:
        """The text of a self-contained environment file that trains the capability with the target's tools.

        Args:
            brief: what is asked for.
            attempts: earlier ones, which failed their passports: a later one must differ, and may learn from them.
        """
        ...
