"""What a rollout changed beyond its reference, charged to whoever wanted it: the user, its script, or nobody."""

import re
from collections.abc import Iterator

from captrain.capabilities import SIMULATOR, Act, differing, leaves, same, says, text_of
from captrain.diagnosis.book import objects
from captrain.diagnosis.case import Case, is_named, plain
from captrain.diagnosis.cause import Cause, quoted
from captrain.diagnosis.clauses import violations
from captrain.diagnosis.omissions import SENTENCE, stems_of

ACCOUNT = re.compile(r"(?:user|customer|account|client|member|patient|employee)_?id")
"""Arguments that say who somebody is, not what is to be done."""
LATER = re.compile(r"\b(?:later|yourself|another time|next time)\b")
"""Words with which a script leaves something to the user itself."""
SETTING = re.compile(r"modify|update|set|change")
"""Verbs of tools that come to the same when they are called twice."""


def extra_writes(case: Case) -> Iterator[Cause]:
    """A write that the reference does not make: what the script makes the user ask for and nobody should do; what the
    user asked for without the script; the same twice, or several at once; or for nothing."""
    story = case.story
    forbidden = [violation.act for violation in violations(story.writes, case.wishes, case.setting)]
    apart = [pair.write for pair in story.pairs if pair.write and case.is_apart(pair)]
    for act in [*story.extras, *apart] if case.is_compared else ():
        is_of_no_account = act.tool in case.setting.idle or _is_idle(case, act) or _is_inward(case, act)
        if act in forbidden or act in case.unread() or is_of_no_account:
            continue
        # What is done to a record after a breach on it goes on with the breach.
        if act.record and any(same(breach.record, act.record) for breach in forbidden if breach.message <= act.message):
            continue
        values = _distinct(case, act)
        request = case.requested(values, act.message)
        scripted = [value for value in values if says(case.script, value)]
        is_alone = not any(_is_alike(act, pair.goal) for pair in story.pairs)
        is_requested = case.requested(scripted if case.script else values, act.message) is not None
        is_wished = (is_requested and not story.pairs) or (request is None and _is_wished(case, act))
        if is_alone and is_wished:
            evidence = f"{act}, as the user asked, where the reference leaves this as it is"
            yield Cause("undue_compliance", case.proposal(act), evidence, "medium", False, (act.tool,))
            continue
        if request is not None and case.script and not scripted:
            evidence = f"the user asked for {act}, which its script does not: {quoted(case.text(request))}"
            yield Cause(SIMULATOR, request, evidence, "medium", False)
        message, evidence = _excess(case, act)
        yield Cause("extra_write", message, evidence, "high", False, (act.tool,), tuple(act.arguments))


def _is_idle(case: Case, act: Act) -> bool:
    """Whether a write sets what another one, which the reference makes, has set."""
    twins = [pair.write for pair in case.story.pairs if pair.write and not differing(pair.goal, pair.write)]
    return SETTING.match(act.tool) is not None and any(
        (twin.tool, twin.arguments) == (act.tool, act.arguments) for twin in twins
    )


def _is_inward(case: Case, act: Act) -> bool:
    """Whether a call treats no record, and mostly what neither the user nor another tool ever named: a note or a step
    of the agent's harness."""
    if act.record:
        return False
    results = "\n".join(text_of(call.result) for call in case.story.acts if call.tool != act.tool)
    values = {*leaves(act.arguments)}
    mentions = [value for value in values if says(f"{case.story.user}\n{results}", value)]
    return 2 * len(mentions) < len(values)


def _is_alike(act: Act, goal: Act) -> bool:
    """Whether a call of the reference treats what the write treats."""
    return same(goal.record, act.record) if act.record else goal.tool == act.tool


def _is_wished(case: Case, act: Act) -> bool:
    """Whether the user asks for what a write does, and the reference does no such thing at all, or not to this."""
    stems = re.compile(stems_of(act.tool))
    if not stems.search(plain(case.story.user)):
        return False
    if not case.script:
        # Beside other writes of the reference it may be no more than what the user comes to ask for on the way.
        return not case.story.pairs
    sentences = [plain(part) for part in SENTENCE.split(case.script)]
    wishes = [part for part in sentences if stems.search(part) and not LATER.search(part)]
    if any(pair.goal.tool == act.tool for pair in case.story.pairs):
        # Where the reference does the same elsewhere, the script has to name what is treated here.
        return any(is_named(label, part) for label in _items(case, act) for part in wishes)
    return bool(wishes)


def _items(case: Case, act: Act) -> set[str]:
    """The names of the things in the record of a write."""
    reads = [read for read in case.story.acts if read.kind == "read" and act.record and same(act.record, read.record)]
    return {
        str(record["name"]) for read in reads for record in objects(read.result) if isinstance(record.get("name"), str)
    }


def _excess(case: Case, act: Act) -> tuple[int, str]:
    """Where a write was one too many, and why."""
    same_tool = [write for write in case.story.writes if write.tool == act.tool]
    twins = [write for write in same_tool if write.arguments == act.arguments]
    parallel = [write for write in same_tool if write.message == act.message and same(write.record, act.record)]
    if len(twins) > 1:
        return twins[1].message, f"{act} was made {len(twins)} times"
    if len(parallel) > 1:
        return act.message, f"{len(parallel)} calls of {act.tool} on one record at once, unlike each other"
    return act.message, f"{act}, which the reference does not make"


def _distinct(case: Case, act: Act) -> list[str]:
    """The values of a write that tell it from the calls of the reference; a bare number or a yes may be anything."""
    due = {leaf for goal in case.story.expected for leaf in leaves(goal.arguments)}
    content = {name: value for name, value in act.arguments.items() if not ACCOUNT.fullmatch(name)}
    values = [leaf for leaf in leaves(content) if leaf not in due and not leaf.replace(".", "").isdigit()]
    return [value for value in values if len(value) > 3]
