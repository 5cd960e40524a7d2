"""Explanation of a failed rollout: one primary cause, the secondary ones apart, or nothing that log and replay prove.

The needed edits of the smallest repair name the causes (`naming`); beside them stands what the log proves whatever the
reference does (`conduct`). The primary cause is the earliest root. How the dialogue ended is a field of its own, and
the cause only where nothing before it needs repair. With a suspect reference only what holds by itself is charged to
the agent.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from captrain.capabilities import INFRASTRUCTURE, KINDS, SIMULATOR, SUSPECT, slip_of
from captrain.diagnosis.case import Case, Cause
from captrain.diagnosis.conduct import (
    fabricated_facts,
    loops,
    malformed_calls,
    milestones,
    missing_lookup,
    undue_compliance,
    unverified_claims,
    withheld,
)
from captrain.diagnosis.endings import ended_by
from captrain.diagnosis.naming import Namer
from captrain.diagnosis.repair import Edit, Repair
from captrain.diagnosis.suspects import is_foreign, is_reference_alone, suspicions

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
    steps = tuple(namer.causes())
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
    slip, denial = slip_of(case.rollout), withheld(case)
    if slip is not None:
        # What was still to be done when the user failed is left undone because of it.
        omissions = [cause for edit, cause in steps if edit.kind in ("insert", "say") and cause.message >= slip[0] - 1]
        causes = [cause for cause in causes if cause not in omissions] + [Cause(SIMULATOR, *slip, inherent=False)]
    if denial is not None:
        causes = [cause for cause in causes if _rank(cause) == 0 and cause.kind != "missing_lookup"] + [denial]
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
    return Explanation(tuple(ordered), tuple(against), steps, ended_by(case, repair))


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
