"""The explanation of a rollout: its verdicts, the primary one first, or nothing where log and replay prove nothing.

A benchmark's solutions are written by people, and some are wrong. With a suspect reference only verdicts that hold
whatever it says count against the agent. How the dialogue ended is a field of its own.
"""

from dataclasses import dataclass, replace

from captrain.capabilities.clauses import objects, violations
from captrain.capabilities.edit_signs import REPEATS, is_twin
from captrain.capabilities.faults import slip_of
from captrain.capabilities.rules import (
    INFRASTRUCTURE,
    LOG_RULES,
    RULES_OF_STEP,
    SIMULATOR,
    SUSPECT,
    Grade,
    Verdict,
)
from captrain.capabilities.suspicions import is_foreign, suspicions
from captrain.capabilities.text import says, text_of
from captrain.capabilities.toolbox import CHANGES, EFFECTS
from captrain.capabilities.view import END, Edit, RolloutView

LAPSES = ("over_escalation", "missing_lookup", "incomplete_search", "loop")
"""Causes that an agent may show because it refuses what a wrong reference asks for."""
UNREFERENCED = ("loop", "undue_compliance")
"""Causes that are told without looking at the reference."""
SEQUELS = ("extra_write", "partial_refusal", "fabricated_fact", "missing_escalation")
"""Causes that mostly follow from an earlier root: told only where they come first."""
FURTHER = ("missing_lookup", "incomplete_search", "missing_write")
"""Causes that are ignored if an earlier step is missing."""
ENDS = ("missing_write", "over_escalation")
"""Causes where nothing before the step failed."""


@dataclass(frozen=True)
class Explanation:
    """Explanation of a rollout.

    Attributes:
        causes: the primary one first.
        observations: what may be a cause, and is not sure.
        suspicions: against its reference.
        steps: the edits that would repair it, each with its cause.
        ended_by: how the dialogue ended.
    """

    causes: tuple[Verdict, ...]
    observations: tuple[Verdict, ...]
    suspicions: tuple[str, ...]
    steps: tuple[tuple[Edit, Verdict], ...]
    ended_by: str


def explain(view: RolloutView) -> Explanation:
    """Find why a rollout failed, or what lapses one that passed has."""
    against = [*dict.fromkeys(suspicions(view))]
    if view.repair.is_unsound:
        against.append("the reference, replayed, fails its own check")
    steps = tuple((edit, verdict_on(view, edit)) for edit in view.repair.edits)
    whole = [verdict for rule in LOG_RULES if (verdict := rule.applies(view, None)) and _counts(verdict, view)]
    verdicts = [verdict for _, verdict in steps] + whole
    verdicts = [v for v in verdicts if v.is_inherent or not against]
    verdicts = _without_effects(verdicts, steps, view)
    ordered = _ordered([verdict for verdict in verdicts if verdict.grade is not Grade.OBSERVED])
    of_agent = {verdict.cause for verdict in ordered if verdict.of_agent}
    is_of_user = any(verdict.cause == SIMULATOR for verdict in ordered)
    if against and not is_of_user and (not of_agent or _is_reference_alone(view, of_agent)):
        others = [verdict for verdict in ordered if verdict.cause != "over_escalation"]
        ordered = [Verdict(SUSPECT, view.last, against[0], Grade.RECORDED), *others]
    if view.repair.passes and view.rollout.outcome == "failed":
        evidence = "its calls, replayed, pass the check: grader or infrastructure failed"
        ordered = [Verdict(INFRASTRUCTURE, view.last, evidence, Grade.PROVEN)]
    named = {verdict.cause for verdict in ordered}
    unsure = _ordered([v for v in verdicts if v.grade is Grade.OBSERVED and v.cause not in named])
    return Explanation(tuple(ordered), tuple(unsure), tuple(against), steps, ended_by(view))


def _counts(verdict: Verdict, view: RolloutView) -> bool:
    """A cause that a proven repair does not touch cost nothing, and a replay that meets all milestones has met them."""
    repair = view.repair
    is_proven = repair.proven and not repair.passes and not repair.is_unsound
    touched = {call.tool for edit in repair.edits for call in edit.calls}
    if verdict.cause in ("undue_compliance", "wrong_argument"):
        return not is_proven or bool({*verdict.tools} & touched)
    return verdict.is_inherent or not (is_proven and repair.edits)


def _without_effects(
    verdicts: list[Verdict], steps: tuple[tuple[Edit, Verdict], ...], view: RolloutView
) -> list[Verdict]:
    """Leave out verdicts that only follow from a loop, from a foreign log or from a simulated user that failed."""
    if any(verdict.cause == "loop" for verdict in verdicts):
        looped = {peers[0].tool for peers in view.equal_calls if len(peers) >= REPEATS}
        verdicts = [v for v in verdicts if v.cause != "extra_write" or not {*v.tools} <= looped]
    if is_foreign(view):
        verdicts = [v for v in verdicts if v.cause in UNREFERENCED]
    if (slip := slip_of(view.rollout)) is not None:
        omissions = [v for edit, v in steps if edit.kind in ("insert", "say") and v.message >= slip[0] - 1]
        verdicts = [v for v in verdicts if v not in omissions]
    return verdicts


