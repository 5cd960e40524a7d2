"""Policies of the configuration (`captrain.contract.Policy`), and questions that a model answers without acting."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from captrain.contract import Policy
from captrain.records import JsonObject, Message
from captrain.run import Component, Machine, build, takes

LIBRARIES = ("torch", "transformers")
"""Modules that a policy in this process imports (see `captrain.run.launch.run`)."""


def options(**settings: object) -> JsonObject:
    """Return those settings that have a value."""
    return {name: value for name, value in settings.items() if value}


@dataclass(frozen=True)
class ClosedQuestion:
    """A question to the model itself, without adapter, and what it may answer, each of which begins with a token of
    its own."""

    messages: list[Message]
    answers: tuple[str, ...]


class Scorer(Protocol):
    """A policy whose model can be asked what it would answer, without any sampling."""

    def answer_scores(self, questions: Sequence[ClosedQuestion]) -> list[list[float]]:
        """Score each answer of each question by the log-probability of its first token, among these answers alone."""
        ...


PolicyKind = TypeVar("PolicyKind", bound=Policy)


def load_policy(
    component: Component, model: Path, machine: Machine, kind: type[PolicyKind] = Policy, *, batch: int | None = None
) -> PolicyKind:
    """Build the configured policy.

    Args:
        component: the `policy` section.
        model: folder that the base stage has left.
        machine: where it acts; given to those policies alone that start servers.
        kind: what is needed of it.
        batch: plays at once; None: as many as the policy takes by itself.

    Raises:
        UserError: it is of another kind, or cannot be built.
    """
    runtime: dict[str, object] = {} if batch is None else {"batch": batch}
    if takes(component, "machine"):
        runtime["machine"] = machine
    return build(component, kind, model=model, **runtime)


def outgrown(limit: int, prompt: int = 0) -> str:
    """Word the end of a play for which the model has no room.

    Args:
        limit: tokens that the model takes.
        prompt: tokens of a first prompt that is too long by itself.
    """
    if prompt:
        return f"the prompt has {prompt} tokens, and the model takes {limit}"
    return f"the dialogue has reached the {limit} tokens that the model takes"
