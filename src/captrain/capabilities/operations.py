"""Finders of causes in what a rollout looks up and changes, beside its reference.

Each yields one finding for each occasion; which is charged with what is said in `captrain.capabilities.registry`.
"""

from collections.abc import Iterator

from captrain.capabilities.alignment import Act, Finding, Pair, Story, differing, handover_of, same, says, text_of
from captrain.capabilities.vocabulary import Vocabulary


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
    """The reference gives an argument of a write a value: the user's words, or one that follows from records or
    policy."""
    for pair, write, name, wrong in _contents(story):
        value = pair.goal.content[name]
        is_said = says(story.user_before(write), value)
        # On a wrong record, or without a look-up, what follows from records follows from the wrong ones or from none;
        # and so does a value that the user confirms afterwards.
        follows = same(write.record, pair.goal.record) and story.has_looked(pair)
        if is_said or (follows and not says(story.user, value)):
            source = "as the user said" if is_said else "which the user did not say"
            text = text_of(write.content.get(name))
            judgement = f"{text} should be" if wrong else "is"
            evidence = f"{write.tool}: {name} {judgement} {text_of(value)}, {source}"
            yield Finding(wrong, evidence, write.message, (write.tool,), (name,))


def _contents(story: Story) -> Iterator[tuple[Pair, Act, str, bool]]:
    """The compared content arguments of writes by the right tool: pair, write, name, and whether it has another
    value."""
    for pair in story.pairs:
        if pair.write is not None and pair.write.tool == pair.goal.tool:
            wrong = differing(pair.goal, pair.write)
            for name in pair.goal.content:
                if pair.goal.compared is None or name in pair.goal.compared:
                    yield pair, pair.write, name, name in wrong


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
