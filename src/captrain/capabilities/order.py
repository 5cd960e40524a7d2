"""Features of the order of a rollout's calls, which may go with failing.

Calls are those of the agent and those of a user that has tools of its own. Texts of several words are no values: two
wordings of one thing are no difference.
"""

from dataclasses import replace

from captrain.capabilities.alignment import Toolbox, leaves, says, text_of
from captrain.capabilities.association import EVERY, Traits
from captrain.capabilities.calls import Call, calls_in, is_value
from captrain.records import Rollout


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
