"""Which adapters act on which task: retrieval, a classifier over label tokens, sets of capabilities, turn by turn.

A router sees the opening of a test task and examples of known route: openings of each capability's environment and of
each pair's (training split), and openings of the discovery tasks that the base passed, whose route is the base. It
never sees a test outcome, and opening a task costs no rollout. Paper section 3.4.

A route is the name of an arm: "base", a capability, or a composition (see `captrain.routing.compositions`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from captrain.contract import Target
from captrain.records import Message, Rollout, Task
from captrain.routing.compositions import BASE

OPENINGS = 100
"""Openings of each environment that a router knows."""


@dataclass(frozen=True)
class Example:
    """An opening whose route is known."""

    text: str
    route: str


class Router(Protocol):
    """Chooses a route for each opening."""

    gate: bool
    """Whether adapters that have gained nothing are left out before this router sees any example."""

    def route(self, examples: Sequence[Example], openings: Sequence[str]) -> list[str]:
        """The name of an arm for each opening: made of capabilities among the examples' routes, or "base"."""
        ...


def opening(messages: Sequence[Message]) -> str:
    """What the user says before the agent's first turn; an assistant's greeting before that is no turn."""
    texts = []
    for message in messages:
        if message["role"] == "assistant" and texts:
            break
        if message["role"] == "user":
            texts.append(message["content"])
    return " ".join(texts)


def examples(targets: Mapping[str, Target], count: int, rollouts: Sequence[Rollout]) -> list[Example]:
    """Examples of every route: `count` openings of each environment, and those of passed base rollouts.

    Args:
        targets: capability, or pair "a+b", -> its environment.
        count: openings per environment; opening a task costs no rollout.
        rollouts: of the base on the discovery split, of which the passed ones are used.
    """
    synthesized = [
        Example(text, route)
        for route, target in targets.items()
        for text in openings(target, target.tasks("training", count))
    ]
    passed = [Example(opening(rollout.messages), BASE) for rollout in rollouts if rollout.outcome == "passed"]
    return synthesized + passed


def openings(benchmark: Target, tasks: Sequence[Task]) -> list[str]:
    """The openings of tasks."""
    texts = []
    for task in tasks:
        episode = benchmark.open(task)
        texts.append(opening(episode.messages))
        episode.close()
    return texts
