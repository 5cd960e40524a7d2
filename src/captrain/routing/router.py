"""Which adapters act on which task: retrieval, a classifier over label tokens, sets of capabilities, turn by turn.

A router sees the opening of a test task and examples of known route: openings of each capability's environment and of
each pair's (training split), and openings of the discovery tasks that the base passed, whose route is the base. It
never sees a test outcome, and opening a task costs no rollout. Paper section 3.4.

A route is the name of an arm: "base", a capability, or a composition of capabilities as `captrain.models` names
them: "a+b" for the sum of two adapters, "0.6*a+0.4*b" for a weighted one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from captrain.contract import Target
from captrain.models import name_of, weights_of
from captrain.records import Message, Rollout, Task

BASE = "base"
EXAMPLES = 100
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


def members(route: str) -> frozenset[str]:
    """The capabilities whose adapters act on a route; none for the base."""
    return frozenset() if route == BASE else frozenset(weights_of(route))


def arm_of(capabilities: frozenset[str]) -> str:
    """The route on which the adapters of these capabilities act, each at weight 1."""
    return name_of(dict.fromkeys(sorted(capabilities), 1.0)) if capabilities else BASE


def opening(messages: Sequence[Message]) -> str:
    """What the user says before the agent's first turn; an assistant's greeting before that is no turn."""
    said = []
    for message in messages:
        if message["role"] == "assistant" and said:
            break
        if message["role"] == "user":
            said.append(message["content"])
    return " ".join(said)


def examples(targets: Mapping[str, Target], count: int, passed: Sequence[Rollout]) -> list[Example]:
    """Examples of every route: `count` openings of each environment, and those of passed base rollouts.

    Args:
        targets: capability, or pair "a+b", -> its environment.
        count: openings per environment; opening a task costs no rollout.
        passed: rollouts of the base on the discovery split, of which the passed ones are used.
    """
    found = [
        Example(text, route)
        for route, target in targets.items()
        for text in openings(target, target.tasks("training", count))
    ]
    return found + [Example(opening(r.messages), BASE) for r in passed if r.outcome == "passed"]


def openings(benchmark: Target, tasks: Sequence[Task]) -> list[str]:
    """The openings of tasks."""
    found = []
    for task in tasks:
        episode = benchmark.open(task)
        found.append(opening(episode.messages))
        episode.close()
    return found
