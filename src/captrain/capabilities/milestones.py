"""Unmet milestones of a benchmark as causes: states to reach, calls to make, outcomes to tell, acts to leave out.

A benchmark that has no reference calls may say instead what must have happened by the end, as ToolSandbox does. Its
milestones are part of its reference, so an analyst may read them: task data `milestones` is a list, and the score has a
part "milestone 1" for its first entry, 0 to 1. An entry says what is checked: `tool` (and `arguments`) a call,
`message` words to the user, otherwise a state (`namespace`, `values`); `minefield` true marks an act to leave out,
whose part is 0 where it happened. Any of these may be absent.

Milestones build on one another: what comes after an unmet one is not judged, so that one mismatch has one charge.
"""

from collections.abc import Iterator
from functools import partial

from captrain.capabilities.alignment import Act, Finding, Kind, Story, is_reply, same, text_of
from captrain.capabilities.vocabulary import Vocabulary
from captrain.records import JsonObject

MET = 1 - 1e-6
TOLD_ENOUGH = 0.5
"""Words are compared by overlap: from here on the outcome was told, if in other words."""
EXCERPT = 160


def milestone_calls(story: Story, values: Vocabulary, kind: Kind) -> Iterator[Finding]:
    """A milestone asks for a look-up, or for a call that changes something."""
    for milestone, score in _reachable(story):
        if "tool" in milestone and not _is_minefield(milestone) and story.toolbox.kind(milestone["tool"]) == kind:
            calls = _calls(story, milestone)
            # A call that was made but is not the one asked for is the matter of `milestone_arguments`.
            lacking = score < MET and not calls
            message = calls[-1].message if calls else story.last
            yield Finding(
                lacking, f"{milestone['tool']} was {'never' if lacking else ''} called", message, (milestone["tool"],)
            )


def milestone_arguments(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """A milestone asks for a call of a tool, and the tool was called."""
    for milestone, score in _reachable(story):
        calls = [] if _is_minefield(milestone) else _calls(story, milestone)
        if calls:
            expected = milestone.get("arguments") or {}
            expectation = f", where {text_of(expected)[:EXCERPT]} was asked for" if expected and score < MET else ""
            wrong = [name for name, value in expected.items() if not same(calls[-1].arguments.get(name), value)]
            yield Finding(score < MET, f"{calls[-1]}{expectation}", calls[-1].message, (calls[-1].tool,), tuple(wrong))


def milestone_states(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """A milestone asks for a state of the records."""
    for milestone, score in _reachable(story):
        if not _is_minefield(milestone) and "tool" not in milestone and "message" not in milestone:
            lacking = score < MET
            message = story.acts[-1].message if story.acts else story.last
            evidence = f"{_state(milestone)} {'not reached' if lacking else 'reached'} ({score:.2f})"
            yield Finding(lacking, evidence, message)


def milestone_words(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """A milestone asks for words to the user."""
    replies = [index for index, message in enumerate(story.messages) if is_reply(message)]
    for milestone, score in _reachable(story):
        if "message" in milestone and not _is_minefield(milestone):
            lacking = score < TOLD_ENOUGH
            judgement = "was not told" if lacking else "was told"
            evidence = f"'{text_of(milestone['message'])[:EXCERPT]}' {judgement} ({score:.2f})"
            yield Finding(lacking, evidence, replies[-1] if replies else story.last)


def minefields(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """A minefield: the task cannot or must not be done, and says which act would show that it was tried."""
    for milestone, score in story.milestones:
        if _is_minefield(milestone):
            acts = _calls(story, milestone) or story.writes
            lacking = score < MET
            act = milestone.get("tool") or _state(milestone)
            message = acts[-1].message if acts else story.last
            yield Finding(
                lacking, f"{act}, which was to be left out, {'happened' if lacking else 'did not happen'}", message
            )


def _reachable(story: Story) -> Iterator[tuple[JsonObject, float]]:
    """The milestones up to the first that was not met."""
    for milestone, score in story.milestones:
        yield milestone, score
        if score < (TOLD_ENOUGH if "message" in milestone else MET) and not _is_minefield(milestone):
            return


def _is_minefield(milestone: JsonObject) -> bool:
    return bool(milestone.get("minefield"))


def _calls(story: Story, milestone: JsonObject) -> list[Act]:
    """The calls of the milestone's tool, those that went through last."""
    return sorted((act for act in story.acts if act.tool == milestone.get("tool")), key=lambda act: not act.failed)


def _state(milestone: JsonObject) -> str:
    namespace, values = text_of(milestone.get("namespace") or "state"), milestone.get("values")
    return f"{namespace} {text_of(values)[:EXCERPT]}" if values else namespace


BY_MILESTONES = {
    "missing_lookup": (partial(milestone_calls, kind="read"),),
    "wrong_argument": (milestone_arguments,),
    "missing_write": (partial(milestone_calls, kind="write"), milestone_states),
    "missing_information": (milestone_words,),
    "undue_compliance": (minefields,),
}
"""The finders of each cause."""
