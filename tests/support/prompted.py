"""A policy whose skill depends on its guidance."""

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from captrain.agents.scripted import ScriptedPolicy
from captrain.contract import RunningEpisode
from captrain.records import digest
from captrain.training.base.demonstrations import GUIDANCE

COPY = tuple(GUIDANCE)[3]
FRIENDLY = tuple(GUIDANCE)[4]


class Prompted(ScriptedPolicy):
    """Solves tasks with a probability set by its guidance: one line helps, another one harms, the others do nothing.

    A share `faults` of its plays end in errors, once or always. KILLED_IN_BATCH names the batch in which it is killed.
    """

    batches = 0

    def __init__(
        self, model: Path | None = None, batch: int = 1, *, guidance: Sequence[str] = (), helps: str = COPY,
        skill: float = 0.3, better: float = 0.9, faults: float = 0.0, stays: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(skill=(better if helps in guidance else skill) - 0.25 * (FRIENDLY in guidance))
        self.faults, self.stays = faults, stays
        self.digest = digest("prompted", list(guidance), helps, skill, better, faults, stays)
        self._came: Counter[str] = Counter()

    def play(self, plays: Sequence[RunningEpisode]) -> Iterator[RunningEpisode]:
        Prompted.batches += bool(plays)
        for at, play in enumerate(super().play(plays)):
            if Prompted.batches == int(os.environ.get("KILLED_IN_BATCH", 0)) and at == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            self._came[play.key] += 1
            if int(digest(play.key), 16) / 16**16 < self.faults and (self.stays or self._came[play.key] == 1):
                play.error = "the line went dead"
            yield play
