"""The world of a logged rollout's task, opened again: calls played in it, their effect and their score.

Nothing here asks a model: a user's turns are not played, only the calls of user and agent, the agent's texts, and
whether the dialogue came to its end. So a sequence that nobody has ever played can be judged, and what a rollout lacked
is proven by what makes it pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from captrain.contract import calls_of
from captrain.records import JsonObject, Rollout

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
    """Outcome of a replay.

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

    @property
    def reference(self) -> tuple[ReplayCall, ...]: ...  # noqa: D102
    @property
    def owed(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def kinds(self) -> Mapping[str, Kind]: ...  # noqa: D102

    def play(self, replays: Sequence[Replay]) -> list[Replayed]:
        """Play each replay in a fresh world of the task; a search sends tens at once.

        Raises:
            InfrastructureError: the benchmark's worker failed.
        """
        ...

    def close(self) -> None:
        """Let go of what the world holds outside of this process."""
        ...


PROPER = ("", "user_stop", "agent_stop")
"""Endings by which somebody has closed a dialogue, or none is known."""


def logged_replay(rollout: Rollout) -> Replay:
    """A rollout as it was played: its calls of user and assistant, the assistant's texts, and whether it ended as a
    dialogue should (its score says it, or why it ended)."""
    calls = [
        ReplayCall(tool, arguments, message["role"])
        for message in rollout.messages
        if message["role"] in ("assistant", "user")
        for tool, arguments in calls_of(message)
    ]
    spoken = [message.get("content") for message in rollout.messages if message["role"] == "assistant"]
    parts = rollout.score.parts if rollout.score else {}
    ended = parts["ended"] == 1.0 if "ended" in parts else rollout.task.data.get("ending", "") in PROPER
    return Replay(
        tuple(calls),
        tuple(text for text in spoken if isinstance(text, str) and text.strip()),
        ended and not rollout.truncated,
    )
