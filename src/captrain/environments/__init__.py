"""Synthesized training environments: one self-contained file per capability, trusted after its passport only."""

from typing import Any, Protocol

from captrain.records import Capability


class Synthesizer(Protocol):
    """Writes environments."""

    def synthesize(self, capability: Capability, tools: list[dict[str, Any]], attempt: int) -> str:
        """The text of a self-contained environment file that trains the capability with the target's tools.

        Args:
            capability: what to train, with its evidence.
            tools: the target's schemas.
            attempt: 0, then 1 more after each failed passport: a later attempt must differ.
        """
        ...
