"""Explains a rollout: its verdicts, the primary one first. There are none if log and replay prove nothing.

A benchmark's solutions are written by people, and some are wrong. If the reference is suspect, only verdicts that do
not rely on it count against the agent. The ending of the dialogue is reported separately.
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
from captrain.capabilities.view import PAST_END, Edit, RolloutView

LAPSES = ("over_escalation", "missing_lookup", "incomplete_search", "loop")
"""Causes that an agent may show because it rightly refuses an action of a wrong reference."""
UNREFERENCED = ("loop", "undue_compliance")
"""Causes that are found without the reference."""
SEQUELS = ("extra_write", "partial_refusal", "fabricated_fact", "missing_escalation")
"""Causes that mostly follow from an earlier root of the agent, and are then dropped."""
FURTHER = ("missing_lookup", "incomplete_search", "missing_write")
"""Causes that are ignored if an earlier step is missing."""
ENDS = ("missing_write", "over_escalation")
"""Causes of the first skipped step which show that nothing before it failed."""


@dataclass(frozen=True)
class Explanation:
    """Explanation of a rollout.

    Attributes:
        causes: the primary one first.
        observations: possible causes that are not sure.
        suspicions: reasons why its reference may be wrong.
        steps: the edits that would repair it, each with its cause.
        ended_by: how the dialogue ended.
    """

    causes: tuple[Verdict, ...]
    observations: tuple[Verdict, ...]
    suspicions: tuple[str, ...]
    steps: tuple[tuple[Edit, Verdict], ...]
    ended_by: str


def explain(view: RolloutView) -> Explanation:
    """Find why a rollout failed, or which lapses a passed rollout has."""
    against = [*dict.fromkeys(suspicions(view))]
    if view.repair.is_unsound:
        against.append("the reference, replayed, fails its own check")
    steps = tuple((edit, verdict_on(view, edit)) for edit in view.repair.edits)
    whole = [
        verdict for rule in LOG_RULES if (verdict := rule.applies(view, None)) and _counts_beside_repair(verdict, view)
    ]
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


def _counts_beside_repair(verdict: Verdict, view: RolloutView) -> bool:
    """Return whether a verdict on the whole rollout counts beside the repair.

    Without a proven repair it counts. With one, a verdict that relies on the reference does not count, and a forbidden
    write or value counts only if the repair changes a call of its tool.
    """
    repair = view.repair
    is_proven = repair.proven and not repair.passes and not repair.is_unsound
    touched = {call.tool for edit in repair.edits for call in edit.calls}
    if verdict.cause in ("undue_compliance", "wrong_argument"):
        return not is_proven or bool({*verdict.tools} & touched)
    return verdict.is_inherent or not (is_proven and repair.edits)


def _without_effects(
    verdicts: list[Verdict], steps: tuple[tuple[Edit, Verdict], ...], view: RolloutView
) -> list[Verdict]:
    """Drop verdicts that only follow from a loop, from a log of another task or from a failed simulated user."""
    if any(verdict.cause == "loop" for verdict in verdicts):
        looped = {peers[0].tool for peers in view.equal_calls if len(peers) >= REPEATS}
        verdicts = [v for v in verdicts if v.cause != "extra_write" or not {*v.tools} <= looped]
    if verdicts and is_foreign(view):
        verdicts = [v for v in verdicts if v.cause in UNREFERENCED]
    if (slip := slip_of(view.rollout)) is not None:
        omissions = [v for edit, v in steps if edit.kind in ("insert", "say") and v.message >= slip[0] - 1]
        verdicts = [v for v in verdicts if v not in omissions]
    return verdicts


def _ordered(verdicts: list[Verdict]) -> list[Verdict]:
    """Return the first verdict of each cause, roots first, then by message."""
    earliest: dict[str, Verdict] = {}
    for verdict in sorted(verdicts, key=lambda verdict: (verdict.stage, verdict.message, verdict.rank)):
        earliest.setdefault(verdict.cause, verdict)
    ordered = [*earliest.values()]
    if ordered and ordered[0].of_agent and ordered[0].stage == 0:
        # A user who leaves after the agent's mistake, and causes that mostly follow from a root, tell nothing more.
        ordered = ordered[:1] + [verdict for verdict in ordered[1:] if verdict.cause not in (SIMULATOR, *SEQUELS)]
    return ordered


def verdict_on(view: RolloutView, edit: Edit) -> Verdict:
    """Name the cause of an edit by the first rule that applies."""
    verdict = _first(view, _root_of(view, edit))
    if verdict.cause in FURTHER and (sequel := _sequel_of(view, edit)) is not None:
        verdict = _first(view, sequel)
    verdict = replace(verdict, tools=edit.tools)
    if edit.kind == "insert" and edit.goal is not None and verdict.cause in ("missing_write", "partial_refusal"):
        # If no clause forbids this step, it is required even if the reference is wrong elsewhere. Steps with personal
        # data are excepted, because wrong references often have wrong personal data.
        forbidden = [breach.act for breach in violations([pair.goal for pair in view.pairs], view.wishes, view.context)]
        is_of_people = any("first_name" in person for person in objects(edit.goal.arguments))
        is_forbidden = any(edit.goal.equals(act) for act in forbidden)
        verdict = replace(verdict, is_inherent=not is_of_people and not is_forbidden)
    return verdict


def _first(view: RolloutView, edit: Edit) -> Verdict:
    return next(verdict for rule in RULES_OF_STEP[edit.step] if (verdict := rule.applies(view, edit)))


def _root_of(view: RolloutView, edit: Edit) -> Edit:
    """Return the edit that names the cause of an edit. It is:

    - for a call that was made too early, the step that is missing before it,
    - for an operation that replaced another one, the dropped call,
    - for untold values of another choice, the edit of that choice,
    - otherwise the edit itself.
    """
    edits = view.repair.edits
    if (lead := _lead_of(view, edit)) is not None:
        return lead
    if edit.step == "insert write" and edit.goal is not None:
        twins = [peer for peer in edits if peer.kind == "drop" and is_twin(view, edit.goal, peer.calls[0])]
        return next(iter(twins), edit)
    if edit.kind == "say":
        shown = {*view.seen(edit.text, PAST_END, "tool")}
        owed = [peer.text for peer in edits if peer.kind == "say" and shown & {*view.seen(peer.text, PAST_END, "tool")}]
        for step in [step for step in edits if step.kind == "replace" and step.goal]:
            due, actual = (text_of(call.arguments) for call in (step.goal, step.calls[0]) if call)
            if any(says(due, text) and not says(actual, text) for text in (edit.text, *owed)):
                return step
    return edit


def _lead_of(view: RolloutView, edit: Edit) -> Edit | None:
    """Return the missing step before a call that was made too early and must be repeated after it; None otherwise."""
    call = edit.calls[0] if edit.kind == "drop" else edit.goal
    if edit.kind not in ("drop", "insert") or call is None or not any(map(call.equals, view.calls)):
        return None
    again = next((goal for goal in view.inserted if call.equals(goal)), None)
    steps = [step for step in view.repair.edits if step.kind == "insert" and step.goal and again]
    missing = [step for step in steps if step.goal and again and step.goal.place < again.place]
    return next((s for s in missing if s.goal and not any(map(s.goal.equals, view.calls))), None)


def _sequel_of(view: RolloutView, edit: Edit) -> Edit | None:
    """Return the first of the trailing steps that were skipped together, if the edit is a later one of them.

    None if the agent opened other records, or if something before the first step failed.
    """
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
    """Return whether the suspect reference explains the failure by itself.

    It does if the agent made only writes of the reference, left out only writes that the policy forbids, and shows no
    other causes than `LAPSES`.
    """
    goals = [act for act in view.expected if act.kind in CHANGES]
    forbidden = [violation.act for violation in violations(goals, view.wishes, view.context)]
    for pair in view.pairs:
        if pair.goal not in forbidden and (pair.write is None or not pair.write.equals(pair.goal)):
            return False
    lapses = {*LAPSES} - ({"loop"} if view.facts.limit else set())
    return not view.extras and agent_causes <= lapses


def ended_by(view: RolloutView) -> str:
    """Return how the dialogue ended: simulator, loop, cut off, transfer, refusal or stop."""
    if view.left is not None or slip_of(view.rollout) is not None:
        return "simulator"
    for edit in view.repair.differences:
        if edit.kind == "end":
            return "loop" if _first(view, edit).cause == "loop" else "cut off"
    if view.handover:
        return "transfer"
    last = view.replies()[-1:]
    return "refusal" if last and last[0] in view.refusals else "stop"
