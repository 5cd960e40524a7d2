"""Signs: functions that test why a rollout needed an edit.

Each sign answers one question about one edit of a failed rollout. If the answer is yes, it returns the index of the
message that shows it, and the evidence in words. Otherwise it returns None. A sign's docstring says when it holds.

`captrain.capabilities.rules` maps signs to causes and orders them. A sign that holds for every edit of its kind comes
last there.
"""

import re
from collections.abc import Sequence

from captrain.capabilities.calls import Call
from captrain.capabilities.text import (
    NUMBER,
    WORD,
    asks_consent,
    atoms,
    is_common,
    is_identifier,
    quoted,
    says,
    shape,
    text_of,
)
from captrain.capabilities.toolbox import CHANGES, EFFECTS
from captrain.capabilities.view import PAST_END, Edit, RolloutView
from captrain.records import leaves

REPEATS = 3
"""Minimum number of equal calls that count as a loop. Two may be a retry."""
SENTENCE_LENGTH = 60
"""Minimum length of a repeated message that counts as a loop. Short messages may repeat."""
Sign = tuple[int, str] | None
"""The index of the message that shows a cause, and the evidence; None if the sign does not hold."""


def goal_of(edit: Edit) -> Call:
    """Return the edit's reference call, which must exist."""
    assert edit.goal is not None
    return edit.goal


# The simulated user


def left_at_once(view: RolloutView, edit: Edit) -> Sign:
    """The user leaves in its first message."""
    is_at_once = view.left is not None and len(view.users()) == 1
    return (view.left or 0, "the user left at once") if is_at_once else None


def left_early(view: RolloutView, edit: Edit) -> Sign:
    """The user agrees to the step, which the assistant has just proposed, and leaves before it is done."""
    if view.left is None or (edit.kind == "replace" and not edit.calls[0].failed):
        return None
    proposal, goal = view.text(view.left - 1), edit.goal
    values = [v for v in atoms(goal.arguments) if isinstance(v, str)] if goal else [edit.text]
    values += re.findall("[a-z]{4,}", goal.tool) if goal else []
    if not asks_consent(proposal) or not any(says(proposal, value) for value in values):
        return None
    return view.left, f"the user agrees to {edit.subject} and leaves before it is done"


# Look-ups and records


def did_nothing(view: RolloutView, edit: Edit) -> Sign:
    """The agent did nothing, and the reference begins with a look-up."""
    return (view.last, f"the agent did nothing; the reference starts with {view.expected[0]}") if view.is_idle else None


def handed_over_blind(view: RolloutView, edit: Edit) -> Sign:
    """The agent transfers to a human before any look-up."""
    reads = [call.message for call in view.lookups if call.by == "assistant"]
    if view.handover is None or view.handover.message > min(reads, default=PAST_END):
        return None
    return view.closing, f"{view.handover} was called before any look-up; the reference calls {edit.goal}"


def _unopened(view: RolloutView, goal: Call) -> str | None:
    """Return a record of the goal that the rollout never opens; None if there is none.

    If the reference makes look-ups, one of them must open the record.
    """
    due = [step for step in view.goals if step.kind == "read"]
    for _, record in view.records(goal):
        is_due = not due or any(record in leaves(lookup.arguments) for lookup in due)
        if is_due and not view.opened(record):
            return record
    return None


def record_mistyped(view: RolloutView, edit: Edit) -> Sign:
    """A failed look-up uses an invented identifier with the same shape as the right one."""
    record = _unopened(view, goal_of(edit))
    if record is None:
        return None
    for call in view.lookups:
        codes = [value for value in call.arguments.values() if is_identifier(value) and call.failed]
        if any(shape(code) == shape(record) and not view.in_view(code, call.message) for code in codes):
            return call.message, f"{call} uses a made-up value; {record} was never looked up"
    return None


def record_never_opened(view: RolloutView, edit: Edit) -> Sign:
    """The record was never opened.

    Does not hold if the record was in view and the agent opened another one of its kind.
    """
    record = _unopened(view, goal_of(edit))
    if record is None:
        return None
    is_due = any(record in leaves(step.arguments) for step in view.goals if step.kind == "read")
    if not is_due or (view.in_view(record) and view.opened_instead(record)):
        return None
    return view.closing, f"{record} was never looked up, and {edit.goal} never called"


def record_mistaken(view: RolloutView, edit: Edit) -> Sign:
    """The agent opened exactly one other record in place of the only record that was due."""
    record = _unopened(view, goal_of(edit))
    openings = view.opened_instead(record) if record else {}
    steps = [step for step in view.goals if step.kind in CHANGES]
    due = {value for step in steps for _, value in view.records(step) if record and shape(value) == shape(record)}
    is_told = any(says(view.text(place), record) for place in view.replies())
    if len(openings) != 1 or len(due) != 1 or is_told:
        return None
    return min(openings.values()), f"{next(iter(openings))} was looked up instead of {record}"


