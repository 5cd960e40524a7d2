"""Occasions: places in a rollout where a cause of failure could show. Labels are made from them.

Each function yields the occasions of one cause. Its docstring says when an occasion arises. An occasion is `lacking` if
the rollout went wrong there. Occasions ignore whether the rollout passed.

Each mismatch with the reference counts against one cause only. A write on a wrong record does not also count as a
missing write or a wrong argument value. Another operation on the right record is a wrong decision.

A benchmark without reference calls may have milestones instead (`captrain.records.Milestone`). Milestones build on one
another. Nothing after the first unmet milestone is judged, so that one mismatch counts once.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from captrain.capabilities.calls import Call, handover_in
from captrain.capabilities.text import (
    NOT_FOUND,
    is_malformed,
    is_reply,
    same,
    says,
    squeezed,
    text_of,
)
from captrain.capabilities.toolbox import CHANGES
from captrain.capabilities.view import RolloutView
from captrain.records import Milestone

WORD = re.compile(r"\w+")
HANDING_OVER = re.compile(r"\b(transfer|connect|hand)(ring|ing)? you\b", re.IGNORECASE)
COURTESIES = frozenset({"complete", "completed", "done", "false", "no", "none", "ok", "okay", "success", "true", "yes"})
"""Words that tools return and people say without giving information."""
MET = 1 - 1e-6
TOLD_ENOUGH = 0.5
"""Minimum score of a message milestone that counts as told. Its words are compared by overlap."""
EXCERPT = 160


class Occasion(NamedTuple):
    """One place where a rollout could show a cause.

    Attributes:
        lacking: whether the rollout went wrong there.
        evidence: what happened, in words.
        message: index of the message.
        tools: the tools in question.
        arguments: the arguments in question.
    """

    lacking: bool
    evidence: str
    message: int
    tools: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


class Vocabulary:
    """Values that references tell users, indexed by first word because a log may have thousands.

    Args:
        values: distinct, in order.
    """

    def __init__(self, values: Iterable[str]) -> None:
        self.values = tuple(values)
        self._wordless: list[int] = []
        self._by_word: dict[str, list[int]] = {}
        for place, value in enumerate(self.values):
            word = WORD.search(squeezed(value))
            (self._by_word.setdefault(word.group(), []) if word else self._wordless).append(place)

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def near(self, text: str) -> list[str]:
        """Values whose first word occurs in the text, in order. The text cannot contain any other value."""
        words = {*WORD.findall(squeezed(text))}
        places = {place for word in words for place in self._by_word.get(word, ())}
        return [self.values[place] for place in sorted(places.union(self._wordless))]

    @cached_property
    def words(self) -> frozenset[str]:
        """All words of all values, in lower case."""
        return frozenset(word for value in self.values for word in WORD.findall(squeezed(value)))


NO_VALUES = Vocabulary(())
"""Where no reference tells users values."""


def missing_lookups(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises for each write on a record that the reference reads first.

    Also arises, as lacking, if the agent did nothing and the reference starts with a read.
    """
    if view.is_idle:
        yield Occasion(
            True,
            f"the agent did nothing; the reference starts with {view.expected[0]}",
            view.last,
            (view.expected[0].tool,),
        )
    for pair in view.pairs:
        if not pair.guards or pair.write is None:
            continue
        repeats = [extra for extra in view.extras if extra.record == pair.goal.record]
        for act in (pair.write, *repeats):
            names = [name for name in pair.guards if name in act.record]
            if names:
                lacking = not view.read_before(act, names, pair.lookups)
                evidence = f"{act} without reading the record first" if lacking else f"{act} after reading the record"
                yield Occasion(
                    lacking,
                    evidence,
                    act.message,
                    (*sorted({lookup.tool for lookup in pair.lookups}), pair.goal.tool),
                    pair.guards,
                )
    for act, tools in _unread(view):
        evidence = f"{act} without reading the record first; the reference changes nothing"
        yield Occasion(True, evidence, act.message, (*tools, act.tool), tuple(act.record))


def _unread(view: RolloutView) -> list[tuple[Call, tuple[str, ...]]]:
    """Extra writes on a record that the reference reads and the rollout did not read, with the reading tools.

    Empty if the reference itself writes.
    """
    unread = list[tuple[Call, tuple[str, ...]]]()
    lookups = [lookup for lookup in view.expected if lookup.kind == "read" and lookup.record]
    if view.pairs:
        return unread
    for act in view.extras:
        reads = [lookup for lookup in lookups if same(lookup.record, act.record)]
        if reads and not view.read_before(act, act.record, reads):
            unread.append((act, tuple(sorted({lookup.tool for lookup in reads}))))
    return unread


