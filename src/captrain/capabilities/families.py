"""The families of divergence: in which ways a rollout can go wrong beside its reference, each a candidate capability.

Each family yields one finding for each occasion on which a rollout exercised it. A mismatch is charged to one family:
a wrong record says nothing against completion or argument values, another operation on the right record is a wrong
decision, a write that was never begun is no write left out of several. One write may show two lacks at once only where
it really does, such as a write on the wrong record that was not read either. Where the reference offers no occasion, as
benchmarks' references often have no closing words, a family has nothing to say.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from captrain.capabilities.alignment import (
    NOT_FOUND,
    Act,
    Finding,
    Story,
    differing,
    is_malformed,
    is_reply,
    same,
    says,
    text_of,
)
from captrain.capabilities.milestones import call_arguments, needed_calls, reached_state, told_outcome, withheld_acts
from captrain.capabilities.vocabulary import WORD, Vocabulary

HANDING_OVER = re.compile(r"\b(transfer|connect|hand)(ring|ing)? you\b", re.IGNORECASE)
COURTESIES = frozenset({"complete", "completed", "done", "false", "no", "none", "ok", "okay", "success", "true", "yes"})
"""What tools return and people say without telling anything: no value that a user asks for."""
SHORT = 2
"""Characters of a value that is likely to stand inside another one."""
Finder = Callable[[Story, Vocabulary], Iterator[Finding]]


def precondition_verification(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference reads a record, then decides on a write on it."""
    for pair in story.pairs:
        if not pair.guards or pair.write is None:
            continue
        repeats = [extra for extra in story.extras if extra.record == pair.goal.record]
        for act in (pair.write, *repeats):
            names = [name for name in pair.guards if name in act.record]
            if not names:
                continue
            lacking = not story.read_before(act, names)
            evidence = f"{act} without reading the record first" if lacking else f"{act} after reading the record"
            # On another record than the reference's only the reading can be judged, not the decision.
            if not lacking and act.record == pair.goal.record and story.overrules(act):
                lacking, evidence = True, f"{evidence}, where {pair.goal} was the right decision"
            yield Finding(lacking, evidence, act.message, (*pair.guard_tools, pair.goal.tool), pair.guards)
    for act, tools in _unread(story):
        evidence = f"{act} without reading the record first, after which the reference changes nothing"
        yield Finding(True, evidence, act.message, (*tools, act.tool), tuple(act.record))


def _unread(story: Story) -> list[tuple[Act, tuple[str, ...]]]:
    """The writes, where the reference only reads, on a record that it reads and the rollout did not; with its tools."""
    unread = []
    for act in story.extras if not story.pairs else []:
        lookups = [lookup for lookup in story.expected if lookup.kind == "read" and lookup.record]
        reads = [lookup for lookup in lookups if same(lookup.record, act.record)]
        if reads and not story.read_before(act, act.record):
            unread.append((act, tuple(sorted({lookup.tool for lookup in reads}))))
    return unread


