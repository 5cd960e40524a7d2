"""One cause found in one rollout."""

from dataclasses import dataclass
from typing import Literal

from captrain.capabilities import KINDS

QUOTED = 140
Confidence = Literal["high", "medium"]


@dataclass(frozen=True)
class Cause:
    """One cause in one rollout: its kind, the message where it shows first, and the evidence.

    `inherent`: it holds whatever the reference does. `tools` and `arguments` are those in question.
    """

    kind: str
    message: int
    evidence: str
    confidence: Confidence = "high"
    inherent: bool = True
    tools: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    @property
    def of_agent(self) -> bool:
        """The cause is the agent's own."""
        return KINDS[self.kind].of_agent


def quoted(text: str) -> str:
    """The beginning of a text in one line, in quotation marks."""
    text = " ".join(text.split())
    return f'"{text if len(text) <= QUOTED else text[: QUOTED - 2] + " …"}"'
