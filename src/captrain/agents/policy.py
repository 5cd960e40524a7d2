"""Loading of configured policies (`captrain.contract.Policy`), and closed questions to a model."""

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
    """Return the settings that have a value."""
    return {name: value for name, value in settings.items() if value}


@dataclass(frozen=True)
class ClosedQuestion:
    """A question to the base model and its possible answers, each of which begins with a token of its own."""

    messages: list[Message]
    answers: tuple[str, ...]


class Scorer(Protocol):
    """A policy whose model can score possible answers, without sampling."""

    def answer_scores(self, questions: Sequence[ClosedQuestion]) -> list[list[float]]:
        """Return the log-probability of the first token of each answer, among the answers of its question."""
        ...


PolicyKind = TypeVar("PolicyKind", bound=Policy)


def load_policy(
    component: Component, model: Path, machine: Machine, kind: type[PolicyKind] = Policy, *, batch: int | None = None
) -> PolicyKind:
    """Build the configured policy.

    Args:
        component: the `policy` section.
        model: output folder of the base stage.
        machine: where it acts; only policies that start servers take it.
        kind: protocol that it must fulfil.
        batch: plays at once; None: the policy's default.

    Raises:
        UserError: it does not fulfil `kind`, or cannot be built.
    """
    runtime: dict[str, object] = {} if batch is None else {"batch": batch}
    if takes(component, "machine"):
        runtime["machine"] = machine
    return build(component, kind, model=model, **runtime)


def outgrown(limit: int, prompt: int = 0) -> str:
    """Say that a dialogue is too long for the model.

    Args:
        limit: tokens that the model takes.
        prompt: tokens of a first prompt that is already too long.
    """
    if prompt:
        return f"the prompt has {prompt} tokens, and the model takes {limit}"
    return f"the dialogue has reached the {limit} tokens that the model takes"
