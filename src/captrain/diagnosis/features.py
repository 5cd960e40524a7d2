"""Features of a rollout that may go with failing: the order of its calls, how they differ from the reference, its task.

Calls are those of the agent and those of a user that has tools of its own. Texts of several words are no values: two
wordings of one thing are no difference.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from captrain.capabilities import Act, Story, Toolbox, acts_of, differing, leaves, number_of, same, says, text_of
from captrain.contract import calls_of
from captrain.diagnosis.association import EVERY, Traits
from captrain.diagnosis.calls import OF_USER, Call, calls_in, is_value
from captrain.records import JsonObject, Record, Rollout

MANY = 3
"""Changes of a reference that are not told apart from more."""
NOT_OF_TASK = ("task", "script", "ending", "user_calls", "milestones")
"""Fields that the data of an imported task holds beside its own fields."""
REFERENCED = ("referenced",)
WORD, STEP = "task id", "its reference has"
"""Names of values of which a task may have several."""


class Fault(Record):
    """A step whose repair may turn a failure into a pass, by the key of its feature, where it shows, and whether replay
    has proven it."""

    key: tuple[str, ...]
    message: int
    evidence: str
    proven: bool = False
    quote: str = ""


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


def reference_traits(rollout: Rollout, toolbox: Toolbox) -> tuple[Traits, list[Fault]]:
    """Compare a rollout with its reference: steps that are not made, or made otherwise, and changes that it does not
    have, as traits; and those of them that change something, as faults. Where the state at the end is not judged, a
    further change is no fault."""
    story, traits, faults = Story(rollout, toolbox), Traits(), list[Fault]()
    user_calls = [(call["name"], call["arguments"]) for call in rollout.task.data.get("user_calls") or []]
    if not story.has_reference and not user_calls:
        return traits, faults
    traits.bases |= {REFERENCED, *(("goal", act.tool) for act in story.expected)}
    for pair in story.pairs:
        wrong = (
            [name for name in differing(pair.goal, pair.write) if is_value(pair.goal.arguments[name])]
            if pair.write
            else []
        )
        kinds = {
            "made": pair.write is None,
            "instead": pair.write and pair.write.tool != pair.goal.tool,
            "equal": wrong,
        }
        for kind in [kind for kind, lapses in kinds.items() if lapses][:1]:
            message = pair.write.message if pair.write else story.last
            faults.append(
                Fault(
                    key=(kind, pair.goal.tool, *wrong[:1]), message=message, evidence=f"the reference has {pair.goal}"
                )
            )
    if "db" in (rollout.task.data.get("graded") or ["db"]):
        faults += [
            Fault(key=("beyond", act.tool), message=act.message, evidence=f"the reference has no {act}")
            for act in story.extras
        ]
    calls = [call for message in rollout.messages if message["role"] == "user" for call in calls_of(message)]
    for tool, arguments in user_calls:
        traits.bases.add(("goal", tool + OF_USER))
        if not any(name == tool and same(arguments, actual) for name, actual in calls):
            faults.append(
                Fault(key=("made", tool + OF_USER), message=story.last, evidence=f"the user never made {tool}")
            )
    untold = [value for value in story.informs if story.first_telling(value) is None]
    traits.bases |= {("informs",)} if story.informs else set()
    faults += [
        Fault(key=("told", "what was asked"), message=story.last, evidence=f"{value} was not told")
        for value in untold[:1]
    ]
    index = _index(story.acts)
    for goal in story.expected:
        if goal.kind != "write" and not any(not differing(goal, act) for act in _peers(goal, story.acts, index)):
            traits.hold(("made", goal.tool), ("goal", goal.tool))
    bases = {"beyond": REFERENCED, "told": ("informs",)}
    for fault in faults:
        traits.hold(fault.key, bases.get(fault.key[0], ("goal", fault.key[1])))
    return traits, faults


def _scalars(arguments: JsonObject) -> Iterator[tuple[str, object]]:
    """Yield the texts and numbers among arguments, as `same` compares them."""
    yield from ((name, number_of(value)) for name, value in arguments.items() if isinstance(value, str | int | float))


def _index(acts: Sequence[Act]) -> dict[tuple[str, str, object], list[Act]]:
    """Group calls by tool, argument and value: comparing each with each takes minutes where there are thousands."""
    index: dict[tuple[str, str, object], list[Act]] = {}
    for act in acts:
        for name, value in _scalars(act.arguments):
            index.setdefault((act.tool, name, value), []).append(act)
    return index


def _peers(goal: Act, acts: Sequence[Act], index: Mapping[tuple[str, str, object], list[Act]]) -> Sequence[Act]:
    """List the calls among which those equal to the reference's are: the fewest that share one value with it."""
    compared = {name: value for name, value in goal.arguments.items() if goal.compared is None or name in goal.compared}
    groups = [index.get((goal.tool, name, value), []) for name, value in _scalars(compared)]
    return min(groups, key=len) if groups else [act for act in acts if act.tool == goal.tool]


def task_traits(rollout: Rollout, toolbox: Toolbox) -> Traits:
    """Attributes of the task: environment, its own fields, the words of its id, the calls of its reference."""
    traits, data = Traits(), {"environment": rollout.environment, **rollout.task.data}
    for name, value in data.items():
        if name not in NOT_OF_TASK and not isinstance(value, dict) and is_value(value):
            traits.hold(("value", name, text_of(value)), ("field", name))
    for word in re.findall(r"[A-Za-z][A-Za-z_]{2,}", rollout.task.id):
        traits.hold(("value", WORD, word.strip("_")), EVERY)
    acts = acts_of(rollout.reference, toolbox)
    user_calls = [call["name"] + OF_USER for call in rollout.task.data.get("user_calls") or []]
    changes = sum(act.kind != "read" for act in acts) + len(user_calls)
    if rollout.reference or user_calls:
        traits.hold(
            ("value", "changes in its reference", str(changes) if changes < MANY else f"{MANY} or more"), REFERENCED
        )
    for step in [*(act.tool for act in acts), *user_calls]:
        traits.hold(("value", STEP, step), REFERENCED)
    return traits
