"""What a rollout shows that may go with failing: the order of its calls, how they differ from the reference, its task.

Calls are those of the agent and those of a user that has tools of its own. Texts of several words are no values: two
wordings of one thing are no difference.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from captrain.capabilities import Act, Toolbox, acts_of, differing, leaves, says, text_of
from captrain.diagnosis.association import ANY, EVERY, Traits
from captrain.records import JsonObject, Message, Record, Rollout, digest

OF_USER = " (the user's)"
LONGEST = 40
"""Characters of a value."""
WORDS = 4
"""Spaces in a text that is no value."""
MANY = 3
"""Changes of a reference that are not told apart from more."""
NOT_OF_TASK = ("task", "script", "ending", "user_calls", "milestones")
"""What the data of an imported task holds beside its own fields."""
REFERENCED = ("referenced",)


class Call(Record):
    """One call: what is called (`step`), where and in which words; whether it was refused; its values by argument, of a
    text a digest; the arguments with a value that no earlier message has (`novel`)."""

    step: str
    message: int
    text: str
    failed: bool
    values: dict[str, str]
    novel: list[str]


class Difference(NamedTuple):
    """Where a rollout's changes part from the reference's: the feature's kind and names, the message, the evidence."""

    key: tuple[str, ...]
    message: int
    evidence: str


def steps_of(messages: list[Message], toolbox: Toolbox) -> list[tuple[str, Act]]:
    """All calls in order, whoever makes them, with what is called."""
    callers = [{**message, "role": "assistant"} if message.get("tool_calls") else message for message in messages]
    acts = acts_of(callers, toolbox)
    return [(act.tool + (OF_USER if messages[act.message]["role"] == "user" else ""), act) for act in acts]


def goals_of(rollout: Rollout, toolbox: Toolbox) -> list[tuple[str, Act]]:
    """The calls of the reference, and those that it has the user make."""
    calls = [{"function": call} for call in rollout.task.data.get("user_calls") or []]
    asked = [(act.tool + OF_USER, act) for act in acts_of([{"role": "assistant", "tool_calls": calls}], toolbox)]
    return [*steps_of(rollout.reference, toolbox), *asked]


def calls_of_rollout(rollout: Rollout, steps: list[tuple[str, Act]]) -> list[Call]:
    """The calls as the order features read them."""
    calls, before, end = list[Call](), "", 0
    for step, act in steps:
        said = (text_of(message.get("content") or "") for message in rollout.messages[end : act.message])
        before, end = "\n".join([before, *said]).lower(), act.message
        values = {name: _token(value) for name, value in act.arguments.items()}
        novel = [
            name
            for name, value in act.arguments.items()
            if _is_value(value) and any(leaves(value)) and not says(before, value)
        ]
        calls.append(Call(step=step, message=act.message, text=str(act), failed=act.failed, values=values, novel=novel))
    return calls


def _is_value(value: object) -> bool:
    text = text_of(value)
    return len(text) <= LONGEST and text.count(" ") < WORDS


def _token(value: object) -> str:
    return text_of(value) if _is_value(value) else f"~{digest(value)}"


def add_order(calls: list[Call], traits: Traits) -> None:
    """Add which calls come before and after which, whose values come from nowhere, which are repeated or refused."""
    first = {call.step: place for place, call in reversed([*enumerate(calls)])}
    last = {call.step: place for place, call in enumerate(calls)}
    for x in first:
        traits.bases.add(("call", x))
        traits.hold(("called", x), EVERY)
        for y in first:
            if first[y] < first[x]:
                traits.hold(("after", x, y), ("call", x), first[x] - first[y])
            if x != y and last[y] > last[x]:
                traits.hold(("followed", x, y), ("call", x), last[y] - last[x])
    earlier: dict[tuple[str, str], set[str]] = {}
    always: dict[tuple[str, str], set[str]] = {}
    made, repeated, refused, novel = set[str](), set[str](), dict[str, bool](), set[tuple[str, str]]()
    for call in calls:
        for step in (call.step, ANY):
            identity = text_of([step, call.step, call.values])
            repeated |= {step} if identity in made else set()
            made.add(identity)
            if call.failed or step in refused:
                refused[step] = call.failed
        for name, value in call.values.items():
            seen = earlier.setdefault((name, value), set())
            common = always.setdefault((call.step, name), set(seen))
            common &= seen
            seen.add(call.step)
        novel |= {(call.step, name) for name in call.novel}
    for (x, name), steps in always.items():
        traits.bases.add(("argument", x, name))
        if (x, name) not in novel:
            traits.hold(("sourced", x, name), ("argument", x, name))
        for y in steps - {x}:
            traits.hold(("same", x, y, name), ("argument", x, name), first[x] - first[y])
    for step in [*first, ANY]:
        if step not in repeated:
            traits.hold(("once", step), EVERY if step == ANY else ("call", step))
    for step, still in refused.items():
        traits.bases.add(("refused", step))
        if not still:
            traits.hold(("repaired", step), ("refused", step))


