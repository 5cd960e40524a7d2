"""Finders of causes in what a rollout calls, says and how it ends, beside its reference.

Each yields one finding for each occasion; which is charged with what is said in `captrain.capabilities.registry`.
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
"""Words that tools return and people say without telling anything: no value that a user asks for."""
SHORT = 2
"""Characters of a value that is likely to stand inside another one."""


def invalid_calls(story: Story, values: Vocabulary) -> Iterator[Finding]:
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
    """Tell if a refused call was well formed: made by the reference too, or a look-up in vain of what the user said."""
    is_reference_call = any(call.tool == act.tool and same(call.arguments, act.arguments) for call in story.expected)
    is_miss = act.kind == "read" and says(story.user, act.arguments) and bool(NOT_FOUND.search(text_of(act.result)))
    return is_reference_call or is_miss


def last_words(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """Every rollout comes to an end, unless it hands over."""
    if handover_of(story.acts) is None:
        cut = story.final is None
        yield Finding(cut, "is cut off without a last message" if cut else "ends with a message", story.last)


def hand_over(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference hands nothing over, and all that it changes is changed: what is not is the matter of
    `missing_writes`."""
    handover, is_due = handover_of(story.acts), handover_of(story.expected) is not None
    is_left_out = any(pair.write is None for pair in story.pairs)
    if is_due or is_left_out or not (story.expected_final or story.pairs):
        return
    evidence = f"ends with {handover}, which was not due" if handover else "nothing was handed over"
    yield Finding(handover is not None, evidence, handover.message if handover else story.last)


def escalation(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference hands over. A user who leaves on the offer of it leaves no time to do it."""
    handover, due = handover_of(story.acts), handover_of(story.expected)
    if due is not None:
        offered = HANDING_OVER.search(story.final or "") and story.messages[-1]["role"] == "user"
        evidence = f"{due} {'was made' if handover else 'was offered' if offered else 'is missing'}"
        yield Finding(not handover and not offered, evidence, handover.message if handover else story.last, (due.tool,))


def told_values(story: Story, values: Vocabulary) -> Iterator[Finding]:
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


def first_question(story: Story, values: Vocabulary) -> Iterator[Finding]:
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
    if any(finding.lacking for finding in told_values(story, values)):
        return
    missing = sorted(_words(story.expected_final) - _words(story.final) - values.words)
    evidence = f"last message lacks {', '.join(missing)}" if missing else "last message has all words of the reference"
    yield Finding(bool(missing), evidence, story.last)


def _words(text: str) -> set[str]:
    return {*WORD.findall(text.lower())}
