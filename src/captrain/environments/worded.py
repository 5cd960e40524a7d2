"""Answers in words: the part of a message that a broken solution says wrongly, and messages with another answer.

Some environments grade what is said, and not what a tool writes. The step of the capability is then a message. Its
answer is the part that tells it from the message of the broken solution. A message that guesses says another answer,
and leaves out what only the missing look-ups could have told.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set

from captrain.environments.probes import shape, words

ANSWER = "the answer"
"""Name of the step's value if the step is words. No tool has an argument of this name: it has a blank."""
USUAL = 0.9
"""Share of the texts that hold a usual word."""


def usual_words(texts: Sequence[str]) -> set[str]:
    """Return the words that nearly all texts hold, whatever the task."""
    counts = Counter(word for text in texts for word in {*words(text)})
    return {word for word, count in counts.items() if count >= USUAL * len(texts)}


def answer_of(right: str, wrong: str, usual: Set[str], told: str) -> tuple[str, str]:
    """Return the answers of a message and of its broken form: what is between their shared beginning and end.

    If the broken form says something of another form there, the answer is what the agent must have found out: the words
    beside the usual ones that nobody told it, or the first of them with digits.
    """
    ours, theirs = words(right), words(wrong)
    pairs = {(one, other) for one, other in zip(ours, theirs, strict=False) if one != other}
    if len(ours) == len(theirs) and len(pairs) == 1:
        return pairs.pop()
    start = _shared(ours, theirs)
    end = _shared(ours[start:][::-1], theirs[start:][::-1])
    ours, theirs = ours[start : len(ours) - end], theirs[start : len(theirs) - end]
    if len(ours) > 1 and shape(" ".join(ours)) != shape(" ".join(theirs)):
        known = {*usual, *words(told)}
        new = [word for word in ours if word not in known]
        ours = [word for word in new if re.search(r"\d", word)][:1] or new or ours
    return " ".join(ours), " ".join(theirs)


def _shared(first: Sequence[str], second: Sequence[str]) -> int:
    """Count the equal words at the beginning."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def must_be_found(right: str, wrong: str, told: Sequence[str], found: Sequence[str], usual: Set[str]) -> bool:
    """Return whether look-ups decide an answer.

    They do not if it is copied from the messages to the agent, or if it is wording: words without digits that all tasks
    share and no result holds.

    Args:
        right: the answer.
        wrong: that of the broken solution.
        told: the messages to the agent.
        found: the values of all results.
        usual: words that end nearly all references.
    """
    results, shown = f" {' '.join(words(' '.join(found)))} ", f" {' '.join(words(' '.join(told)))} "
    if not right or f" {right} " in results:
        return bool(right)
    copied = f" {right} " in shown and not (wrong and f" {wrong} " in shown + results)
    return not copied and bool(re.search(r"\d", right) or {*right.split()} - {*usual})


def replaced(text: str, old: str, new: str) -> str:
    """Put another answer into a message. Signs and blanks between its words may differ."""
    pattern = r"(?<!\w)" + r"\W+".join(map(re.escape, old.split())) + r"(?!\w)"
    changed, count = re.subn(pattern, lambda _: new, text)
    return changed if count else new


def forgetting(text: str, kept: str, hidden: Set[str], known: Set[str]) -> str:
    """Leave out what a message says of hidden words and unknown numbers, but keep its answer."""
    answer, said = {*words(kept)}, list[str]()
    for part in text.split():
        found = {*words(part)}
        numbers = {word for word in found if re.search(r"\d", word)}
        if found & answer or not (found & hidden or numbers - known):
            said.append(part)
    return " ".join(said)


def spans(text: str, right: str, usual: Set[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the spans of a prompt with the right answer's shape, and the words beside each, but for usual words."""
    found, count = words(text), len(right.split())
    for place in range(len(found) - count + 1):
        span = found[place : place + count]
        if not usual >= {*span} and shape(" ".join(span)) == shape(right):
            yield " ".join(span), (*found[max(0, place - 1) : place], *found[place + count : place + count + 1])