def place_of(key: tuple[str, ...], calls: list[Call]) -> Call | None:
    """The call at which a rollout shows an order feature, or lacks it: that which is refused last, or has a value from
    nowhere, or the first."""
    own = [call for call in calls if call.step == key[1] or key[1] == ANY] or calls[-1:]
    cases = {
        "repaired": [call for call in reversed(own) if call.failed],
        "sourced": [call for call in own if key[-1] in call.novel],
        "once": [call for place, call in enumerate(own) if call.values in [peer.values for peer in own[:place]]],
    }
    return next(iter([*cases.get(key[0], []), *own]), None)


def add_reference(
    rollout: Rollout, steps: list[tuple[str, Act]], goals: list[tuple[str, Act]], traits: Traits
) -> list[Difference]:
    """Add how far the calls are those of the reference; returns where changes differ.

    A call stands for the goal of its tool that it equals, or else differs from in the fewest arguments. Where only the
    state at the end is judged, what is changed beyond the reference is no difference.
    """
    if not goals and not rollout.reference:
        return []
    traits.bases.add(REFERENCED)
    left: dict[str, list[Act]] = {}
    for step, act in steps:
        left.setdefault(step, []).extend([] if act.failed else [act])
    taken = _assigned(goals, left)
    used = {id(act) for _, act in taken.values()}
    is_compared = "db" in (rollout.task.data.get("graded") or ["db"])
    extras = [
        act
        for step, acts in left.items()
        for act in acts
        if is_compared and OF_USER not in step and act.kind != "read" and id(act) not in used
    ]
    for act in extras:
        traits.hold(("beyond", act.tool), REFERENCED)
    end = max((index for index, message in enumerate(rollout.messages) if message["role"] == "assistant"), default=0)
    differences, unmade, unequal = list[Difference](), set[str](), set[tuple[str, str]]()
    for place, (step, goal) in enumerate(goals):
        wrong, act = taken.get(place, ([], None))
        traits.bases.add(("goal", step))
        unmade |= {step} if act is None else set()
        unequal |= {(step, name) for name in wrong}
        other = act or next((one for one in extras if {*leaves(one.arguments)} & {*leaves(goal.arguments)}), None)
        if goal.kind == "read" or (act and not wrong):
            continue
        if other is None:
            differences.append(Difference(("made", step), end, f"the reference has {goal}"))
            continue
        extras = [one for one in extras if one is not other]
        key = ("equal", step, wrong[0]) if wrong else ("instead", step)
        differences.append(Difference(key, other.message, f"the reference has {goal}"))
    differences += [Difference(("beyond", act.tool), act.message, f"the reference has no {act}") for act in extras]
    for step, name in {(step, name) for step, goal in goals for name in goal.arguments if step not in unmade}:
        traits.bases.add(("paired", step, name))
        if (step, name) not in unequal:
            traits.hold(("equal", step, name), ("paired", step, name))
    for step in {step for step, _ in goals} - unmade:
        traits.hold(("made", step), ("goal", step))
    informs = [text_of(value) for value in (rollout.reference[-1].get("informs", []) if rollout.reference else [])]
    words = "\n".join(text_of(m.get("content") or "") for m in rollout.messages if m["role"] == "assistant")
    told = words.lower().replace(",", "")
    untold = [value for value in informs if value.lower().replace(",", "") not in told]
    if informs:
        traits.bases.add(("informs",))
    if informs and not untold:
        traits.hold(("told",), ("informs",))
    return differences + [Difference(("told",), end, f"{value} was not told") for value in untold[:1]]


def _assigned(goals: list[tuple[str, Act]], left: dict[str, list[Act]]) -> dict[int, tuple[list[str], Act]]:
    """Of goals by their place the call that stands for each, with the arguments that differ: nearest pairs first."""
    pairs = [
        (_wrong(goal, act), place, number)
        for place, (step, goal) in enumerate(goals)
        for number, act in enumerate(left.get(step, []))
    ]
    taken: dict[int, tuple[list[str], Act]] = {}
    used = set[int]()
    for wrong, place, number in sorted(pairs, key=lambda pair: (len(pair[0]), *pair[1:])):
        act = left[goals[place][0]][number]
        if place not in taken and id(act) not in used:
            taken[place] = wrong, act
            used.add(id(act))
    return taken


def _wrong(goal: Act, act: Act) -> list[str]:
    return [name for name in differing(goal, act) if _is_value(goal.arguments[name])]


def add_task(rollout: Rollout, goals: list[tuple[str, Act]], traits: Traits) -> None:
    """Add what can be told of the task: environment, fields, words of its id, calls of its reference."""
    for name, value in _fields({"environment": rollout.environment, **rollout.task.data}):
        traits.hold(("value", name, value), ("field", name))
    for word in re.findall(r"[A-Za-z][A-Za-z_]{2,}", rollout.task.id):
        traits.hold(("value", "task id", word.strip("_")), EVERY)
    if goals:
        changes = sum(goal.kind != "read" for _, goal in goals)
        traits.hold(
            ("value", "changes in its reference", f"{MANY} or more" if changes >= MANY else str(changes)), REFERENCED
        )
        for step, _ in goals:
            traits.hold(("value", "its reference has", step), REFERENCED)


def _fields(data: JsonObject) -> Iterator[tuple[str, str]]:
    for name, value in data.items():
        if name not in NOT_OF_TASK and isinstance(value, str | int | float | bool | list) and _is_value(value):
            yield name, text_of(value)
