"""Reasons why a reference may be wrong: the policy, the records, or a log that belongs to another task."""

from collections.abc import Iterator

from captrain.capabilities.clauses import objects, violations
from captrain.capabilities.text import identifiers_in, says, text_of
from captrain.capabilities.toolbox import CHANGES
from captrain.capabilities.view import RolloutView
from captrain.records import JsonObject

LONG = 5
"""Minimum number of characters of an identifier that does not occur by chance."""
COMMON = 3
"""One in this many identifiers of a reference may occur in the dialogue of any task."""


def suspicions(view: RolloutView) -> Iterator[str]:
    """Yield the reasons why the reference of a rollout may be wrong."""
    if is_foreign(view):
        yield "nothing that the task names occurs in the log, where the user names other things: it is of another task"
        return
    goals = [goal for goal in view.expected if goal.kind in CHANGES]
    for violation in violations(goals, view.wishes, view.context):
        yield f"the reference's {violation}"
    for goal in goals:
        for person in objects(goal.arguments):
            if "first_name" in person and "last_name" in person:
                yield from _against_person(view, str(goal), person)


def _against_person(view: RolloutView, goal: str, person: JsonObject) -> Iterator[str]:
    """Yield a reason if the records contradict a person's data, or if neither records nor user name the person."""
    name, records = f"{person['first_name']} {person['last_name']}", view.context.book.people(person)
    for field, value in person.items():
        values = {str(record[field]) for record in records if field in record}
        if values and str(value) not in values and not says(f"{view.facts.script}\n{view.user}", value):
            yield f"{goal}: {field} of {name} is {value}, where records say {', '.join(sorted(values))}"
    # Both names must be in one message, because names of two people do not make a third.
    texts = [view.facts.script, *map(view.text, view.users())]
    if not records and not any(says(text, [person["first_name"], person["last_name"]]) for text in texts):
        yield f"{goal}: {name} is in no record, and the user does not speak of such a person"


def is_foreign(view: RolloutView) -> bool:
    """Return whether the dialogue belongs to another task.

    It does if the user names identifiers and none of the script's identifiers occur in the log. Of the reference's
    identifiers at most one in `COMMON` may occur; none if there is no script.
    """
    is_read = any(act.kind == "read" and not act.failed for act in view.acts)
    if not is_read or not any(identifiers_in(view.text(place), LONG) for place in view.users()):
        return False
    script = {*identifiers_in(view.facts.script, LONG)}
    reference = {*identifiers_in("\n".join(text_of(goal.arguments) for goal in view.expected), LONG)}
    dialogue = "\n".join(text_of(message) for message in view.messages)
    if len(script | reference) < 2 or any(code in dialogue for code in script):
        return False
    return sum(code in dialogue for code in reference) <= (len(reference) / COMMON if script else 0)