def _ordered(verdicts: list[Verdict]) -> list[Verdict]:
    """The first verdict of each cause: roots first, then the earliest."""
    earliest: dict[str, Verdict] = {}
    for verdict in sorted(verdicts, key=lambda verdict: (verdict.stage, verdict.message, verdict.rank)):
        earliest.setdefault(verdict.cause, verdict)
    ordered = [*earliest.values()]
    if ordered and ordered[0].of_agent and ordered[0].stage == 0:
        # A user who gives up on an agent that has gone wrong says nothing more.
        ordered = ordered[:1] + [verdict for verdict in ordered[1:] if verdict.cause not in (SIMULATOR, *SEQUELS)]
    return ordered


def verdict_on(view: RolloutView, edit: Edit) -> Verdict:
    """Name the cause of an edit by the first rule that applies."""
    verdict = _first(view, _root_of(view, edit))
    if verdict.cause in FURTHER and (sequel := _sequel_of(view, edit)) is not None:
        verdict = _first(view, sequel)
    calls = [*edit.calls, *([edit.goal] if edit.goal else [])]
    verdict = replace(verdict, tools=tuple(dict.fromkeys(call.tool for call in calls)))
    if edit.kind == "insert" and edit.goal is not None and verdict.cause in ("missing_write", "partial_refusal"):
        # A step that no clause forbids is due, even if another step of the reference is not; but a wrong reference says
        # wrong things of people.
        forbidden = [breach.act for breach in violations([pair.goal for pair in view.pairs], view.wishes, view.context)]
        is_of_people = any("first_name" in person for person in objects(edit.goal.arguments))
        is_forbidden = any(edit.goal.equals(act) for act in forbidden)
        verdict = replace(verdict, is_inherent=not is_of_people and not is_forbidden)
    return verdict


def _first(view: RolloutView, edit: Edit) -> Verdict:
    return next(verdict for rule in RULES_OF_STEP[edit.step] if (verdict := rule.applies(view, edit)))


def _root_of(view: RolloutView, edit: Edit) -> Edit:
    """The edit that names the cause: of a call made too early the step left out before it, of a swap the dropped call,
    of words about another choice that choice."""
    edits = view.repair.edits
    if (lead := _lead_of(view, edit)) is not None:
        return lead
    if edit.step == "insert write" and edit.goal is not None:
        twins = [peer for peer in edits if peer.kind == "drop" and is_twin(view, edit.goal, peer.calls[0])]
        return next(iter(twins), edit)
    if edit.kind == "say":
        shown = {*view.seen(edit.text, END, "tool")}
        owed = [peer.text for peer in edits if peer.kind == "say" and shown & {*view.seen(peer.text, END, "tool")}]
        for step in [step for step in edits if step.kind == "replace" and step.goal]:
            due, actual = (text_of(call.arguments) for call in (step.goal, step.calls[0]) if call)
            if any(says(due, text) and not says(actual, text) for text in (edit.text, *owed)):
                return step
    return edit


def _lead_of(view: RolloutView, edit: Edit) -> Edit | None:
    """The step left out before a call that was made in vain or too early, and is to be made again after that step."""
    call = edit.calls[0] if edit.kind == "drop" else edit.goal
    if edit.kind not in ("drop", "insert") or call is None or not any(map(call.equals, view.calls)):
        return None
    again = next((goal for goal in view.inserted if call.equals(goal)), None)
    steps = [step for step in view.repair.edits if step.kind == "insert" and step.goal and again]
    missing = [step for step in steps if step.goal and again and step.goal.place < again.place]
    return next((s for s in missing if s.goal and not any(map(s.goal.equals, view.calls))), None)


def _sequel_of(view: RolloutView, edit: Edit) -> Edit | None:
    """The first of the trailing steps that were skipped together, where that one had all that it needed."""
    steps = {goal.place: step for step in view.repair.edits if step.kind == "insert" and (goal := step.goal)}
    absent = {goal.place for goal in view.due_lookups} | {*steps}
    tail: list[Edit] = []
    for goal in reversed(view.goals):
        if goal.place not in absent:
            break
        tail += [steps[goal.place]] if goal.place in steps else []
    records = [value for goal in view.goals if goal.kind in EFFECTS for _, value in view.records(goal)]
    openings = {value for record in records for value in view.opened_instead(record)}
    is_later = any(edit is step for step in tail[:-1])
    is_apart = not is_later or bool(openings - {*records}) or _first(view, tail[-1]).cause not in ENDS
    return None if is_apart else tail[-1]


def _is_reference_alone(view: RolloutView, agent_causes: set[str]) -> bool:
    """A suspect reference explains the failure by itself.

    The agent made no write but those of the reference, left out only what the policy forbids, and its own causes are
    such as only the reference can tell.
    """
    goals = [act for act in view.expected if act.kind in CHANGES]
    forbidden = [violation.act for violation in violations(goals, view.wishes, view.context)]
    for pair in view.pairs:
        if pair.goal not in forbidden and (pair.write is None or not pair.write.equals(pair.goal)):
            return False
    lapses = {*LAPSES} - ({"loop"} if view.facts.limit else set())
    return not view.extras and agent_causes <= lapses


def ended_by(view: RolloutView) -> str:
    """Say how the dialogue ended."""
    if view.left is not None or slip_of(view.rollout) is not None:
        return "simulator"
    for edit in view.repair.differences:
        if edit.kind == "end":
            return "loop" if _first(view, edit).cause == "loop" else "cut off"
    if view.handover:
        return "hand-over"
    last = view.replies()[-1:]
    return "refusal" if last and last[0] in view.refusals else "stop"
