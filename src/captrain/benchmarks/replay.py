"""The world of a logged rollout's task, opened again: calls played in it, their effect and their score.

Nothing here asks a model: a user's turns are not played, only the calls of user and agent, the agent's texts, and
whether the dialogue came to its end. So a sequence that nobody has ever played can be judged, and what a rollout lacked
is proven by what makes it pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from captrain.config import Machine
from captrain.contract import Target
from captrain.records import JsonObject, Message, Rollout

Kind = Literal["read", "write", "handover", "think"]


@dataclass(frozen=True)
class ReplayCall:
    """One tool call to play. `by`: "assistant" or "user" (a user's own tools)."""

    tool: str
    arguments: JsonObject
    by: str = "assistant"


@dataclass(frozen=True)
class Replay:
    """Something to play in a task's world: calls in order, the assistant's texts (for what had to be told), and
    `ended`: the dialogue came to its proper end."""

    calls: tuple[ReplayCall, ...]
    texts: tuple[str, ...] = ()
    ended: bool = True


@dataclass(frozen=True)
class Replayed:
    """What a replay led to.

    results: (calls,) text of each result. failed: (calls,) refused by the tool. changed: (calls,) the state differs
    before and after. parts: named score parts. passed: the check of the task holds.
    """

    results: tuple[str, ...]
    failed: tuple[bool, ...]
    changed: tuple[bool, ...]
    parts: dict[str, float]
    passed: bool


class World(Protocol):
    """The world of one task.

    reference: the gold calls in order, () where there are none. owed: words that the assistant owes the user. kinds:
    what the benchmark declares of its tools; those it declares nothing of are absent.
    """

    reference: tuple[ReplayCall, ...]
    owed: tuple[str, ...]
    kinds: Mapping[str, Kind]

    def play(self, replays: Sequence[Replay]) -> list[Replayed]:
        """Play each replay in a fresh world of the task; a search sends tens at once.

        Raises:
            InfrastructureError: the benchmark's worker failed.
        """
        ...

    def close(self) -> None:
        """Let go of what the world holds outside of this process."""
        ...


class Worlds:
    """The worlds of the tasks that rollouts are of; use it in a `with` block, or `close` it.

    Args:
        benchmark: see `open_worlds`.
        target: see `open_worlds`.
        machine: see `open_worlds`.
    """

    def __init__(self, benchmark: str, target: Target | None, machine: Machine | None) -> None:
        self.benchmark, self.target, self.machine = benchmark, target, machine
        self.missing = ""

    def of(self, rollout: Rollout) -> World | None:
        """The world of a rollout's task; None where none can be opened. Where a package is all that is lacking,
        `missing` then says the command that brings it."""
        raise NotImplementedError

    def reference(self, rollout: Rollout) -> list[Message]:
        """The assistant messages of the reference: the rollout's own, else that of its task in the installed
        benchmark; empty where neither has one."""
        raise NotImplementedError

    def close(self) -> None:
        """Close every world."""

    def __enter__(self) -> "Worlds":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_worlds(benchmark: str = "", *, target: Target | None = None, machine: Machine | None = None) -> Worlds:
    """Worlds for rollouts of logs, or of a project. Nothing is started before a world is asked for.

    Args:
        benchmark: "tau2", "agentdojo", "bfcl" or "servicedesk"; "" where each rollout's own environment and task id
            tell.
        target: an environment of our contract (a project's benchmark, an environment file), whose tasks the rollouts
            are of; it goes before `benchmark`.
        machine: names installations that `captrain benchmark install` has not made.

    Raises:
        UserError: there is no such benchmark.
    """
    return Worlds(benchmark, target, machine)