def records_left_out(view: RolloutView, edit: Edit) -> Sign:
    """The agent opened other records of this kind but not this one."""
    record = _unopened(view, goal_of(edit))
    openings = view.opened_instead(record) if record else {}
    if not openings:
        return None
    return max(openings.values()), f"{record} was never looked up, only {', '.join(openings)}"


def lookup_skipped(view: RolloutView, edit: Edit, *, is_alike: bool) -> Sign:
    """A required look-up is missing. `is_alike`: whether its tool was called with other arguments."""
    goal = goal_of(edit)
    later = [call.message for call in view.calls[edit.before :]] if edit.before is not None else []
    return (next(iter(later), view.last), f"{goal} was never called") if view.has_like(goal) == is_alike else None


def value_not_shown(view: RolloutView, edit: Edit, *, is_alike: bool) -> Sign:
    """A needed value appears in no message because the look-up that shows it is missing.

    `is_alike`: whether the look-up's tool was called with other arguments.
    """
    message, before, values, goal = view.closing, PAST_END, list[object](), edit.goal
    if edit.kind == "say":
        message, values = view.last, [edit.text]
    elif edit.kind == "insert":
        values = [value for value in atoms(goal_of(edit).arguments) if isinstance(value, str)]
    elif edit.kind == "replace":
        message = before = edit.calls[0].message
        words = [value for value in edit.missing if isinstance(value, str)]
        values = [*(words or edit.missing)]
    elif (goal := swapped_for(view, edit)) is not None:
        message = before = edit.calls[0].message
        values = [*atoms(goal.arguments)]
    owed = [peer.text for peer in view.repair.edits if peer.text]
    for value in values:
        if is_common(value) or view.in_view(value, before):
            continue
        for lookup in view.needs(goal):
            # A look-up that takes the needed values as arguments comes after the choice, so it cannot inform it.
            keys = [*leaves(lookup.arguments)]
            is_of_it = all(any(says(text_of(peer), leaf) for peer in (*values, *owed)) for leaf in keys)
            if says(text_of(lookup.result), value) and not is_of_it:
                is_match = view.has_like(lookup) == is_alike
                return (message, f"{lookup} shows {text_of(value)}, but was never called") if is_match else None
    return None


def changed_unread(view: RolloutView, edit: Edit) -> Sign:
    """The agent changed the record without the look-up with which the reference opens it."""
    call = edit.calls[0]
    unread = view.unread(call)
    if unread is None or any(view.seen(value, call.message, "user") for value in edit.missing):
        return None
    return call.message, f"{call} without {unread} before it"


def _other_record(view: RolloutView, edit: Edit) -> tuple[str, str] | None:
    """Return the argument with the wrong record, and the reference's record; None if all records are right."""
    return next((entry for entry in view.records(goal_of(edit)) if entry[0] in edit.wrong), None)


def record_invented(view: RolloutView, edit: Edit) -> Sign:
    """The call names a record that no user or tool message has shown before."""
    record, call = _other_record(view, edit), edit.calls[0]
    if record is None or view.in_view(call.arguments.get(record[0]), call.message):
        return None
    return call.message, f"{edit.corrections}; {text_of(call.arguments.get(record[0]))} is in no earlier message"


def record_confused(view: RolloutView, edit: Edit) -> Sign:
    """The call names another record than the reference. If the agent opened it by mistake, that message shows it."""
    record, call = _other_record(view, edit), edit.calls[0]
    if record is None:
        return None
    wrong = text_of(call.arguments.get(record[0]))
    is_due = any(wrong in leaves(goal.arguments) for goal in view.goals if goal.kind in EFFECTS)
    if is_due or view.opened(record[1], call.message):
        return call.message, edit.corrections
    return min(view.opened_instead(record[1]).get(wrong, PAST_END), call.message), edit.corrections


def record_treated_twice(view: RolloutView, edit: Edit) -> Sign:
    """A correct call was repeated and refused, in place of the call for another record."""
    goal = goal_of(edit)
    peers = [call for call in view.calls if (call.tool, call.by) == (goal.tool, goal.by)]
    again = [call for place, call in enumerate(peers) if call.failed and any(map(call.equals, peers[:place]))]
    if not again or not any(map(again[0].equals, view.goals)):
        return None
    return peers[0].message, f"{again[0]} was called twice, and {goal} never"


# Operations


def made_again(view: RolloutView, edit: Edit) -> Sign:
    """An equal call was made before."""
    call = edit.calls[0]
    dropped = {peer.place for step in view.repair.edits if step.kind == "drop" for peer in step.calls}
    is_again = any(call.equals(peer) and peer.changed for peer in view.calls if peer.place not in dropped)
    return (call.message, f"{call} was called twice") if is_again else None