def records(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises where the reference writes on a record that the user named, or that the agent had to find out."""
    for pair in view.pairs:
        write, goal = pair.write, pair.goal
        if write is None or not goal.record:
            continue
        # A record that the user only confirms afterwards was not named for the write.
        spoken = view.user_before(write.message)
        names = [name for name, value in goal.record.items() if name in pair.derived or says(spoken, value)]
        if names:
            compared = [name for name in names if name in goal.names]
            wrong = any(not same(goal.record[name], write.record.get(name)) for name in compared)
            judgement = f"instead of {goal}" if wrong else "on the right record"
            # Repeating a record that the user named does not show that the agent can find a record.
            if not wrong and not pair.derived:
                continue
            yield Occasion(wrong, f"{write} {judgement}", write.message, (goal.tool,), tuple(names))


def operations(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises for each write on the right record, if the look-up that it needs was made."""
    for pair in view.pairs:
        write = pair.write
        if write is None or not same(write.record, pair.goal.record):
            continue
        if view.has_looked(pair):
            wrong = write.tool != pair.goal.tool
            evidence = f"{write} instead of {pair.goal}" if wrong else f"{write} uses the right operation"
            yield Occasion(wrong, evidence, write.message, (pair.goal.tool,))


def missing_writes(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises if the reference makes several writes, or if its only write is missing.

    A single write that was made does not show completeness.
    """
    missing = [pair.goal for pair in view.pairs if pair.write is None]
    if view.is_idle or (len(view.pairs) < 2 and not missing):
        return
    evidence = f"{len(view.pairs) - len(missing)} of {len(view.pairs)} operations carried out"
    evidence += f", {missing[0]} left out" if missing else ""
    if not view.writes and (handover := handover_in(view.acts)):
        evidence += f"; {handover.tool} was called instead"
    tools = tuple(pair.goal.tool for pair in view.pairs)
    yield Occasion(bool(missing), evidence, view.last, tools)


def values_of_writes(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises if the right tool was called, for each argument value that the user said or that follows from records."""
    for pair in view.pairs:
        write, goal = pair.write, pair.goal
        if write is None or write.tool != goal.tool:
            continue
        differences = write.differing(goal)
        # On a wrong record, or without a look-up, a value that follows from records cannot be right.
        follows = same(write.record, goal.record) and view.has_looked(pair)
        for name, value in goal.content.items():
            is_said = says(view.user_before(write.message), value)
            # A value that the user only confirms afterwards was not said, and does not follow.
            is_due = is_said or (follows and not says(view.user, value))
            if is_due and (name in goal.names):
                source = "as the user said" if is_said else "which the user did not say"
                text, wrong = text_of(write.content.get(name)), name in differences
                judgement = f"{text} should be" if wrong else "is"
                evidence = f"{write.tool}: {name} {judgement} {text_of(value)}, {source}"
                yield Occasion(wrong, evidence, write.message, (write.tool,), (name,))


def extra_writes(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises for each write of the rollout. Decisions and writes on unread records count for other causes."""
    unread = [act for act, _ in _unread(view)]
    for act in view.extras:
        if act not in unread and not _overruled(view, act) and not _forbidden(view, act):
            twice = sum(write.tool == act.tool and same(write.record, act.record) for write in view.writes) > 1
            evidence = f"{act} was {'done twice' if twice else 'not in the reference'}"
            yield Occasion(True, evidence, act.message, (act.tool,), tuple(act.arguments))
    for pair in view.pairs:
        if pair.write is not None:
            yield Occasion(False, f"{pair.write} was asked for", pair.write.message, (pair.write.tool,))


def declined_requests(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises if the agent chose to make a write that the reference leaves undone, or if nobody changes anything."""
    if not view.rollout.reference:
        return
    for act in view.extras:
        if _forbidden(view, act):
            evidence = f"{act} was called; the reference does not call it"
            yield Occasion(True, evidence, act.message, (act.tool,), tuple(act.arguments))
    if not view.pairs and not view.writes:
        yield Occasion(False, "nothing was changed, as in the reference", view.last)


def _overruled(view: RolloutView, act: Call) -> bool:
    """Return whether the reference reads the write's record and then uses other operations on it."""
    pairs = [pair for pair in view.pairs if same(pair.goal.record, act.record)]
    return any(pair.guards for pair in pairs) and act.tool not in {pair.goal.tool for pair in pairs}


def _forbidden(view: RolloutView, act: Call) -> bool:
    """Return whether an extra write was a decision and not a slip. All of these must hold:

    - The reference does not write on its record. For a write without a key: the reference does not call its tool.
    - The assistant had proposed it to the user, or the user had asked for it.
    - Its record was read first if the reference reads it.
    """
    goals = [pair.goal for pair in view.pairs]
    is_alone = all(not same(act.record, goal.record) if act.record else act.tool != goal.tool for goal in goals)
    is_decision = view.put_to_user(act) or view.is_wished(act)
    return is_alone and is_decision and all(act is not peer for peer, _ in _unread(view))


def invalid_calls(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises for each tool call and each malformed call."""
    for index, message in enumerate(view.messages):
        if is_malformed(message):
            yield Occasion(True, "a malformed call, left as text", index)
    for act in view.acts:
        lacking = act.failed
        if lacking:
            # A refused call is not a mistake if the reference makes it, or if it looks up a value that the user stated.
            is_expected = any(call.tool == act.tool and same(call.arguments, act.arguments) for call in view.expected)
            is_miss = act.kind == "read" and says(view.user, act.arguments) and NOT_FOUND.search(text_of(act.result))
            lacking = not is_expected and not is_miss
        outcome = "was refused" if lacking else "was accepted"
        if lacking and act.result is None:
            outcome = "does not fit the schema of its tool, and got no result"
        yield Occasion(lacking, f"{act} {outcome}", act.message, (act.tool,))


def last_words(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises at the end of each rollout without a transfer to a human."""
    if handover_in(view.acts) is None and not view.is_idle:
        cut = view.final is None
        yield Occasion(cut, "is cut off without a last message" if cut else "ends with a message", view.last)


def hand_over(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises if the reference makes no transfer to a human and the rollout made all its writes.

    If a write is missing, `missing_writes` counts it.
    """
    handover, is_due = handover_in(view.acts), handover_in(view.expected) is not None
    is_left_out = any(pair.write is None for pair in view.pairs)
    if is_due or is_left_out or not (view.expected_final or view.pairs):
        return
    evidence = f"ends with {handover}; the reference makes no transfer" if handover else "no transfer to a human"
    yield Occasion(handover is not None, evidence, handover.message if handover else view.last)


def escalation(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises if the reference transfers to a human. An offer counts if the user then leaves before the transfer."""
    handover, due = handover_in(view.acts), handover_in(view.expected)
    if due is not None:
        offered = HANDING_OVER.search(view.final or "") and view.messages[-1]["role"] == "user"
        evidence = f"{due} {'was made' if handover else 'was offered' if offered else 'is missing'}"
        yield Occasion(not handover and not offered, evidence, handover.message if handover else view.last, (due.tool,))


def told_values(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises for each value that the reference tells the user or lists as required."""
    replies = {index: view.text(index) for index in view.replies()}
    for value in view.informs:
        index = view.first_telling(value)
        evidence = f"{value} was {'not told' if index is None else 'told'}"
        yield Occasion(index is None, evidence, view.last if index is None else index)
    for value in view.told_by_reference(values.near(view.expected_final or "")):
        if value.strip(".! ").lower() not in COURTESIES:
            tellings = [index for index, content in replies.items() if says(content, value)]
            evidence = f"{value} was {'told' if tellings else 'not told'}"
            yield Occasion(not tellings, evidence, tellings[0] if tellings else view.last)


def first_question(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises if the reference asks the user something before it acts."""
    if len(view.rollout.reference) < 2 or not is_reply(view.rollout.reference[0]):
        return
    roles = [message["role"] for message in view.messages]
    # An assistant may greet before the user has spoken: that is no question.
    turns = [index for index, role in enumerate(roles) if role == "assistant" and "user" in roles[:index]]
    start = turns[0] if turns else view.last
    has_asked = is_reply(view.messages[start]) and roles[start + 1 : start + 2] == ["user"]
    evidence = "asked the user first" if has_asked else "acted or closed without asking first"
    yield Occasion(not has_asked, evidence, start)


def reply_wording(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises if rollout and reference both end with a message.

    Wording is not judged if a value was not told: `told_values` counts that.
    """
    if view.final is None or view.expected_final is None:
        return
    if any(occasion.lacking for occasion in told_values(view, values)):
        return
    words, expected = ({*WORD.findall(text.lower())} for text in (view.final, view.expected_final))
    missing = sorted(expected - words - values.words)
    evidence = f"last message lacks {', '.join(missing)}" if missing else "last message has all words of the reference"
    yield Occasion(bool(missing), evidence, view.last)


def reads_due(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises for each look-up of the reference."""
    for goal in view.expected:
        if goal.kind == "read":
            yield Occasion(False, f"{goal} is due", view.last, (goal.tool,))


def writes_due(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises for each write of the reference."""
    for pair in view.pairs:
        yield Occasion(False, f"{pair.goal} is due", view.last, (pair.goal.tool,))


def calls(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises for each call of the rollout."""
    for act in view.acts:
        yield Occasion(False, f"{act} was called", act.message, (act.tool,))


def milestone_reads(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises for each milestone that requires a look-up."""
    return _milestone_calls(view, ("read",))


def milestone_writes(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises for each milestone that requires a write."""
    return _milestone_calls(view, CHANGES)


def _milestone_calls(view: RolloutView, kinds: Collection[str]) -> Iterator[Occasion]:
    for milestone, score in _reachable(view):
        if milestone.tool is not None and view.toolbox.kind(milestone.tool) in kinds:
            calls = _calls(view, milestone)
            # A call with other arguments is left to `milestone_arguments`.
            lacking = score < MET and not calls
            evidence = f"{milestone.tool} was {'never ' * lacking}called"
            yield Occasion(lacking, evidence, calls[-1].message if calls else view.last, (milestone.tool,))


def milestone_arguments(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises for each milestone that requires a call, if its tool was called."""
    for milestone, score in _reachable(view):
        for call in _calls(view, milestone)[-1:]:
            expected = milestone.arguments
            expectation = f"; the milestone expects {text_of(expected)[:EXCERPT]}" if expected and score < MET else ""
            wrong = [name for name, value in expected.items() if not same(call.arguments.get(name), value)]
            yield Occasion(score < MET, f"{call}{expectation}", call.message, (call.tool,), tuple(wrong))


def milestone_states(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises for each milestone that requires a state of the records."""
    for milestone, score in _reachable(view):
        if milestone.tool is None and milestone.message is None:
            evidence = f"{_state(milestone)} {'not reached' if score < MET else 'reached'} ({score:.2f})"
            yield Occasion(score < MET, evidence, view.acts[-1].message if view.acts else view.last)


def milestone_words(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises for each milestone that requires a message to the user."""
    replies = view.replies()
    for milestone, score in _reachable(view):
        if milestone.message is not None:
            lacking = score < TOLD_ENOUGH
            judgement = "was not told" if lacking else "was told"
            evidence = f"'{text_of(milestone.message)[:EXCERPT]}' {judgement} ({score:.2f})"
            yield Occasion(lacking, evidence, replies[-1] if replies else view.last)


def minefields(view: RolloutView, values: Vocabulary) -> Iterator[Occasion]:
    """Arises for each minefield: a milestone that names an act which the agent must not do."""
    for milestone, score in view.milestones:
        if milestone.is_minefield:
            acts, act = _calls(view, milestone) or view.writes, milestone.tool or _state(milestone)
            evidence = f"the task forbids {act}, which {'happened' if score < MET else 'did not happen'}"
            yield Occasion(score < MET, evidence, acts[-1].message if acts else view.last)


def _reachable(view: RolloutView) -> Iterator[tuple[Milestone, float]]:
    """The milestones up to and including the first unmet milestone, without minefields."""
    for milestone, score in view.milestones:
        if not milestone.is_minefield:
            yield milestone, score
            if score < (MET if milestone.message is None else TOLD_ENOUGH):
                return


def _calls(view: RolloutView, milestone: Milestone) -> list[Call]:
    """The calls of the milestone's tool: failed calls first, then successful ones."""
    return sorted((act for act in view.acts if act.tool == milestone.tool), key=lambda act: not act.failed)


def _state(milestone: Milestone) -> str:
    namespace, values = text_of(milestone.namespace or "state"), milestone.values
    return f"{namespace} {text_of(values)[:EXCERPT]}" if values else namespace
