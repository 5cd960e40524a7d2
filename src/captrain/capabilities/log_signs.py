"""Signs of causes in a whole rollout, whatever a repair would change: loops, policy, claims, inventions, milestones.

Each yields the messages where a cause shows, with the evidence and the tools in question.
"""

import json
import re
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile

from captrain.capabilities.calls import Call
from captrain.capabilities.clauses import unproven_writes, violations
from captrain.capabilities.edit_signs import REPEATS
from captrain.capabilities.faults import slip_of
from captrain.capabilities.text import (
    BLANK,
    CLAIM,
    DENIAL,
    DISCLAIMER,
    EXAMPLE,
    SENTENCE,
    STANDING,
    asks_consent,
    identifiers_in,
    is_identifier,
    is_malformed,
    plain,
    quoted,
    same,
    says,
    text_of,
)
from captrain.capabilities.view import RolloutView

WRITES = 4
"""So many equal writes in a row are a loop; fewer are writes too many."""
SHORT = 60
"""Characters of a text that may be said again."""
REASONING = re.compile(r"calculate|compute|convert|estimate|think")
"""Tools that look nothing up."""
LogSign = tuple[int, str, tuple[str, ...]]
"""The message where a cause shows, the evidence, and the tools in question."""


def slipped(view: RolloutView) -> Iterator[LogSign]:
    """The simulated user failed."""
    if (slip := slip_of(view.rollout)) is not None:
        yield *slip, ()


def withheld(view: RolloutView) -> Iterator[LogSign]:
    """The user denies having an identifier that its script gives, and nothing was changed for want of it."""
    codes = [code for code in identifiers_in(view.facts.script, 5) if "_" in code and not says(view.user, code)]
    arguments = [text_of(act.arguments) for act in view.acts]
    if not codes or view.writes or any(says(text, code) for text in arguments for code in codes):
        return
    for place in [place for place in view.users() if DENIAL.search(plain(view.text(place)))][:1]:
        yield place, f"the user keeps {min(codes)} of its script to itself: {quoted(view.text(place))}", ()


def loops(view: RolloutView) -> Iterator[LogSign]:
    """The same call again and again without a word of the user between, or the same words.

    A loop that came to an end cost only time.
    """
    is_cut = not view.facts.ending and bool(view.messages) and view.messages[-1]["role"] != "assistant"
    if view.goals and not is_cut and all(edit.kind != "end" for edit in view.repair.edits):
        return
    streaks, turns = list[list[Call]](), view.users()
    for act in view.acts:
        last = streaks[-1][-1] if streaks else None
        is_same = last is not None and (last.tool, last.arguments) == (act.tool, act.arguments)
        if last is not None and is_same and not any(last.message < turn < act.message for turn in turns):
            streaks[-1].append(act)
        else:
            streaks.append([act])
    for streak in streaks:
        if len(streak) >= (REPEATS if streak[0].kind != "write" else WRITES):
            end = f", until {view.ending}" if streak[-1] is view.acts[-1] and view.ending else ""
            evidence = f"{streak[0]} was called {len(streak)} times in a row with the same arguments{end}"
            yield streak[1].message, evidence, (streak[0].tool,)
    # Short words are a courtesy, unless they follow each other without a new call between.
    texts, again, previous = dict[str, list[int]](), Counter[str](), -1
    steps = sorted(peers[0].message for peers in view.equal_calls)
    for place in view.replies(view.handover.message if view.handover else None):
        text = view.text(place).strip()
        places = texts.setdefault(text, [])
        again[text] += places[-1:] == [previous] and bisect(steps, previous) == bisect(steps, place)
        places.append(place)
        previous = place
    for text, places in texts.items():
        if len(places) > REPEATS and (len(text) >= SHORT or again[text] >= REPEATS):
            yield places[1], f"the same words {len(places)} times: {quoted(text)}", ()


