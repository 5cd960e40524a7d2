"""Loads configured policies (`captrain.contract.Policy`), and defines closed questions to a model."""

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
    """Return the settings without empty and None values."""
    return {name: value for name, value in settings.items() if value}


@dataclass(frozen=True)
class ClosedQuestion:
    """A question to the base model and its possible answers. Each answer starts with a different token."""

    messages: list[Message]
    answers: tuple[str, ...]


class Scorer(Protocol):
    """A policy whose model can score given answers without sampling."""

    def answer_scores(self, questions: Sequence[ClosedQuestion]) -> list[list[float]]:
        """Return the log-probability of the first token of each answer, among the answers of its question."""
        ...


PolicyKind = TypeVar("PolicyKind", bound=Policy)


def load_policy(
    component: Component, model: Path, machine: Machine, kind: type[PolicyKind] = Policy, *, batch: int | None = None
) -> PolicyKind:
    """Build the configured policy.

    Args:
        component: the `policy` section of the configuration.
        model: output folder of the base stage.
        machine: the machine to run on. Only policies that start servers use it.
        kind: protocol that the policy must implement.
        batch: number of episodes at once; None: the policy's default.

    Raises:
        UserError: the policy does not implement `kind`, or cannot be built.
    """
    runtime: dict[str, object] = {} if batch is None else {"batch": batch}
    if takes(component, "machine"):
        runtime["machine"] = machine
    return build(component, kind, model=model, **runtime)


def outgrown(limit: int, prompt: int = 0) -> str:
    """Return the message for a dialogue that is too long for the model.

    Args:
        limit: largest number of tokens that the model accepts.
        prompt: number of tokens of the first prompt, if it is already too long.
    """
    if prompt:
        return f"the prompt has {prompt} tokens, and the model takes {limit}"
    return f"the dialogue has reached the {limit} tokens that the model takes"
