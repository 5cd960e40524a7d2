"""What the simulated user was to do with tools of its own, such as a switch of its phone: its calls, not the agent's.

A benchmark may let the user act, too. What the reference asks of the user the agent has to ask for: a step that was
never made, and that no reply speaks of, was left out by the agent; one that was spoken of and never made may be the
fault of either, and nothing is said of it.
"""

from collections.abc import Iterator
from typing import NamedTuple

from captrain.capabilities import leaves, same
from captrain.contract import calls_of
from captrain.diagnosis.case import Case, plain
from captrain.diagnosis.cause import Cause
from captrain.records import JsonObject


class Step(NamedTuple):
    """A call that the reference has the user make."""

    tool: str
    arguments: JsonObject

    def __str__(self) -> str:
        return f"{self.tool}({', '.join(leaves(self.arguments))})"


def unmade(case: Case) -> list[Step]:
    """The steps of the reference that the user never made."""
    entries = case.rollout.task.data.get("user_calls") or []
    steps = [Step(entry["name"], entry["arguments"]) for entry in entries]
    calls = [call for message in case.messages if message["role"] == "user" for call in calls_of(message)]
    return [
        step
        for step in steps
        if not any(tool == step.tool and same(step.arguments, arguments) for tool, arguments in calls)
    ]


def unasked_steps(case: Case) -> Iterator[Cause]:
    """A step of the user that was never made, and that the assistant never spoke of, where it handed nothing over and
    there is a user at all."""
    if not case.users() or any(act.kind == "handover" for act in case.story.acts):
        return
    replies = [plain(case.text(place)) for place in case.spoken()]
    for step in unmade(case):
        if not any(_speaks_of(reply, step) for reply in replies):
            evidence = f"the user was never asked for {step}, and never made it"
            yield Cause("missing_write", case.story.last, evidence, "high", False, (step.tool,))
            return


def _speaks_of(reply: str, step: Step) -> bool:
    """Whether a reply holds half of the words that tell a step from others: of its tool's name but the verb, and of its
    arguments."""
    names = step.tool.split("_")
    words = [*(names[1:] or names), *(plain(leaf) for leaf in leaves(step.arguments) if leaf.isalpha())]
    squeezed = reply.replace(" ", "")
    return 2 * sum(word in squeezed for word in words) >= len(words)
