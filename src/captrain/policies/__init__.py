"""Who acts. A policy plays episodes; it knows nothing of scoring, splits, files or retries (`captrain.rollouts`)."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from captrain.contract import GuardedEpisode
from captrain.errors import InfrastructureError
from captrain.records import Message


class Play:
    """One episode in progress, as a policy sees it.

    Args:
        key: names the randomness of this play: equal keys give equal draws, whatever is played beside it.
        tools: OpenAI function schemas.
        episode: the open episode.
        adapter: folder of the adapter to act with, "" for the base.
    """

    def __init__(self, key: str, tools: list[dict[str, Any]], episode: GuardedEpisode, adapter: str = "") -> None:
        self.key = key
        self.tools = tools
        self.episode = episode
        self.adapter = adapter
        self.messages: list[Message] = list(episode.messages)
        self.turns = 0
        self.token_ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.error: str | None = None

    def advance(self, message: Message) -> list[Message]:
        """Take the policy's message; return what answers it, or [] when the episode is over.

        An infrastructure fault ends the play and is kept in `error`: it is the caller's to retry.
        """
        self.turns += 1
        try:
            replies, done = self.episode.step(message)
        except InfrastructureError as fault:
            self.error = str(fault)
            return []
        self.messages += [message, *replies]
        return [] if done else replies


class Policy(Protocol):
    """Plays episodes. Results depend on each play's key alone, never on batch size or order."""

    digest: str
    """Identity of everything that decides what the policy does, adapters apart."""

    def play(self, plays: Sequence[Play]) -> Iterator[Play]:
        """Play all to their ends, yielding each when it is over, in any order."""
        ...
