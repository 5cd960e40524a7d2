"""Which capabilities an agent lacks: proposed and labelled by an analyst, selected by contrast.

An analyst is whoever reads rollouts, a program or a language model; labelling and selection do not care which. It
sees rollouts and tool schemas and nothing else, so that what it finds is found and not known beforehand.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from captrain.records import Capability, Label, Rollout


class Analyst(Protocol):
    """Proposes candidate capabilities and labels rollouts with them.

    `run` is the index of the labelling run: an analyst that samples draws anew in each run, and must give equal
    answers to equal questions of the same run.
    """

    deterministic: bool
    """Labels are the same in every run, so that one run's serve all."""

    def propose(self, rollouts: Sequence[Rollout], tools: list[dict[str, Any]], *, run: int = 0) -> list[Capability]:
        """Candidates seen in a sample of rollouts, which may hold a rollout more than once; ids are distinct."""
        ...

    def label(
        self, rollout: Rollout, capabilities: Sequence[Capability], tools: list[dict[str, Any]], *, run: int = 0
    ) -> dict[str, Label]:
        """A label of the rollout for each of the capabilities, by id."""
        ...
