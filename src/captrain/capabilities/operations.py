"""How a rollout can go wrong in what it changes, beside its reference: finders of the families of writes.

Each yields one finding for each occasion on which a rollout exercised its family; which is charged with what is said in
`captrain.capabilities.families`.
"""

from collections.abc import Iterator

from captrain.capabilities.alignment import Act, Finding, Story, differing, handover_of, same, says, text_of
from captrain.capabilities.vocabulary import Vocabulary


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
        if not story.writes and (handover := handover_of(story.acts)):
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
