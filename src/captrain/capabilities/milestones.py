"""What rollouts lack of a benchmark's milestones: states to reach, calls to make, outcomes to tell, acts to leave out.

A benchmark that has no reference calls may say instead what must have happened by the end, as ToolSandbox does. Its
milestones are part of its reference, so an analyst may read them: task data `milestones` is a list, and the score has a
part "milestone 1" for its first entry, 0 to 1. An entry says what is checked: `tool` (and `arguments`) a call,
`message` words to the user, otherwise a state (`namespace`, `values`); `minefield` true marks an act to leave out,
whose part is 0 where it happened. Any of these may be absent.

Milestones build on one another: what comes after an unmet one is not judged, so that one mismatch has one charge.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from captrain.capabilities.alignment import Act, Finding, Story, is_reply, same, text_of

MET = 1 - 1e-6
TOLD = 0.5
"""Words are compared by overlap: from here on the outcome was told, if in other words."""
SHOWN = 160


def needed_calls(story: Story, values: Sequence[str]) -> Iterator[Finding]:
    """A milestone asks for a call of a tool."""
    for milestone, score in _judged(story):
        if "tool" in milestone and not _mine(milestone):
            made = _calls(story, milestone)
            # A call that was made but is not the one asked for is the matter of `call_arguments`.
            lacking = score < MET and not made
            at = made[-1].at if made else story.last
            yield Finding(
                lacking, f"{milestone['tool']} was {'never' if lacking else ''} called", at, (milestone["tool"],)
            )


def call_arguments(story: Story, values: Sequence[str]) -> Iterator[Finding]:
    """A milestone asks for a call of a tool, and the tool was called."""
    for milestone, score in _judged(story):
        made = [] if _mine(milestone) else _calls(story, milestone)
        if made:
            wanted = milestone.get("arguments") or {}
            asked = f", where {text_of(wanted)[:SHOWN]} was asked for" if wanted and score < MET else ""
            wrong = [name for name, value in wanted.items() if not same(made[-1].arguments.get(name), value)]
            yield Finding(score < MET, f"{made[-1]}{asked}", made[-1].at, (made[-1].tool,), tuple(wrong))


def reached_state(story: Story, values: Sequence[str]) -> Iterator[Finding]:
    """A milestone asks for a state of the records."""
    for milestone, score in _judged(story):
        if not _mine(milestone) and "tool" not in milestone and "message" not in milestone:
            lacking = score < MET
            at = story.acts[-1].at if story.acts else story.last
            yield Finding(lacking, f"{_state(milestone)} {'not reached' if lacking else 'reached'} ({score:.2f})", at)


def told_outcome(story: Story, values: Sequence[str]) -> Iterator[Finding]:
    """A milestone asks for words to the user."""
    replies = [at for at, message in enumerate(story.messages) if is_reply(message)]
    for milestone, score in _judged(story):
        if "message" in milestone and not _mine(milestone):
            lacking = score < TOLD
            told = "was not told" if lacking else "was told"
            evidence = f"'{text_of(milestone['message'])[:SHOWN]}' {told} ({score:.2f})"
            yield Finding(lacking, evidence, replies[-1] if replies else story.last)


def withheld_acts(story: Story, values: Sequence[str]) -> Iterator[Finding]:
    """A minefield: the task cannot or must not be done, and says which act would show that it was tried."""
    for milestone, score in story.milestones:
        if _mine(milestone):
            made = _calls(story, milestone) or story.writes
            lacking = score < MET
            what = milestone.get("tool") or _state(milestone)
            at = made[-1].at if made else story.last
            yield Finding(
                lacking, f"{what}, which was to be left out, {'happened' if lacking else 'did not happen'}", at
            )


def _judged(story: Story) -> Iterator[tuple[Mapping[str, Any], float]]:
    """The milestones up to the first that was not met."""
    for milestone, score in story.milestones:
        yield milestone, score
        if score < (TOLD if "message" in milestone else MET) and not _mine(milestone):
            return


def _mine(milestone: Mapping[str, Any]) -> bool:
    return bool(milestone.get("minefield"))


def _calls(story: Story, milestone: Mapping[str, Any]) -> list[Act]:
    """The calls of the milestone's tool, those that went through last."""
    return sorted((act for act in story.acts if act.tool == milestone.get("tool")), key=lambda act: not act.failed)


def _state(milestone: Mapping[str, Any]) -> str:
    namespace, values = text_of(milestone.get("namespace") or "state"), milestone.get("values")
    return f"{namespace} {text_of(values)[:SHOWN]}" if values else namespace
