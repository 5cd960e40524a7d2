"""Routers: retrieval, a classifier over label tokens, sets of capabilities, a trained gate.

A router sees the opening of a test task, and examples with known routes. Examples are openings of each capability's and
each pair's environment (training split), and openings of discovery tasks that the base passed, whose route is the base.
A router never sees a test outcome. Opening a task costs no rollout. Paper section 3.4.

A route is the name of an arm: "base", a capability, or a composition (see `captrain.routing.compositions`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from captrain.agents import Scorer, load_policy
from captrain.contract import CheckedEnvironment, Policy, calls_of
from captrain.errors import UserError
from captrain.records import Message, Rollout, Task
from captrain.routing.compositions import BASE
from captrain.run import Component, Machine, Spec, fulfils

OPENINGS = 100
"""Number of openings of each environment that a router sees."""


@dataclass(frozen=True)
class AskedModel:
    """The base model, for routers that ask it or read its states.

    Args:
        folder: of the base.
        policy: that runs it.
        machine: where it runs.
    """

    folder: Path
    policy: Component
    machine: Machine

    @classmethod
    def of(cls, spec: Spec, folder: Path) -> "AskedModel":
        """Take the base of a run."""
        return cls(folder, spec.policy, spec.machine)

    @cached_property
    def acting(self) -> Policy:
        """The policy, built on first use."""
        return load_policy(self.policy, self.folder, self.machine)

    @property
    def answers(self) -> bool:
        """Whether the policy returns log-probabilities of label tokens."""
        return fulfils(self.acting, Scorer)

    @property
    def scorer(self) -> Scorer:
        """The policy, for questions.

        Raises:
            UserError: it has no model to ask, or cannot be built.
        """
        if not fulfils(self.acting, Scorer):
            raise UserError(
                f"router=classifier needs the base model, which policy {self.policy.target} does not run here",
                "choose another router, or policy=local or vllm",
            )
        return self.acting


@dataclass(frozen=True)
class Example:
    """An opening with its route. Some prompts also show the route's description and a solution of the task."""

    text: str
    route: str
    description: str = ""
    trajectory: str = ""


class Router(Protocol):
    """Chooses a route for each opening."""

    gate: bool
    """Whether to exclude adapters without gain before the router sees examples."""

    def route(self, examples: Sequence[Example], openings: Sequence[str]) -> list[str]:
        """Choose a route for each opening: "base", or made of capabilities in the examples' routes."""
        ...


def opening(messages: Sequence[Message]) -> str:
    """Return what the user says before the agent's first turn. A greeting by the assistant is not a turn."""
    texts = []
    for message in messages:
        if message["role"] == "assistant" and texts:
            break
        if message["role"] == "user":
            texts.append(message["content"])
    return " ".join(texts)


def examples(
    targets: Mapping[str, CheckedEnvironment],
    count: int,
    rollouts: Sequence[Rollout],
    descriptions: Mapping[str, str] | None = None,
) -> list[Example]:
    """Collect examples of every route: `count` openings of each environment, and those of passed base rollouts.

    Args:
        targets: capability, or pair "a+b" -> its environment.
        count: openings per environment. Opening a task costs no rollout.
        rollouts: rollouts of the base on the discovery split, of which the passed ones are used.
        descriptions: descriptions of capabilities. With them, an example also shows a solution: the environment's own,
            or the base's. Playing a solution costs no rollout. None: openings alone.
    """
    synthesized = [
        Example(text, route)
        if descriptions is None
        else Example(
            text,
            route,
            descriptions.get(route, ""),
            trajectory(target.play(task, target.reference(task))),
        )
        for route, target in targets.items()
        for tasks in [target.tasks("training", count)]
        for task, text in zip(tasks, openings(target, tasks), strict=True)
    ]
    passed = [
        Example(opening(rollout.messages), BASE, "", "" if descriptions is None else trajectory(rollout.messages))
        for rollout in rollouts
        if rollout.outcome == "passed"
    ]
    return synthesized + passed


def trajectory(messages: Sequence[Message]) -> str:
    """Return a dialogue from the agent's first turn on as lines of text: calls, replies and results."""
    lines: list[str] = []
    for message in messages:
        text, calls = " ".join(message["content"].split()), calls_of(message)
        if message["role"] == "assistant":
            lines += [f"call {name}({json.dumps(arguments, ensure_ascii=False)})" for name, arguments in calls]
            lines += [f"say {text}"] if text else []
        elif lines:
            lines.append(f"{'result' if message['role'] == 'tool' else message['role']} {text}")
    return "\n".join(lines)


def openings(benchmark: CheckedEnvironment, tasks: Sequence[Task]) -> list[str]:
    """Open tasks and return their openings."""
    texts = []
    for task in tasks:
        episode = benchmark.open(task)
        texts.append(opening(episode.messages))
        episode.close()
    return texts
