"""A policy without a model, which plays a script, by default the reference solution.

It is for tests, for trying out an environment, and for timing a pipeline without a model.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from captrain.contract import RunningEpisode
from captrain.errors import InfrastructureError
from captrain.records import Message, digest

Script = Callable[[RunningEpisode], Sequence[Message]]


class ScriptedPolicy:
    """Policy that plays a script.

    Args:
        model: unused; every policy is built with the folder of the base.
        batch: unused.
        script: returns the assistant messages of an episode, in order; the default is its reference solution.
        skill: probability that a play follows its script; otherwise its message is empty.
    """

    def __init__(
        self,
        model: Path | None = None,
        batch: int = 1,
        script: Script | None = None,
        *,
        skill: Annotated[float, Field(ge=0, le=1)] = 1.0,
    ) -> None:
        self.script, self.skill = script, skill
        self.digest = digest("scripted", skill, script.__qualname__ if script else "reference")

    def play(self, plays: Sequence[RunningEpisode]) -> Iterator[RunningEpisode]:
        """See `Policy.play`."""
        for play in plays:
            actions: Sequence[Message] = []
            try:
                if play.start():
                    actions = (self.script or by_the_book)(play)
            except InfrastructureError as fault:
                play.error = str(fault)
            if not play.error and random.Random(play.key).random() >= self.skill:
                actions = [{"role": "assistant", "content": ""}]
            for action in actions:
                if not play.advance(action):
                    break
            yield play


def by_the_book(play: RunningEpisode) -> list[Message]:
    """Return the reference solution of an episode."""
    episode: Any = play.episode
    return episode.reference()
