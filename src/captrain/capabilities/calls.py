"""Calls of a rollout or of its reference, by the agent or by a user with tools of its own, and features of their order.

The order of calls may go with failing. Texts of several words are no values: two wordings of one thing are no
difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from captrain.capabilities.alignment import Toolbox, call_text, leaves, reports_error, same, says, text_of
from captrain.capabilities.association import EVERY, Traits
from captrain.contract import calls_of
from captrain.records import JsonObject, Message, Rollout, digest

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
        return call_text(self.tool, self.arguments)

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


def sourced_calls(rollout: Rollout, toolbox: Toolbox) -> list[Call]:
    """All calls in order, without what they returned, each with the arguments whose values stand in no message
    before."""
    calls, before, end = list[Call](), "", 0
    for call in calls_in(rollout.messages, toolbox):
        texts = (text_of(message.get("content") or "") for message in rollout.messages[end : call.message])
        before, end = "\n".join([before, *texts]).lower(), call.message
        values = {name: value for name, value in call.arguments.items() if is_value(value) and any(leaves(value))}
        novel = tuple(name for name, value in values.items() if not says(before, value))
        calls.append(replace(call, result="", novel=novel))
    return calls


def order_traits(calls: list[Call]) -> Traits:
    """Collect the traits of calls: which come before and after which, take values from nowhere, are repeated or
    refused."""
    traits = Traits()
    first = {call.step: place for place, call in reversed([*enumerate(calls)])}
    last = {call.step: place for place, call in enumerate(calls)}
    earlier: dict[tuple[str, str], set[str]] = {}
    always: dict[tuple[str, str], set[str]] = {}
    for call in calls:
        for name, value in call.values.items():
            callers = earlier.setdefault((name, value), set())
            always[call.step, name] = always.get((call.step, name), callers) & callers
            callers.add(call.step)
    for x in first:
        peers = [call for call in calls if call.step == x]
        failures = [call for call in peers if call.failed]
        traits.hold(("called", x), EVERY)
        traits.bases |= {("call", x)} | ({("refused", x)} if failures else set())
        if failures and not peers[-1].failed:
            traits.hold(("repaired", x), ("refused", x))
        if len({text_of(call.values) for call in peers}) == len(peers):
            traits.hold(("once", x), ("call", x))
        for y in first:
            if first[y] < first[x]:
                traits.hold(("after", x, y), ("call", x), first[x] - first[y])
            if last[y] > last[x]:
                traits.hold(("followed", x, y), ("call", x), last[y] - last[x])
    novel = {(call.step, name) for call in calls for name in call.novel}
    for (x, name), steps in always.items():
        traits.bases.add(("argument", x, name))
        if (x, name) not in novel:
            traits.hold(("sourced", x, name), ("argument", x, name))
        for y in steps - {x}:
            traits.hold(("same", x, y, name), ("argument", x, name), first[x] - first[y])
    return traits


def place_of(key: tuple[str, ...], calls: list[Call]) -> Call:
    """The call at which a rollout shows an order feature, or lacks it: that which is refused last, or has a value from
    nowhere, or the first; the last of all where there is none."""
    peers = [call for call in calls if call.step == key[1]]
    failures = [call for call in reversed(peers) if call.failed and key[0] == "repaired"]
    novel = [call for call in peers if key[0] == "sourced" and key[2] in call.novel]
    return [*failures, *novel, *peers, *calls[-1:]][0]
