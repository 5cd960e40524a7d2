"""A target and an analyst for trainings on a curriculum, named as components by import path."""

from collections.abc import Sequence
from typing import Any

from support.letters import LETTERS

from captrain.capabilities.analyst import LabelRequest
from captrain.config.machine import ModelAccess
from captrain.records import Capability, Label, Rollout, digest

_environment: dict[str, Any] = {"__name__": __name__}
exec(LETTERS.format(name="talk", flat=0), _environment)


class Talk(_environment["Environment"]):
    """A benchmark; its reward is dense, its success is not."""


class Analyst:
    """Says by the rollout's name alone what it lacks."""

    deterministic = True

    def __init__(self, access: ModelAccess | None = None) -> None:
        pass

    def propose(self, samples: Sequence[Sequence[Rollout]], tools: list[dict[str, Any]]) -> list[list[Capability]]:
        """See `captrain.capabilities.analyst.Analyst`; no test asks for it."""
        raise NotImplementedError

    def label(self, requests: Sequence[LabelRequest], tools: list[dict[str, Any]]) -> list[dict[str, Label]]:
        """See `captrain.capabilities.analyst.Analyst`."""
        return [
            {item.id: Label(verdict=verdict(request.rollout.id, item.id)) for item in request.capabilities}
            for request in requests
        ]


def verdict(rollout: str, name: str) -> Any:
    return "LACKING" if int(digest(rollout, name), 16) % 2 else "PRESENT"
