"""Finders of causes in a rollout beside its reference: what it looks up and changes, calls, says and how it ends.

Each yields one finding for each occasion; which is charged with what is said in `captrain.capabilities.registry`.

A benchmark that has no reference calls may say instead what must have happened by the end, as ToolSandbox does. Its
milestones are part of its reference, so an analyst may read them: task data `milestones` is a list, and the score has a
part "milestone 1" for its first entry, 0 to 1. An entry says what is checked: `tool` (and `arguments`) a call,
`message` words to the user, otherwise a state (`namespace`, `values`); `minefield` true marks an act to leave out,
whose part is 0 where it happened. Any of these may be absent. Milestones build on one another: what comes after an
unmet one is not judged, so that one mismatch has one charge.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cached_property, partial

from captrain.capabilities.alignment import (
    NOT_FOUND,
    Act,
    Finding,
    Kind,
    Story,
    differing,
    handover_of,
    is_malformed,
    is_reply,
    same,
    says,
    text_of,
)
from captrain.records import Milestone

WORD = re.compile(r"\w+")
HANDING_OVER = re.compile(r"\b(transfer|connect|hand)(ring|ing)? you\b", re.IGNORECASE)
COURTESIES = frozenset({"complete", "completed", "done", "false", "no", "none", "ok", "okay", "success", "true", "yes"})
"""Words that tools return and people say without telling anything: no value that a user asks for."""
SHORT = 2
"""Characters of a value that is likely to stand inside another one."""
MET = 1 - 1e-6
TOLD_ENOUGH = 0.5
"""Words are compared by overlap: from here on the outcome was told, if in other words."""
EXCERPT = 160


class Vocabulary:
    """Values that references tell users, to be looked up in texts without trying each: a log has as many as records.

    Args:
        values: distinct, in an order that stays.
    """

    def __init__(self, values: Iterable[str]) -> None:
        self.values = tuple(values)
        self._wordless: list[int] = []
        self._by_word: dict[str, list[int]] = {}
        for place, value in enumerate(self.values):
            word = WORD.search(value.lower())
            (self._by_word.setdefault(word.group(), []) if word else self._wordless).append(place)

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def near(self, text: str) -> list[str]:
        """The values that the text may say, in their order: `says` is false of all others, whose first word it lacks
        as a whole."""
        words = {*WORD.findall(text.lower())}
        places = {place for word in words for place in self._by_word.get(word, ())}
        return [self.values[place] for place in sorted(places.union(self._wordless))]

    @cached_property
    def words(self) -> frozenset[str]:
        """All words of all values, in lower case."""
        return frozenset(word for value in self.values for word in WORD.findall(value.lower()))


def missing_lookups(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference makes a look-up of what it then changes."""
    for pair in story.pairs:
        if not pair.guards or pair.write is None:
            continue
        repeats = [extra for extra in story.extras if extra.record == pair.goal.record]
        for act in (pair.write, *repeats):
            names = [name for name in pair.guards if name in act.record]
            if names:
                lacking = not story.read_before(act, names, pair.lookups)
                evidence = f"{act} without reading the record first" if lacking else f"{act} after reading the record"
                yield Finding(
                    lacking,
                    evidence,
                    act.message,
                    (*sorted({lookup.tool for lookup in pair.lookups}), pair.goal.tool),
                    pair.guards,
                )
    for act, tools in _unread(story):
        evidence = f"{act} without reading the record first, after which the reference changes nothing"
        yield Finding(True, evidence, act.message, (*tools, act.tool), tuple(act.record))


def _unread(story: Story) -> list[tuple[Act, tuple[str, ...]]]:
    """The writes, where the reference only reads, on a record that it reads and the rollout did not; with its tools."""
    unread = []
    for act in story.extras if not story.pairs else []:
        lookups = [lookup for lookup in story.expected if lookup.kind == "read" and lookup.record]
        reads = [lookup for lookup in lookups if same(lookup.record, act.record)]
        if reads and not story.read_before(act, act.record, reads):
            unread.append((act, tuple(sorted({lookup.tool for lookup in reads}))))
    return unread


