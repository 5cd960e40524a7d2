"""How a rollout can go wrong in what it looks up, in what it says and how it ends, beside its reference: finders.

Each yields one finding for each occasion on which a rollout exercised its family; which is charged with what is said in
`captrain.capabilities.families`.
"""

import re
from collections.abc import Iterator

from captrain.capabilities.alignment import (
    NOT_FOUND,
    Act,
    Finding,
    Story,
    handover_of,
    is_malformed,
    is_reply,
    same,
    says,
    text_of,
)
from captrain.capabilities.vocabulary import WORD, Vocabulary

HANDING_OVER = re.compile(r"\b(transfer|connect|hand)(ring|ing)? you\b", re.IGNORECASE)
COURTESIES = frozenset({"complete", "completed", "done", "false", "no", "none", "ok", "okay", "success", "true", "yes"})
"""What tools return and people say without telling anything: no value that a user asks for."""
SHORT = 2
"""Characters of a value that is likely to stand inside another one."""


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


def closing(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """Every rollout comes to an end. A hand-over that is missing is the matter of `escalation`; one that is not due is
    no closing, where the reference shows how to end."""
    handover, due = handover_of(story.acts), handover_of(story.expected)
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
    handover, due = handover_of(story.acts), handover_of(story.expected)
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
