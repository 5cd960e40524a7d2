"""Features of a rollout that may go with failing: the order of its calls, how they differ from the reference, its task.

Calls are those of the agent and those of a user that has tools of its own. Texts of several words are no values: two
wordings of one thing are no difference.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from captrain.capabilities import (
    EVERY,
    OF_USER,
    Act,
    Story,
    Toolbox,
    Traits,
    acts_of,
    differing,
    is_value,
    number_of,
    same,
    text_of,
)
from captrain.contract import calls_of
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