def records(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference writes on a record, which the user names or not."""
    for pair in story.pairs:
        write, goal = pair.write, pair.goal
        if write is None or not goal.record:
            continue
        # What the user confirms afterwards was not named for the write.
        spoken = story.user_before(write)
        names = [name for name, value in goal.record.items() if name in pair.derived or says(spoken, value)]
        if names:
            compared = [name for name in names if goal.compared is None or name in goal.compared]
            wrong = any(not same(goal.record[name], write.record.get(name)) for name in compared)
            judgement = f"where {goal} was meant" if wrong else "on the record that was meant"
            # To repeat a record that the user has named shows nothing of finding out which one is meant.
            if not wrong and not pair.derived:
                continue
            yield Finding(wrong, f"{write} {judgement}", write.message, (goal.tool,), tuple(names))


def operations(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference writes on a record of which all is known: it needs no look-up, or the look-up was made."""
    for pair in story.pairs:
        write = pair.write
        if write is None or not same(write.record, pair.goal.record):
            continue
        if story.has_looked(pair):
            wrong = write.tool != pair.goal.tool
            evidence = f"{write}, {'where ' if wrong else ''}{pair.goal} was the right operation"
            yield Finding(wrong, evidence, write.message, (pair.goal.tool,))


def missing_writes(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference makes several writes; or one, and nothing was made: one that was shows nothing of making all."""
    missing = [pair.goal for pair in story.pairs if pair.write is None]
    if len(story.pairs) < 2 and not missing:
        return
    evidence = f"{len(story.pairs) - len(missing)} of {len(story.pairs)} operations carried out"
    evidence += f", {missing[0]} left out" if missing else ""
    if not story.writes and (handover := handover_of(story.acts)):
        evidence += f"; {handover.tool} was called instead"
    tools = tuple(pair.goal.tool for pair in story.pairs)
    yield Finding(bool(missing), evidence, story.last, tools)


def values_of_writes(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The reference gives an argument of a write by the right tool a value: the user's words, or one that follows from
    records or policy."""
    for pair in story.pairs:
        write, goal = pair.write, pair.goal
        if write is None or write.tool != goal.tool:
            continue
        differences = differing(goal, write)
        # On a wrong record, or without a look-up, what follows from records follows from the wrong ones or from none.
        follows = same(write.record, goal.record) and story.has_looked(pair)
        for name, value in goal.content.items():
            is_said = says(story.user_before(write), value)
            # What the user confirms afterwards was not said, nor does it follow.
            is_due = is_said or (follows and not says(story.user, value))
            if is_due and (goal.compared is None or name in goal.compared):
                source = "as the user said" if is_said else "which the user did not say"
                text, wrong = text_of(write.content.get(name)), name in differences
                judgement = f"{text} should be" if wrong else "is"
                evidence = f"{write.tool}: {name} {judgement} {text_of(value)}, {source}"
                yield Finding(wrong, evidence, write.message, (write.tool,), (name,))


def extra_writes(story: Story, values: Vocabulary) -> Iterator[Finding]:
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


def declined_requests(story: Story, values: Vocabulary) -> Iterator[Finding]:
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
    """Tell if an extra write was no slip but a decision: the reference leaves its record alone (without a key: makes no
    such write), the assistant had put it to the user, and it was not made without reading its record."""
    goals = [pair.goal for pair in story.pairs]
    alone = all(not same(act.record, goal.record) if act.record else act.tool != goal.tool for goal in goals)
    return alone and story.put_to_user(act) and all(act is not unread_act for unread_act, _ in _unread(story))


def invalid_calls(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """The rollout calls tools, or tries to."""
    for index, message in enumerate(story.messages):
        if is_malformed(message):
            yield Finding(True, "a call that is not well formed, left as text", index)
    for act in story.acts:
        lacking = act.failed
        if lacking:
            # Well formed are also calls that the reference makes, and look-ups in vain of what the user said.
            is_expected = any(call.tool == act.tool and same(call.arguments, act.arguments) for call in story.expected)
            is_miss = act.kind == "read" and says(story.user, act.arguments) and NOT_FOUND.search(text_of(act.result))
            lacking = not is_expected and not is_miss
        outcome = "was refused" if lacking else "was accepted"
        if lacking and act.result is None:
            outcome = "does not fit the schema of its tool, and got no result"
        yield Finding(lacking, f"{act} {outcome}", act.message, (act.tool,))


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
    replies = {index: message["content"] for index, message in enumerate(story.messages) if is_reply(message)}
    for value in story.informs:
        index = story.first_telling(value)
        # A short value is part of many others: it must be told as a whole word.
        if index is not None and len(value) <= SHORT:
            spoken = ((place, m.get("content")) for place, m in enumerate(story.messages) if m["role"] == "assistant")
            index = next((place for place, content in spoken if says(text_of(content or ""), value)), None)
        evidence = f"{value} was {'not told' if index is None else 'told'}"
        yield Finding(index is None, evidence, story.last if index is None else index)
    for value in story.informed(values.near(story.expected_final or "")):
        if value.strip(".! ").lower() not in COURTESIES:
            tellings = [index for index, content in replies.items() if says(content, value)]
            evidence = f"{value} was {'told' if tellings else 'not told'}"
            yield Finding(not tellings, evidence, tellings[0] if tellings else story.last)


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
    words, expected = ({*WORD.findall(text.lower())} for text in (story.final, story.expected_final))
    missing = sorted(expected - words - values.words)
    evidence = f"last message lacks {', '.join(missing)}" if missing else "last message has all words of the reference"
    yield Finding(bool(missing), evidence, story.last)


def milestone_calls(story: Story, values: Vocabulary, kind: Kind) -> Iterator[Finding]:
    """A milestone asks for a look-up, or for a call that changes something."""
    for milestone, score in _reachable(story):
        if milestone.tool is not None and story.toolbox.kind(milestone.tool) == kind:
            calls = _calls(story, milestone)
            # A call that was made but is not the one asked for is the matter of `milestone_arguments`.
            lacking = score < MET and not calls
            evidence = f"{milestone.tool} was {'never' if lacking else ''} called"
            yield Finding(lacking, evidence, calls[-1].message if calls else story.last, (milestone.tool,))


def milestone_arguments(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """A milestone asks for a call of a tool, and the tool was called."""
    for milestone, score in _reachable(story):
        for call in _calls(story, milestone)[-1:]:
            expected = milestone.arguments
            expectation = f", where {text_of(expected)[:EXCERPT]} was asked for" if expected and score < MET else ""
            wrong = [name for name, value in expected.items() if not same(call.arguments.get(name), value)]
            yield Finding(score < MET, f"{call}{expectation}", call.message, (call.tool,), tuple(wrong))


def milestone_states(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """A milestone asks for a state of the records."""
    for milestone, score in _reachable(story):
        if milestone.tool is None and milestone.message is None:
            evidence = f"{_state(milestone)} {'not reached' if score < MET else 'reached'} ({score:.2f})"
            yield Finding(score < MET, evidence, story.acts[-1].message if story.acts else story.last)


def milestone_words(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """A milestone asks for words to the user."""
    replies = [index for index, message in enumerate(story.messages) if is_reply(message)]
    for milestone, score in _reachable(story):
        if milestone.message is not None:
            lacking = score < TOLD_ENOUGH
            judgement = "was not told" if lacking else "was told"
            evidence = f"'{text_of(milestone.message)[:EXCERPT]}' {judgement} ({score:.2f})"
            yield Finding(lacking, evidence, replies[-1] if replies else story.last)


def minefields(story: Story, values: Vocabulary) -> Iterator[Finding]:
    """A minefield: the task cannot or must not be done, and says which act would show that it was tried."""
    for milestone, score in story.milestones:
        if milestone.is_minefield:
            acts, act = _calls(story, milestone) or story.writes, milestone.tool or _state(milestone)
            evidence = f"{act}, which was to be left out, {'happened' if score < MET else 'did not happen'}"
            yield Finding(score < MET, evidence, acts[-1].message if acts else story.last)


def _reachable(story: Story) -> Iterator[tuple[Milestone, float]]:
    """The milestones up to the first that was not met, without minefields."""
    for milestone, score in story.milestones:
        if not milestone.is_minefield:
            yield milestone, score
            if score < (MET if milestone.message is None else TOLD_ENOUGH):
                return


def _calls(story: Story, milestone: Milestone) -> list[Act]:
    """The calls of the milestone's tool, those that went through last."""
    return sorted((act for act in story.acts if act.tool == milestone.tool), key=lambda act: not act.failed)


def _state(milestone: Milestone) -> str:
    namespace, values = text_of(milestone.namespace or "state"), milestone.values
    return f"{namespace} {text_of(values)[:EXCERPT]}" if values else namespace


BY_MILESTONES = {
    "missing_lookup": (partial(milestone_calls, kind="read"),),
    "wrong_argument": (milestone_arguments,),
    "missing_write": (partial(milestone_calls, kind="write"), milestone_states),
    "missing_information": (milestone_words,),
    "undue_compliance": (minefields,),
}
"""The finders of each cause."""
