"""Calls of a rollout or of its reference, by the agent or by a user with tools of its own."""

from collections.abc import Sequence
from dataclasses import dataclass

from captrain.capabilities.alignment import Toolbox, reports_error, same, text_of
from captrain.contract import calls_of
from captrain.records import JsonObject, Message, digest

QUOTED = 160
PROSE = 4
"""Words beyond which a value is prose, in which people differ."""
LONGEST = 40
"""Characters of a value that is told from others."""
OF_USER = " (the user's)"


@dataclass(frozen=True)
class Call:
    """A call. `message`: of a rollout, its index. `changed`: the world differs after it, as far as that is known.
    `result`: the text that it returned, "" where none is known. `novel`: where it was asked for, the arguments with a
    value that no earlier message has."""

    tool: str
    arguments: JsonObject
    by: str = "assistant"
    message: int = 0
    kind: str = "write"
    failed: bool = False
    changed: bool = True
    result: str = ""
    novel: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.tool}({', '.join(text_of(value) for value in self.arguments.values())})"
        return text if len(text) <= QUOTED else text[: QUOTED - 2] + "…)"

    @property
    def step(self) -> str:
        """The tool, and whether it is a user's."""
        return self.tool + OF_USER * (self.by == "user")

    @property
    def values(self) -> dict[str, str]:
        """The values by argument, of a text a digest."""
        return {k: text_of(v) if is_value(v) else f"~{digest(v)}" for k, v in self.arguments.items()}

    def equals(self, peer: "Call") -> bool:
        """The same tool is given the same values by the same side."""
        return (self.by, self.tool) == (peer.by, peer.tool) and not self.differing(peer)

    def differing(self, goal: "Call") -> list[str]:
        """Names of the arguments that come to something else in a goal."""
        names = {**goal.arguments, **self.arguments}
        # An object may say more than the goal's, and a goal need not name what has a default.
        return [n for n in names if n in goal.arguments and not same(goal.arguments[n], self.arguments.get(n))]


def is_prose(value: object) -> bool:
    """The value is several words, which nobody copies."""
    return isinstance(value, str) and len(value.split()) > PROSE


def is_value(value: object) -> bool:
    """The value is no text."""
    text = text_of(value)
    return len(text) <= LONGEST and not is_prose(text)


def calls_in(messages: Sequence[Message], toolbox: Toolbox) -> list[Call]:
    """The calls of assistant and user, each with the answer that the log holds."""
    calls = []
    for index, message in enumerate(messages):
        if message["role"] in ("assistant", "user"):
            for place, (tool, arguments) in enumerate(calls_of(message), start=index + 1):
                answer = messages[place] if place < len(messages) else {"role": ""}
                is_answered = answer["role"] == "tool"
                failed, kind = is_answered and reports_error(answer), toolbox.kind(tool)
                result = text_of(answer.get("content") or "") if is_answered else ""
                calls.append(
                    Call(tool, arguments, message["role"], index, kind, failed, kind == "write" and not failed, result)
                )
    return calls