def swapped_for(view: RolloutView, edit: Edit) -> Call | None:
    """Return the inserted goal that the dropped call replaced; None if there is none."""
    return next((goal for goal in view.inserted if is_twin(view, goal, edit.calls[0])), None)


def is_twin(view: RolloutView, goal: Call, call: Call) -> bool:
    """Return whether an assistant's call is on the goal's record or has the same arguments."""
    is_on_record = any(call.arguments.get(name) == value for name, value in view.records(goal)[:1])
    return goal.by == call.by == "assistant" and (is_on_record or (goal.arguments == call.arguments != {}))


def operation_swapped(view: RolloutView, edit: Edit) -> Sign:
    """Another operation was due on the record."""
    goal, call = swapped_for(view, edit), edit.calls[0]
    return (call.message, f"{call} instead of {goal}") if goal else None


def operation_mistaken(view: RolloutView, edit: Edit) -> Sign:
    """A call of another tool has the arguments of the goal."""
    goal = goal_of(edit)
    swaps = [call for call in view.calls if call.arguments == goal.arguments != {} and call.kind in EFFECTS]
    swaps = [call for call in swaps if call.by == goal.by and not any(map(call.equals, view.goals))]
    return (swaps[0].message, f"{swaps[0]} instead of {goal}") if swaps else None


def _attempts(view: RolloutView, goal: Call) -> list[Call]:
    """Return failed calls of the goal's tool, and failed writes on its record without a later correct write."""
    touched = {call.place for edit in view.repair.edits for call in edit.calls}
    right = [peer for peer in view.calls if peer.changed and peer.place not in touched]
    attempts = list[Call]()
    for call in [call for call in view.calls if call.failed]:
        later = {record for peer in right if peer.message > call.message for record in view.records(peer)}
        is_on_record = bool({*view.records(call)} & {*view.records(goal)} - later)
        is_write = call.kind in CHANGES and call.by == goal.by
        attempts += [call] if call.tool == goal.tool or (is_write and is_on_record) else []
    return attempts


def record_locked(view: RolloutView, edit: Edit) -> Sign:
    """The right call was refused, after an earlier change of the same record."""
    goal = goal_of(edit)
    attempts = _attempts(view, goal)
    locks = [call for call in view.calls if call.changed and attempts and call.message < attempts[0].message]
    lock = next((call for call in locks if {*view.records(call)} & {*view.records(goal)}), None)
    if lock is None or not any(call.equals(goal) for call in attempts):
        return None
    return lock.message, f"{lock} came before {goal}, which was then refused"


def left_as_text(view: RolloutView, edit: Edit) -> Sign:
    """The call was written as text in a message and never executed."""
    goal = goal_of(edit)
    for place, message in enumerate(view.messages):
        if goal.tool in (message.get("unexecuted") or ()):
            return place, f"a call of {goal.tool} was written as text and never executed"
    return None


def attempt_refused(view: RolloutView, edit: Edit) -> Sign:
    """The call was tried and refused."""
    attempts = _attempts(view, goal_of(edit))
    return (attempts[0].message, f"{attempts[-1]} was refused, and {edit.goal} never succeeded") if attempts else None


def breaks_policy(view: RolloutView, edit: Edit) -> Sign:
    """A clause of the policy forbids the call."""
    call = edit.calls[0]
    breach = view.breach(call)
    place = view.proposal(call) if edit.kind == "drop" else call.message
    return (place, breach) if breach else None


def asked_by_user(view: RolloutView, edit: Edit) -> Sign:
    """The user asked for the call, as its script says, but the reference does not make it."""
    call = edit.calls[0]
    evidence = f"{call}, as the user asked; the reference does not call it"
    return (view.proposal(call), evidence) if view.is_wished(call) else None


def proposed_to_user(view: RolloutView, edit: Edit) -> Sign:
    """The agent proposed the call to the user, but the reference does not make it."""
    call = edit.calls[0]
    proposals = [place for place in view.replies(call.message) if asks_consent(view.text(place))]
    return (
        (proposals[-1], f"{call}, as the agent proposed to the user; the reference does not call it")
        if proposals
        else None
    )


def not_in_reference(view: RolloutView, edit: Edit) -> Sign:
    """The reference does not make the call."""
    return edit.calls[0].message, f"{edit.calls[0]} is not in the reference"


# Values


def _uneven_list(edit: Edit) -> int:
    """Return the surplus of items in a list argument, negative if items are missing; 0 if no list differs so.

    The shorter list must be part of the longer one.
    """
    for name in edit.wrong:
        expected, actual = goal_of(edit).arguments[name], edit.calls[0].arguments.get(name)
        if isinstance(expected, list) and isinstance(actual, list) and len(expected) != len(actual):
            least, most = sorted((actual, expected), key=len)
            if all(item in most for item in least):
                return len(actual) - len(expected)
    return 0