def forbidden_writes(view: RolloutView) -> Iterator[LogSign]:
    """A write that a clause of the policy forbids, and that the reference does not make."""
    goals = [act for act in view.expected if act.kind == "write"]
    for violation in violations(view.writes, view.wishes, view.context):
        act = violation.act
        if violation.clause.breach == "undue_compliance" and not any(act.equals(goal) for goal in goals):
            yield view.proposal(act), str(violation), (act.tool,)
    # A write was put to the user, and then refused for what the policy says of its record, which nothing else treats.
    treated = [act.record for act in (*goals, *view.writes)]
    for act in [act for act in view.acts if act.kind == "write" and act.failed and act.record]:
        proposal = view.proposal(act)
        is_put = proposal < act.message and asks_consent(view.text(proposal))
        if is_put and not any(same(act.record, record) for record in treated):
            for violation in violations([act], view.wishes, view.context):
                if violation.clause.breach == "undue_compliance":
                    yield proposal, str(violation), (act.tool,)
                    return


def forbidden_values(view: RolloutView) -> Iterator[LogSign]:
    """A value of a write that a clause of the policy forbids, and that the reference does not have."""
    goals = [act for act in view.expected if act.kind == "write"]
    for violation in violations(view.writes, view.wishes, view.context):
        act = violation.act
        if violation.clause.breach == "wrong_argument" and not any(act.equals(goal) for goal in goals):
            yield act.message, str(violation), (act.tool,)


def _unread_writes(view: RolloutView) -> Iterator[tuple[Call, int | None]]:
    """Writes on records that the reference reads first and the rollout did not, each with the user's claim before."""
    for act in view.writes:
        places = [goal.place for goal in view.expected if goal.kind == "write" and goal.tool == act.tool]
        reads = [goal for goal in view.expected[: places[-1] if places else None] if goal.kind == "read"]
        due = {(name, text_of(value)) for goal in reads for name, value in goal.record.items()}
        names = [name for name, value in act.record.items() if (name, text_of(value)) in due]
        # A log may have folded several turns into one message: its look-ups came before its writes.
        folded = [read.record for read in view.acts if read.message == act.message and read.kind == "read"]
        is_read = all(any(record.get(name) == act.record[name] for record in folded) for name in names)
        if not is_read and not view.read_before(act, names):
            yield act, next((i for i in view.users(act.message) if CLAIM.search(plain(view.text(i)))), None)


def written_on_claim(view: RolloutView) -> Iterator[LogSign]:
    """A write on the user's word, whose record was never read."""
    for act, claim in _unread_writes(view):
        if claim is not None:
            evidence = f"{act} on the user's word, the record was never read: {quoted(view.text(claim))}"
            yield view.proposal(act), evidence, (act.tool,)


def written_unread(view: RolloutView) -> Iterator[LogSign]:
    """A write whose record was never read."""
    for act, claim in _unread_writes(view):
        if claim is None:
            yield act.message, f"{act} without reading the record first", (act.tool,)


def unproven(view: RolloutView, *, is_claimed: bool) -> Iterator[LogSign]:
    """A clause asks for a result that shows something before a write, and none does; whether the user claimed it."""
    for violation, claimed in unproven_writes(view.writes, view.acts, view.wishes, view.context):
        if claimed == is_claimed:
            act = violation.act
            evidence = f'{act}, and {violation.reason}; the policy says "{violation.sentence}"'
            yield view.proposal(act), evidence, (act.tool,)


def _answer_unread(view: RolloutView) -> int | None:
    """The first answer of a rollout without any look-up that left something undone, where the reference looks up."""
    answers = [place for place in view.replies() if place > 2 and view.users(place)]
    is_due = not view.acts and [act.kind for act in view.expected[:1]] == ["read"]
    return answers[0] if answers and is_due and view.is_lacking else None


def answered_on_claim(view: RolloutView) -> Iterator[LogSign]:
    """Something was answered on the user's word, without a single look-up."""
    place = _answer_unread(view)
    if place is not None and any(CLAIM.search(plain(view.text(user))) for user in view.users(place)):
        yield place, f"answered on the user's word, without a single look-up: {quoted(view.text(place))}", ()


def answered_unread(view: RolloutView) -> Iterator[LogSign]:
    """Something was answered without a single look-up."""
    if (place := _answer_unread(view)) is not None:
        yield place, "no look-up was made at all", ()


def _unused_lookup(view: RolloutView) -> str | None:
    """The first tool by which the reference looks something up, and the rollout never does."""
    tools = {act.tool for act in view.acts if not act.failed}
    lookups = [act.tool for act in view.expected if act.kind == "read" and not REASONING.match(act.tool)]
    return next((tool for tool in lookups if tool not in tools), None)