def record_selection(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference writes on a record that no user message names."""
    for pair in story.pairs:
        if pair.derived and pair.write is not None:
            wrong = bool({*differing(pair.goal, pair.write)} & {*pair.derived})
            judgement = f"where {pair.goal} was meant" if wrong else "on the record that was meant"
            yield Finding(wrong, f"{pair.write} {judgement}", pair.write.message, (pair.goal.tool,), pair.derived)


def named_record(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference writes on a record that the user names."""
    for pair in story.pairs:
        if pair.write is None:
            continue
        # What the user confirms afterwards was not named for the write.
        spoken = story.user_before(pair.write)
        names = tuple(name for name, value in pair.goal.record.items() if says(spoken, value))
        if names:
            wrong = bool({*differing(pair.goal, pair.write)} & {*names})
            evidence = f"{pair.write} {'where the user named that of' if wrong else 'on the record of'} {pair.goal}"
            yield Finding(wrong, evidence, pair.write.message, (pair.goal.tool,), names)


def operation_choice(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference writes on a record without reading it first: what it does there follows from the request alone."""
    for pair in story.pairs:
        if pair.write is not None and not pair.guards and same(pair.write.record, pair.goal.record):
            wrong = pair.write.tool != pair.goal.tool
            evidence = f"{pair.write}, {'where ' if wrong else ''}{pair.goal} was the right operation"
            yield Finding(wrong, evidence, pair.write.message, (pair.goal.tool,))


def carrying_out(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference writes."""
    if story.pairs:
        goal = story.pairs[0].goal
        evidence = f"nothing was changed, where {goal} was due" if not story.writes else f"{story.writes[0]} was made"
        if not story.writes and (handover := _handover(story.acts)):
            evidence += f"; {handover.tool} was called instead"
        message = story.writes[0].message if story.writes else story.last
        yield Finding(not story.writes, evidence, message, tuple(pair.goal.tool for pair in story.pairs))


def multi_step_completion(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference makes several writes, and the rollout at least one: without any it is `carrying_out` that lacks."""
    if len(story.pairs) > 1 and story.writes:
        missing = [pair.goal for pair in story.pairs if pair.write is None]
        evidence = f"{len(story.pairs) - len(missing)} of {len(story.pairs)} operations carried out"
        evidence += f", {missing[0]} left out" if missing else ""
        yield Finding(bool(missing), evidence, story.last, tuple(pair.goal.tool for pair in story.pairs))


def argument_precision(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference copies a content argument of a write from the user's words."""
    for write, name, value, wrong in _contents(story):
        if says(story.user_before(write), value):
            evidence = f"{write}: {name} {'should be' if wrong else 'is'} {text_of(value)}, as the user said"
            yield Finding(wrong, evidence, write.message, (write.tool,), (name,))


def derived_arguments(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference gives a content argument of a write a value that the user has not said: it follows from records
    or policy."""
    for write, name, value, wrong in _contents(story, elsewhere=False):
        if not says(story.user, value):
            text = text_of(write.content.get(name))
            evidence = f"{write.tool}: {name} {f'{text} should be' if wrong else 'is'} {text_of(value)}"
            yield Finding(wrong, f"{evidence}, which the user did not say", write.message, (write.tool,), (name,))


def _contents(story: Story, elsewhere: bool = True) -> Iterator[tuple[Act, str, object, bool]]:
    """The content arguments of writes by the right tool: write, name, right value, and whether another was given.
    `elsewhere`: on a wrong record, too, where what follows from records follows from the wrong ones."""
    for pair in story.pairs:
        if pair.write is not None and pair.write.tool == pair.goal.tool:
            wrong = differing(pair.goal, pair.write)
            if elsewhere or not {*pair.goal.record} & {*wrong}:
                for name, value in pair.goal.content.items():
                    if pair.goal.compared is None or name in pair.goal.compared:
                        yield pair.write, name, value, name in wrong


def initial_lookup(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference's first look-up takes arguments that the user states. Another one that finds something is no worse;
    none before a write is the matter of `precondition_verification`, and where nothing is to be done or told none is
    needed."""
    expected = next((act for act in story.expected if act.kind == "read"), None)
    if expected is None or not says(story.user, expected.arguments):
        return
    first = next((act for act in story.acts if act.kind == "read"), None)
    has_purpose = story.pairs or story.informs or story.expected_final
    if first is None and (story.writes or not has_purpose):
        return
    wrong = first is None or (first.failed and not _fruitless(story, first))
    evidence = f"first look-up {first or 'missing'}" + (f", expected {expected}" if wrong else "")
    yield Finding(wrong, evidence, first.message if first else story.last, (expected.tool,), tuple(expected.arguments))


def valid_calls(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The rollout calls tools, or tries to."""
    for index, message in enumerate(story.messages):
        if is_malformed(message):
            yield Finding(True, "a call that is not well formed, left as text", index)
    for act in story.acts:
        lacking = act.failed and not _fruitless(story, act)
        outcome = "was refused" if lacking else "was accepted"
        if lacking and act.result is None:
            outcome = "does not fit the schema of its tool, and got no result"
        yield Finding(lacking, f"{act} {outcome}", act.message, (act.tool,))


def _fruitless(story: Story, act: Act) -> bool:
    """Whether a refused call was well formed: made by the reference too, or a look-up in vain of what the user said."""
    is_reference_call = any(call.tool == act.tool and same(call.arguments, act.arguments) for call in story.expected)
    is_miss = act.kind == "read" and says(story.user, act.arguments) and bool(NOT_FOUND.search(text_of(act.result)))
    return is_reference_call or is_miss


def _handover(acts: Sequence[Act]) -> Act | None:
    return next((act for act in acts if act.kind == "handover"), None)


def closing(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """Every rollout comes to an end. A hand-over that is missing is the matter of `escalation`; one that is not due is
    no closing, where the reference shows how to end."""
    handover, due = _handover(story.acts), _handover(story.expected)
    if handover is not None and due is None and story.expected_final is None:
        return
    if handover is not None:
        evidence = f"ends with {handover}" + ("" if due else ", which was not due")
        yield Finding(due is None, evidence, handover.message, (handover.tool,))
    else:
        cut = story.final is None
        yield Finding(cut, "is cut off without a last message" if cut else "ends with a message", story.last)


def escalation(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference hands over. A user who leaves on the offer of it leaves no time to do it."""
    handover, due = _handover(story.acts), _handover(story.expected)
    if due is not None:
        offered = HANDING_OVER.search(story.final or "") and story.messages[-1]["role"] == "user"
        evidence = f"{due} {'was made' if handover else 'was offered' if offered else 'is missing'}"
        yield Finding(not handover and not offered, evidence, handover.message if handover else story.last, (due.tool,))


def information(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference tells the user values that tools return, or says itself which values must be told."""
    for value in story.informs:
        index = _telling(story, value)
        evidence = f"{value} was {'not told' if index is None else 'told'}"
        yield Finding(index is None, evidence, story.last if index is None else index)
    replies = {index: message["content"] for index, message in enumerate(story.messages) if is_reply(message)}
    for value in story.informed(values.near(story.expected_final or "")):
        if value.strip(".! ").lower() in COURTESIES:
            continue
        tellings = [index for index, content in replies.items() if says(content, value)]
        evidence = f"{value} was {'told' if tellings else 'not told'}"
        yield Finding(not tellings, evidence, tellings[0] if tellings else story.last)


def _telling(story: Story, value: str) -> int | None:
    """The first message that tells a value: a short one, which is part of many others, as a whole word."""
    index = story.first_telling(value)
    if index is None or len(value) > SHORT:
        return index
    words = ((place, m.get("content")) for place, m in enumerate(story.messages) if m["role"] == "assistant")
    return next((place for place, content in words if says(text_of(content or ""), value)), None)


def clarification(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference asks the user something before it acts."""
    if len(story.reference) < 2 or not is_reply(story.reference[0]):
        return
    roles = [message["role"] for message in story.messages]
    # An assistant may greet before the user has spoken: that is no question.
    turns = [index for index, role in enumerate(roles) if role == "assistant" and "user" in roles[:index]]
    start = turns[0] if turns else story.last
    has_asked = is_reply(story.messages[start]) and roles[start + 1 : start + 2] == ["user"]
    yield Finding(not has_asked, "asked the user first" if has_asked else "acted or closed without asking first", start)


def no_extra_writes(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The rollout writes. Extras that show another lack are its matter: those put to the user, wrong decisions, and
    those on a record that had to be read."""
    unread = [act for act, _ in _unread(story)]
    for act in story.extras:
        if act not in unread and not story.overrules(act) and not _forbidden(story, act):
            twice = sum(write.tool == act.tool and same(write.record, act.record) for write in story.writes) > 1
            evidence = f"{act} was {'done twice' if twice else 'none of the reference'}"
            yield Finding(True, evidence, act.message, (act.tool,), tuple(act.arguments))
    for pair in story.pairs:
        if pair.write is not None:
            yield Finding(False, f"{pair.write} was asked for", pair.write.message, (pair.write.tool,))


def declining_requests(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The rollout put a write to the user that the reference leaves undone, or the reference changes nothing at all."""
    if not story.has_reference:
        return
    for act in story.extras:
        if _forbidden(story, act):
            evidence = f"{act} was made, which the reference leaves undone"
            yield Finding(True, evidence, act.message, (act.tool,), tuple(act.arguments))
    if not story.pairs and not story.writes:
        yield Finding(False, "nothing was changed, as in the reference", story.last)


def _forbidden(story: Story, act: Act) -> bool:
    """Whether an extra write was no slip but a decision: the reference leaves its record alone (without a key: makes no
    such write), and the assistant had put it to the user."""
    goals = [pair.goal for pair in story.pairs]
    alone = all(not same(act.record, goal.record) if act.record else act.tool != goal.tool for goal in goals)
    return alone and story.put_to_user(act) and all(act is not unread_act for unread_act, _ in _unread(story))


def reply_wording(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """Both close with a message; one that lacks the information asked for is not judged on its wording."""
    if story.final is None or story.expected_final is None:
        return
    if any(finding.lacking for finding in information(story, values)):
        return
    missing = sorted(_words(story.expected_final) - _words(story.final) - values.words)
    evidence = f"last message lacks {', '.join(missing)}" if missing else "last message has all words of the reference"
    yield Finding(bool(missing), evidence, story.last)


def _words(text: str) -> set[str]:
    return {*WORD.findall(text.lower())}


@dataclass(frozen=True)
class Family:
    """A kind of divergence as a candidate capability; `absent` is the evidence of the label NA."""

    name: str
    description: str
    absent: str
    find: Finder


FAMILIES = {
    family.find.__name__: family
    for family in (
        Family(
            "Precondition verification",
            "Reads a record before acting on it, and decides by what it reads.",
            "no write on a record that the reference reads first",
            precondition_verification,
        ),
        Family(
            "Record selection",
            "Finds out which record a request means when the user does not name it, from what the tools return.",
            "no write for a record that the user left unnamed",
            record_selection,
        ),
        Family(
            "Multi-step completion",
            "Carries out every operation of a request before closing.",
            "the reference makes fewer than two writes",
            multi_step_completion,
        ),
        Family(
            "Argument precision",
            "Copies values from the user's words into arguments exactly.",
            "no write with a value from the user's words",
            argument_precision,
        ),
        Family(
            "Initial look-up",
            "Begins with the right look-up, with what the user has said.",
            "the reference begins with no look-up of what the user has said",
            initial_lookup,
        ),
        Family(
            "Named record",
            "Acts on the record that the user names.",
            "no write on a record that the user names",
            named_record,
        ),
        Family(
            "Operation choice",
            "Chooses the operation that a request calls for.",
            "no write on the right record that the reference does not read first",
            operation_choice,
        ),
        Family(
            "Carrying out",
            "Makes a change that is asked for and allowed, and does not refuse, give up or hand over instead.",
            "the reference changes nothing",
            carrying_out,
        ),
        Family(
            "Derived arguments",
            "Works out from records and policy the values that the user does not say.",
            "no write with a value that the user has not said",
            derived_arguments,
        ),
        Family(
            "Declining requests",
            "Leaves undone what policy or records do not allow, even when the user asks for it.",
            "nothing to decline is known",
            declining_requests,
        ),
        Family("Needed calls", "Calls the tools that a task needs.", "no milestone asks for a call", needed_calls),
        Family(
            "Call arguments",
            "Gives a needed call the right arguments.",
            "no call that a milestone asks for",
            call_arguments,
        ),
        Family(
            "Reached state",
            "Brings the records into the state asked for.",
            "no milestone asks for a state",
            reached_state,
        ),
        Family("Told outcome", "Tells the user the outcome.", "no milestone asks for words to the user", told_outcome),
        Family(
            "Withheld acts", "Does not act where a task cannot be done.", "nothing is to be left out", withheld_acts
        ),
        Family("Valid calls", "Calls tools in a form that they accept.", "no call was made", valid_calls),
        Family(
            "Closing",
            "Ends the conversation when all is done.",
            "the reference shows no other ending than a hand-over",
            closing,
        ),
        Family("Escalation", "Hands over when that is due.", "the reference hands nothing over", escalation),
        Family(
            "Information",
            "Tells the user what was asked for, as the tools return it.",
            "the reference tells no value that tools return",
            information,
        ),
        Family(
            "Clarification",
            "Asks the user for what is missing before acting.",
            "the reference asks nothing first",
            clarification,
        ),
        Family("No extra writes", "Changes nothing beyond what was asked for.", "nothing was written", no_extra_writes),
        Family(
            "Reply wording",
            "Words the last message as the reference does, courtesy included.",
            "no last message, or one that lacks the information asked for",
            reply_wording,
        ),
    )
}
