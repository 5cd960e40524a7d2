"""Policy protocol.

A policy plays episodes; it knows nothing of scoring, splits, files or retries (`captrain.agents`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from captrain.errors import InfrastructureError
from captrain.records import JsonObject, Message
from captrain.run import Component, Machine, build, takes

LIBRARIES = ("torch", "transformers")
"""Modules that a policy in this process imports (see `captrain.run.launch.run`)."""


class Playable(Protocol):
    """Members of an episode that a play needs: `captrain.contract.GuardedEpisode`, or one turn of a simulated user."""

    @property
    def messages(self) -> Sequence[Message]:
        """Messages that the policy sees before its first turn."""
        ...

    @property
    def tools(self) -> list[JsonObject]:
        """OpenAI function schemas."""
        ...

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """See `captrain.contract.Episode.step`."""
        ...


def options(**settings: object) -> JsonObject:
    """Return those settings that have a value."""
    return {name: value for name, value in settings.items() if value}


class Play:
    """One episode in progress, as a policy sees it.

    Args:
        key: names the randomness of this play: equal keys give equal draws, whatever is played beside it.
        episode: not necessarily open yet.
        adapter: folder of the adapter to act with, "" for the base.
        hint: what a model that is being trained reads at the end of its system prompt, beyond the episode's messages.
            Only policies that GRPO samples through give hints. `messages`, `token_ids` and `mask` never hold it;
            `logprobs` are those of the model that read it, and `prompt_tokens` counts it.

    `rerendered` counts the turns before which the dialogue, had it been rendered anew, would have been other tokens
    than those that were read and written; a served model that is sent token ids never reads these others.

    `truncated` says why a dialogue ended before its time: it has outgrown the model. That is the agent's failure and no
    error of the infrastructure. "" for all others.
    """

    def __init__(self, key: str, episode: Playable, adapter: str = "", hint: str = "") -> None:
        self.key = key
        self.episode = episode
        self.adapter = adapter
        self.hint = hint
        self.tools: list[JsonObject] = []
        self.messages: list[Message] = []
        self.turns = 0
        self.token_ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_tokens = self.completion_tokens = 0
        self.error: str | None = None
        self.rerendered = 0
        self.truncated = ""

    def start(self) -> bool:
        """Open the episode; False when an infrastructure fault kept it shut, which is then in `error`.

        A policy calls this right before it plays, so that no more episodes are open than are being played.
        """
        try:
            self.messages, self.tools = list(self.episode.messages), self.episode.tools
        except InfrastructureError as fault:
            self.error = str(fault)
        return self.error is None

    def advance(self, message: Message) -> list[Message]:
        """Take the policy's message; return what answers it, or [] when the episode is over.

        An infrastructure fault ends the play and is kept in `error`: it is the caller's to retry.
        """
        self.turns += 1
        try:
            replies, over = self.episode.step(message)
        except InfrastructureError as fault:
            self.error = str(fault)
            return []
        self.messages += [message, *replies]
        return [] if over else replies


class Policy(Protocol):
    """Player of episodes. Results depend on each play's key alone, never on batch size or order."""

    digest: str
    """Identity of everything that decides what the policy does, adapters apart."""

    def play(self, plays: Sequence[Play]) -> Iterator[Play]:
        """Play all to their ends, yielding each when it is over, in any order."""
        ...


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
