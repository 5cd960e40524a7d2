"""References that the policy, the records or the log itself contradict: what fails beside them proves nothing.

A benchmark's solutions are written by people, and some are wrong. Trained on, they teach what the policy forbids. So
each reference is held against what the log holds beside it: the clauses of the policy that records can decide, what
records say of people, and whether its values occur anywhere. A task that no agent passes is suspicious, too, once it
has been tried often enough. Rollouts of a suspect reference are listed with the reason and left out of the contrast.
"""

import re
from collections.abc import Iterator

from captrain.capabilities import differing, says, text_of
from captrain.diagnosis.case import Case
from captrain.diagnosis.clauses import objects, violations
from captrain.records import Record

CODE = re.compile(r"\b(?=\w*\d)(?=\w*[A-Za-z])\w{5,}\b|\b\d{5,}\b")
"""An identifier: of letters and figures, or a long number."""
COMMON = 3
"""One in so many identifiers of a reference may occur in dialogues of any task."""
LAPSES = ("over_escalation", "missing_lookup", "incomplete_search", "loop")
"""Causes that an agent may show because it refuses what a wrong reference asks for."""


class Suspect(Record):
    """A rollout whose reference is suspect: which, of which task and trial, how it ended, and the reasons."""

    rollout: str
    task: str
    trial: int
    outcome: str
    reasons: list[str]


def suspicions(case: Case) -> Iterator[str]:
    """Yield what speaks against the reference of a rollout."""
    if is_foreign(case):
        yield "nothing that the task names occurs in the log, where the user names other things: it is of another task"
        return
    goals = [act for act in case.story.expected if act.kind == "write"]
    for violation in violations(goals, case.wishes, case.setting):
        yield f"the reference's {violation}"
    for goal in goals:
        for person in objects(goal.arguments):
            if "first_name" in person and "last_name" in person:
                yield from _stranger(case, person, str(goal))


def is_foreign(case: Case) -> bool:
    """Tell if the dialogue is of another task: the user names things, and nothing that the script identifies occurs in
    the log, nor much of what the reference does, which has common things, too."""
    script, goals = {*CODE.findall(case.script)}, "\n".join(text_of(act.arguments) for act in case.story.expected)
    reference = {*CODE.findall(goals)}
    dialogue = "\n".join(text_of(message) for message in case.messages)
    spoken = {code for place in case.users() for code in CODE.findall(case.text(place))}
    reads = [act for act in case.story.acts if act.kind == "read" and not act.failed]
    if not reads or not spoken or len(script | reference) < 2 or any(code in dialogue for code in script):
        return False
    return sum(code in dialogue for code in reference) <= (len(reference) / COMMON if script else 0)


def is_reference_alone(case: Case, agent_kinds: set[str]) -> bool:
    """Tell if a suspect reference explains a failure by itself: the agent made no write but those of the reference,
    left undone nothing but what the policy forbids, and its own causes are such as only the reference can tell."""
    goals = [act for act in case.story.expected if act.kind == "write"]
    forbidden = [violation.act for violation in violations(goals, case.wishes, case.setting)]
    faithful = not case.story.extras and all(
        pair.write is None
        or pair.goal in forbidden
        or (pair.write.tool == pair.goal.tool and not differing(pair.goal, pair.write))
        for pair in case.story.pairs
    )
    lapses = {*LAPSES} - ({"loop"} if "max" in case.ending else set())
    return faithful and all(goal in forbidden for goal in case.undone) and agent_kinds <= lapses


def _stranger(case: Case, person: dict[str, object], goal: str) -> Iterator[str]:
    """A person of whom records say otherwise, or of whom nobody has spoken."""
    name, records = f"{person['first_name']} {person['last_name']}", case.setting.book.people(person)
    for field, value in person.items():
        values = {str(record[field]) for record in records if field in record}
        if values and str(value) not in values and not says(f"{case.script}\n{case.story.user}", value):
            yield f"{goal}: {field} of {name} is {value}, where records say {', '.join(sorted(values))}"
    # Both names in one breath: those of two people are no third person.
    texts = [case.script, *(case.text(place) for place in case.users())]
    if not records and not any(says(text, [person["first_name"], person["last_name"]]) for text in texts):
        yield f"{goal}: {name} is in no record, and the user does not speak of such a person"
