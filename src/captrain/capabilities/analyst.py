"""Protocol of analysts, which propose the capabilities that an agent lacks and label rollouts with them.

An analyst is a program or a language model; labelling and selection treat both alike. It sees only rollouts and tool
schemas, so it cannot know the answer beforehand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from captrain.records import Capability, JsonObject, Label, Rollout


@dataclass(frozen=True)
class LabelRequest:
    """One rollout to be labelled with capabilities in one labelling run."""

    run: int
    rollout: Rollout
    capabilities: Sequence[Capability]


class Analyst(Protocol):
    """Proposes candidate capabilities and labels rollouts with them.

    It gets all its work at once, so it can wait for many answers together. An analyst that samples draws anew in each
    labelling run, and answers equal questions of one run equally. Its constructor's first argument says how models are
    asked (`access: machine.ModelAccess | None`).
    """

    deterministic: bool
    """Labels are the same in every run, so one run is enough."""

    def propose(self, samples: Sequence[Sequence[Rollout]], tools: list[JsonObject]) -> list[list[Capability]]:
        """Candidates for each labelling run.

        Args:
            samples: rollouts of each run, in the order drawn; a rollout may occur more than once.
            tools: the target's schemas.

        Returns:
            One list for each sample. Ids are distinct within a list and mean the same in all lists.
        """
        ...

    def label(self, requests: Sequence[LabelRequest], tools: list[JsonObject]) -> list[dict[str, Label]]:
        """Return a label for each capability of each request, by id and in order."""
        ...
