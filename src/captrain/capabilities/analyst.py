"""Protocol of analysts, who propose the capabilities that an agent lacks and label rollouts with them.

An analyst is whoever reads rollouts, a program or a language model; labelling and selection do not care which. It
sees rollouts and tool schemas and nothing else, so that what it finds is found and not known beforehand.
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

    It is told of all its work at once, so that one that waits for answers can wait for many of them together. An
    analyst that samples draws anew in each labelling run, and gives equal answers to equal questions of the same run.
    Its constructor takes how models are asked (`access: machine.ModelAccess | None`) first.
    """

    deterministic: bool
    """Labels are the same in every run, so that one run's serve all."""

    def propose(self, samples: Sequence[Sequence[Rollout]], tools: list[JsonObject]) -> list[list[Capability]]:
        """Candidates for each labelling run.

        Args:
            samples: rollouts of each run, in the order drawn, which may hold a rollout more than once.
            tools: the target's schemas.

        Returns:
            One list for each sample. Ids are distinct within it, and mean the same in all of them.
        """
        ...

    def label(self, requests: Sequence[LabelRequest], tools: list[JsonObject]) -> list[dict[str, Label]]:
        """For each that is asked, in order: a label for each of its capabilities, by id."""
        ...
