"""Signs of causes in a whole rollout, independent of its edits: broken clauses, claims, denied look-ups, transfers.

A sign's docstring says when it holds. It yields the index of the message, the evidence in words, and the tools
concerned.
"""

from collections.abc import Iterator
from itertools import takewhile

from captrain.capabilities.calls import Call
from captrain.capabilities.clauses import unproven_writes, violations
from captrain.capabilities.faults import slip_of
from captrain.capabilities.text import (
    CLAIM,
    DISCLAIMER,
    SENTENCE,
    STANDING,
    plain,
    quoted,
    says,
    text_of,
)
from captrain.capabilities.view import RolloutView

CALLS = 4
"""Minimum number of equal calls in a row that count as a loop. Fewer may be retries."""
LogSign = tuple[int, str, tuple[str, ...]]
"""The index of the message that shows a cause, the evidence, and the tools concerned."""


def slipped(view: RolloutView) -> Iterator[LogSign]:
    """The simulated user failed."""
    if (slip := slip_of(view.rollout)) is not None:
        yield *slip, ()


def looped_to_the_end(view: RolloutView) -> Iterator[LogSign]:
    """The rollout ends with at least `CALLS` equal calls with equal results, and no message follows."""
    if not view.messages or view.messages[-1]["role"] != "tool" or view.handover or not view.rollout.reference:
        return
    streak = [*takewhile(lambda act: act.equals(view.acts[-1]) and act.result == view.acts[-1].result, view.acts[::-1])]
    if len(streak) >= CALLS:
        evidence = f"{streak[0]} was called {len(streak)} times in a row with the same result, and nothing follows"
        yield streak[-2].message, evidence, (streak[0].tool,)


def forbidden_writes(view: RolloutView) -> Iterator[LogSign]:
    """A clause of the policy forbids a write that the agent made and the reference does not make."""
    goals = [act for act in view.expected if act.kind == "write"]
    for violation in violations(view.writes, view.wishes, view.context):
        act = violation.act
        if violation.clause.breach == "undue_compliance" and not any(act.equals(goal) for goal in goals):
            yield view.proposal(act), str(violation), (act.tool,)


def forbidden_values(view: RolloutView) -> Iterator[LogSign]:
    """A clause of the policy forbids a value of a write, and the reference makes no such write."""
    goals = [act for act in view.expected if act.kind == "write"]
    for violation in violations(view.writes, view.wishes, view.context):
        act = violation.act
        if violation.clause.breach == "wrong_argument" and not any(act.equals(goal) for goal in goals):
            yield act.message, str(violation), (act.tool,)


def _unread_writes(view: RolloutView) -> Iterator[tuple[Call, int | None]]:
    """Yield writes on unread records that the reference reads first, each with the index of a user's claim or None."""
    for act in view.writes:
        places = [goal.place for goal in view.expected if goal.kind == "write" and goal.tool == act.tool]
        reads = [goal for goal in view.expected[: places[-1] if places else None] if goal.kind == "read"]
        due = {(name, text_of(value)) for goal in reads for name, value in goal.record.items()}
        names = [name for name, value in act.record.items() if (name, text_of(value)) in due]
        # A log may merge several turns into one message. Its look-ups came before its writes.
        folded = [read.record for read in view.acts if read.message == act.message and read.kind == "read"]
        is_read = all(any(record.get(name) == act.record[name] for record in folded) for name in names)
        if not is_read and not view.read_before(act, names):
            yield act, next((i for i in view.users(act.message) if CLAIM.search(plain(view.text(i)))), None)


def written_on_claim(view: RolloutView) -> Iterator[LogSign]:
    """The agent wrote on the user's word and never read the record."""
    for act, claim in _unread_writes(view):
        if claim is not None:
            evidence = f"{act} on the user's word, the record was never read: {quoted(view.text(claim))}"
            yield view.proposal(act), evidence, (act.tool,)


def unproven(view: RolloutView) -> Iterator[LogSign]:
    """A clause requires that a result shows a fact before the write. No result shows it; only the user claims it."""
    for violation, is_claimed in unproven_writes(view.writes, view.acts, view.wishes, view.context):
        if is_claimed:
            act = violation.act
            evidence = f'{act}, and {violation.reason}; the policy says "{violation.sentence}"'
            yield view.proposal(act), evidence, (act.tool,)


def _unused_lookup(view: RolloutView) -> str | None:
    """Return the first read tool of the reference that the rollout never calls successfully; None if there is none."""
    tools = {act.tool for act in view.acts if not act.failed}
    lookups = [act.tool for act in view.expected if act.kind == "read"]
    return next((tool for tool in lookups if tool not in tools), None)


def standing_repeated(view: RolloutView) -> Iterator[LogSign]:
    """The agent repeats a status that only the user has claimed, and never made the look-up that shows it."""
    unused = _unused_lookup(view)
    if unused is None or not view.is_lacking:
        return
    results = "\n".join(plain(text_of(act.result)) for act in view.acts)
    for place in view.users():
        standings = [match.group() for match in STANDING.finditer(plain(view.text(place)))]
        for reply in view.replies():
            words = plain(view.text(reply))
            claim = next((text for text in standings if text in words and not says(results, text.split()[0])), None)
            if reply > place and claim is not None and not view.text(reply).rstrip().endswith("?"):
                evidence = f"{claim!r} as the user said, and {unused} was never called: {quoted(view.text(reply))}"
                yield reply, evidence, (unused,)
                return


def means_denied(view: RolloutView) -> Iterator[LogSign]:
    """The agent says that it cannot look something up, and never calls a read tool that the reference calls."""
    unused = _unused_lookup(view)
    if unused is None or not view.pairs:
        return
    replies = [(place, view.text(place)) for place in view.replies()]
    handovers = [act for act in view.acts if act.kind == "handover"]
    words = [*replies, *((a.message, text) for a in handovers for text in (view.text(a.message), text_of(a.arguments)))]
    disclaimers = sorted((place, text) for place, text in words if DISCLAIMER.search(plain(text)))
    if disclaimers:
        place, text = disclaimers[0]
        sentence = next((part for part in SENTENCE.split(text) if DISCLAIMER.search(plain(part))), text)
        yield place, f"{unused} was never called, and the assistant says: {quoted(sentence)}", (unused,)


def transfer_not_due(view: RolloutView) -> Iterator[LogSign]:
    """The agent makes a transfer that the reference lacks, and a step is missing or the transfer replaces an answer."""
    repair = view.repair
    is_due = any(goal.kind == "handover" for goal in view.goals)
    handover = next((act for act in view.acts if act.kind == "handover"), None)
    if handover is None or is_due or not view.rollout.reference:
        return
    # If passed rollouts also make transfers that their references do not make, no answer was required.
    is_answer = not (repair.edits or repair.passes or handover.tool in view.context.needless_transfers)
    if is_answer or any(edit.kind == "insert" for edit in repair.edits):
        yield handover.message, f"{handover} was called; the reference makes no transfer", (handover.tool,)
