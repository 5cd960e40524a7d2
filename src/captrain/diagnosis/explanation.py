"""Explanation of a failed rollout: one primary cause, the secondary ones apart, or nothing that log and replay prove.

The needed edits of the smallest repair name the causes (`naming`); beside them stands what the log proves whatever the
reference does (`conduct`). The primary cause is the earliest root. How the dialogue ended is a field of its own, and
the cause only where nothing before it needs repair.

A benchmark's solutions are written by people, and some are wrong. So each reference is held against what the log holds
beside it: the clauses of the policy that records can decide, what records say of people, and whether its values occur
anywhere. With a suspect reference only what holds by itself is charged to the agent.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from captrain.capabilities import INFRASTRUCTURE, KINDS, SIMULATOR, SUSPECT, differing, says, slip_of, text_of
from captrain.diagnosis.case import Case, Cause
from captrain.diagnosis.clauses import objects, violations
from captrain.diagnosis.conduct import (
    fabricated_facts,
    loops,
    malformed_calls,
    milestones,
    missing_lookup,
    undue_compliance,
    unverified_claims,
)
from captrain.diagnosis.naming import Namer
from captrain.diagnosis.repair import Edit, Repair

CODE = re.compile(r"\b(?=\w*\d)(?=\w*[A-Za-z])\w{5,}\b|\b\d{5,}\b")
"""An identifier: of letters and figures, or a long number."""
COMMON = 3
"""One in so many identifiers of a reference may occur in dialogues of any task."""
LAPSES = ("over_escalation", "missing_lookup", "incomplete_search", "loop")
"""Causes that an agent may show because it refuses what a wrong reference asks for."""
Finder = Callable[[Case], Iterator[Cause]]
CONDUCT: tuple[Finder, ...] = (
    loops,
    undue_compliance,
    unverified_claims,
    missing_lookup,
    fabricated_facts,
    malformed_calls,
)
UNREFERENCED = ("loop", "undue_compliance", "fabricated_fact")
"""Causes that are told without looking at the reference."""
ENDS = ("partial_refusal", "missing_write", "missing_information", "premature_stop", "missing_escalation")
"""Causes that show at the end alone: anything before may be why."""


SEQUELS = ("extra_write", "partial_refusal", "fabricated_fact", "missing_escalation")
"""Causes that come of an earlier root, more often than not: told only where they come first."""


@dataclass(frozen=True)
class Explanation:
    """Explanation of a rollout: its causes, the primary one first; what speaks against its reference; the edits that
    would repair it, each with its cause; and how the dialogue ended."""

    causes: tuple[Cause, ...]
    suspicions: tuple[str, ...]
    steps: tuple[tuple[Edit, Cause], ...]
    ended_by: str


def explain(case: Case, repair: Repair) -> Explanation:
    """Find what explains a rollout."""
    against = [*dict.fromkeys(suspicions(case))]
    if repair.is_unsound:
        against.append("the reference, replayed, fails its own check")
    namer = Namer(case, repair)
    steps = tuple((edit, namer.cause(edit)) for edit in repair.edits)
    proven = [cause for finder in CONDUCT for cause in finder(case)]
    # A replay that meets all milestones shows that nothing else is lacking than its edits.
    is_repaired = repair.proven and bool(repair.edits) and not repair.is_unsound
    proven += [cause for cause in milestones(case) if not is_repaired or cause.kind == "undue_compliance"]
    findings = [cause for cause in proven if _is_needed(cause, repair) or _is_open(cause, case)]
    # Of one message the causes of needed steps come first, and of these the root.
    roots = [*sorted((cause for _, cause in steps), key=_place), *sorted(findings, key=_place)]
    causes = [cause for cause in roots if cause.inherent or not against]
    if (handover := _undue_handover(case, repair)) is not None:
        causes.append(handover)
    looped = {tool for cause in causes if cause.kind == "loop" for tool in cause.tools}
    causes = [cause for cause in causes if not looped or not _is_of_loop(cause, looped)]
    if is_foreign(case):
        causes = [cause for cause in causes if cause.kind in UNREFERENCED]
    if (slip := slip_of(case.rollout)) is not None:
        # What was still to be done when the user failed is left undone because of it.
        omissions = [cause for edit, cause in steps if edit.kind in ("insert", "say") and cause.message >= slip[0] - 1]
        causes = [cause for cause in causes if cause not in omissions] + [Cause(SIMULATOR, *slip, inherent=False)]
    earliest: dict[str, Cause] = {}
    for cause in sorted(causes, key=lambda cause: (_rank(cause), cause.message)):
        earliest.setdefault(cause.kind, cause)
    ordered = [*earliest.values()]
    if ordered and ordered[0].of_agent and _rank(ordered[0]) == 0:
        # A user who gives up on an agent that has gone wrong says nothing more.
        ordered = [cause for cause in ordered if cause.kind != SIMULATOR]
    if ordered and ordered[0].of_agent and _rank(ordered[0]) == 0:
        ordered = ordered[:1] + [cause for cause in ordered[1:] if cause.kind not in SEQUELS]
    of_agent = {cause.kind for cause in ordered if cause.of_agent}
    if against and SIMULATOR not in earliest and (not of_agent or is_reference_alone(case, of_agent)):
        ordered = [Cause(SUSPECT, case.story.last, against[0]), *(c for c in ordered if c.kind != "over_escalation")]
    if repair.passes and case.rollout.outcome == "failed":
        evidence = "its calls, replayed, pass the check: grader or infrastructure failed"
        ordered = [Cause(INFRASTRUCTURE, case.story.last, evidence)]
    return Explanation(tuple(ordered), tuple(against), steps, namer.ended_by)


def _is_of_loop(cause: Cause, looped: set[str]) -> bool:
    """The cause says no more than that a call was repeated without end."""
    return cause.kind == "premature_stop" or (cause.kind == "extra_write" and {*cause.tools} <= looped)


def _undue_handover(case: Case, repair: Repair) -> Cause | None:
    """A hand-over that the reference does not make, and that left something undone or stands for an answer."""
    handover = next((act for act in case.story.acts if act.kind == "handover"), None)
    is_due = any(goal.kind == "handover" for goal in repair.goals)
    if handover is None or is_due or not case.story.has_reference:
        return None
    # What rollouts that passed have done where theirs hands nothing over is no answer left out.
    is_answer = not (repair.edits or repair.passes or handover.tool in case.setting.needless)
    if not (is_answer or any(edit.kind == "insert" for edit in repair.edits)):
        return None
    evidence = f"{handover} was called where the reference hands nothing over"
    return Cause("over_escalation", handover.message, evidence, "high", False, (handover.tool,))


def _place(cause: Cause) -> int:
    """The place of a cause in the registry: root before symptom."""
    return [*KINDS].index(cause.kind)


def _rank(cause: Cause) -> int:
    """Roots come before what the dialogue ended with."""
    return 3 if cause.kind == "over_escalation" else 2 if cause.kind in ENDS else int(cause.kind == "loop")


def _is_open(cause: Cause, case: Case) -> bool:
    """A loop is still open where no log says how it ended, and the assistant had no last word."""
    is_cut = not case.ending and bool(case.messages) and case.messages[-1]["role"] != "assistant"
    return cause.kind == "loop" and is_cut


def _is_needed(cause: Cause, repair: Repair) -> bool:
    """A repair does without what is none of its edits: a loop that came to an end; a proven one without a call that it
    leaves as it is, too."""
    if cause.kind == "loop" and repair.goals:
        # A loop that came to an end cost nothing but time.
        return any(edit.kind == "end" for edit in repair.edits)
    if cause.kind == "fabricated_fact" and cause.tools and repair.goals:
        return False  # a value of a change that is to be replaced has been named already
    if not repair.proven or repair.passes or repair.is_unsound:
        return True
    if cause.kind in ("undue_compliance", "wrong_argument"):
        touched = {repair.calls[place].tool for edit in repair.edits for place in edit.places}
        return bool({*cause.tools} & touched)
    return True


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