def standing_repeated(view: RolloutView) -> Iterator[LogSign]:
    """What only the user has said of its own standing is said again, and the look-up that shows it was never made."""
    unused = _unused_lookup(view)
    results = "\n".join(plain(text_of(act.result)) for act in view.acts)
    if unused is None or not view.is_lacking:
        return
    for place in view.users():
        standings = [match.group() for match in STANDING.finditer(plain(view.text(place)))]
        for reply in view.replies():
            words = plain(view.text(reply))
            claim = next((text for text in standings if text in words and not says(results, text.split()[0])), None)
            if reply > place and claim is not None and not view.text(reply).rstrip().endswith("?"):
                evidence = f"{claim!r} as the user said, and {unused} was never called: {quoted(view.text(reply))}"
                yield reply, evidence, (unused,)
                return


def means_denied(view: RolloutView) -> Iterator[LogSign]:
    """The assistant says that it cannot look something up, and never calls a tool that the reference calls."""
    replies = [(place, view.text(place)) for place in view.replies()]
    handovers = [act for act in view.acts if act.kind == "handover"]
    words = [*replies, *((a.message, text) for a in handovers for text in (view.text(a.message), text_of(a.arguments)))]
    disclaimers = sorted((place, text) for place, text in words if DISCLAIMER.search(plain(text)))
    unused = _unused_lookup(view)
    if unused is not None and disclaimers and view.pairs:
        place, text = disclaimers[0]
        sentence = next((part for part in SENTENCE.split(text) if DISCLAIMER.search(plain(part))), text)
        yield place, f"{unused} was never called, and the assistant says: {quoted(sentence)}", (unused,)


def identifier_invented(view: RolloutView) -> Iterator[LogSign]:
    """An identifier of the form of those that tools return stands in no message before."""

    def form(code: str) -> str:
        return re.sub(r"\d", "9", re.sub(r"[A-Za-z]", "A", code))

    words = list[str]()
    for place, message in enumerate(view.messages):
        calls = message.get("tool_calls")
        words.append(view.text(place) + (json.dumps(calls) if calls else ""))
    roles = [message["role"] for message in view.messages]
    results = [text for role, text in zip(roles, words, strict=True) if role == "tool"]
    forms = {form(code) for text in results for code in _codes(text)}
    context = "".join([view.context.policy, view.facts.script, *(text_of(act.arguments) for act in view.expected)])
    for index, text in enumerate(words):
        # A log may fold several turns of calls into one message: what these calls return counts as known to them.
        answers = takewhile(lambda place: roles[place] == "tool", range(index + 1, len(roles)))
        context = (context + "".join(words[place] for place in answers)).lower()
        for code in _codes(text):
            start = text.index(code)
            is_example = EXAMPLE.search(text[:start]) or BLANK.search(code)
            is_own = roles[index] == "assistant" and form(code) in forms
            if is_own and code.lower() not in context and not is_example:
                yield index, f"{code} stands in no message before: {quoted(text[max(0, start - 60) :])}", ()
                return
        context += text.lower()


def _codes(text: str) -> list[str]:
    """Identifiers of letters, and then at least three digits."""
    return [code for code in re.findall(r"\w+", text) if is_identifier(code) and re.search(r"[A-Za-z_]\d{3,}$", code)]


def left_as_text(view: RolloutView) -> Iterator[LogSign]:
    """A call that is not well formed was left in the text of a message."""
    for index, message in enumerate(view.messages):
        if is_malformed(message):
            yield index, "a call that is not well formed was left as text", ()


def transfer_not_due(view: RolloutView) -> Iterator[LogSign]:
    """A transfer that the reference does not make left something undone, or stands for an answer."""
    repair = view.repair
    is_due = any(goal.kind == "handover" for goal in view.goals)
    handover = next((act for act in view.acts if act.kind == "handover"), None)
    if handover is None or is_due or not view.rollout.reference:
        return
    # Passed rollouts may hand over where their reference does not: then no answer was owed.
    is_answer = not (repair.edits or repair.passes or handover.tool in view.context.needless)
    if is_answer or any(edit.kind == "insert" for edit in repair.edits):
        yield handover.message, f"{handover} was called where the reference hands nothing over", (handover.tool,)