def items_added(view: RolloutView, edit: Edit) -> Sign:
    """A list argument has extra items."""
    return (edit.calls[0].message, edit.corrections) if _uneven_list(edit) > 0 else None


def items_left_out(view: RolloutView, edit: Edit) -> Sign:
    """A list argument lacks items."""
    return (edit.calls[0].message, edit.corrections) if _uneven_list(edit) < 0 else None


def value_invented(view: RolloutView, edit: Edit) -> Sign:
    """An argument value with digits or marks appears in no earlier message and not in the policy."""
    call = edit.calls[0]
    words = [value for value in edit.missing if isinstance(value, str)]
    coined = [value for value in edit.strange if isinstance(value, str) and re.search(r"\d|\w[@:/.]\w", value)]
    invented = [v for v in coined if not view.in_view(v, call.message) and not says(view.context.policy, v)]
    if not invented or (words and all(view.in_view(word, call.message) for word in words)):
        return None
    return call.message, f"{edit.corrections}; {invented[0]} is in no earlier message"


def value_wrong(view: RolloutView, edit: Edit) -> Sign:
    """An argument has another value."""
    return edit.calls[0].message, edit.corrections


# Words


def number_miscalculated(view: RolloutView, edit: Edit) -> Sign:
    """A required number appears in no message, and the last reply tells another new number."""
    if not NUMBER.search(edit.text) or view.in_view(edit.text):
        return None
    for place in view.replies()[-1:]:
        words = [word for word in WORD.findall(view.text(place)) if len(word) > 1 and NUMBER.fullmatch(word)]
        if worked_out := [word for word in words if not view.in_view(word, place)]:
            return place, f"the agent told {worked_out[0]} instead of {edit.text}"
    return None


def not_told(view: RolloutView, edit: Edit) -> Sign:
    """A required value was not told, and there was no transfer to a human."""
    return None if view.handover else (view.last, f"{edit.text} was {'known but ' * view.in_view(edit.text)}not told")


# What was not done


def refused_by_agent(view: RolloutView, edit: Edit) -> Sign:
    """The assistant knows the record, and says that the step cannot be done."""
    records = [value for _, value in view.records(goal_of(edit))]
    refusal = view.refusal(records)
    values = records or [value for value in goal_of(edit).arguments.values() if isinstance(value, str)]
    if refusal is None or not all(view.in_view(value, refusal) for value in values):
        return None
    return refusal, f"{edit.goal} was refused: {quoted(view.text(refusal))}"


def handed_over_instead(view: RolloutView, edit: Edit) -> Sign:
    """The agent transferred to a human instead."""
    handover = view.handover
    return (handover.message, f"{handover} was called instead of {edit.subject}") if handover else None


def transfer_undue(view: RolloutView, edit: Edit) -> Sign:
    """A transfer was made that the reference does not make."""
    return edit.calls[0].message, f"{edit.calls[0]} was called; the reference makes no transfer"


def left_out(view: RolloutView, edit: Edit) -> Sign:
    """A write of the reference is missing, and there was no transfer to a human."""
    return None if view.handover else never_made(view, edit)


def never_made(view: RolloutView, edit: Edit) -> Sign:
    """A step of the reference is missing."""
    of_user = " of the user" if goal_of(edit).by == "user" else ""
    return view.last, f"{edit.goal}{of_user} was never called"


def limited(view: RolloutView, edit: Edit) -> Sign:
    """The harness stopped the rollout at a limit."""
    limit = view.facts.limit
    return (view.last, f"stopped at a limit: {limit}") if limit else None


def cut_off(view: RolloutView, edit: Edit) -> Sign:
    """The dialogue was cut off."""
    return view.last, f"it ended early: {view.ending or 'it is cut off'}"


def called_again(view: RolloutView, edit: Edit) -> Sign:
    """The agent repeated one call or one message until the dialogue was cut off."""
    peers: Sequence[Call] = max(view.equal_calls, key=len, default=[])
    ending = view.ending or "it is cut off"
    if len(peers) >= REPEATS:
        return peers[1].message, f"{peers[0]} was called {len(peers)} times with the same arguments, until {ending}"
    places: dict[str, list[int]] = {}
    for place in view.replies():
        places.setdefault(view.text(place).strip(), []).append(place)
    text, again = max(places.items(), key=lambda item: len(item[1]), default=("", []))
    is_loop = len(again) > REPEATS and len(text) >= SENTENCE_LENGTH
    return (again[1], f"the same words {len(again)} times, until {ending}: {quoted(text)}") if is_loop else None
