"""Causes within a rollout by itself: the log, the records and the policy prove them, whatever the reference does.

These causes hold of a rollout whose reference is suspect, too. Some ask the reference whether a hand-over or a look-up
was due at all, which even a reference with a wrong write can say.
"""

import json
import re
from collections.abc import Iterator
from itertools import takewhile

from captrain.capabilities import BY_MILESTONES, Act, Vocabulary, is_malformed, same, says, text_of
from captrain.diagnosis.case import ABILITY, Case, Cause, plain, quoted
from captrain.diagnosis.clauses import violations

REPEATS = 3
"""The same call so often, with no word of the user between, is a loop: twice may be a second try."""
WRITES = 4
"""So many equal writes in a row are a loop; fewer are writes too many."""
SHORT = 60
"""Characters of a text that may be said again."""
CLAIM = re.compile(
    r"\b(ago|yesterday|this morning|members?|membership|insur\w+|approved|eligible|entitled|promised|guarantee\w*|"
    r"warranty|said (that )?(i|you|it)|told me)\b"
)
"""Words with which a user states what a record would have to show."""
STANDING = re.compile(r"\b(?!a |the |your |my |our )\w+ (?:member|customer|subscriber|status|tier)\b")
"""Words of a user on its own standing, such as "gold member"."""
CODE = re.compile(r"\b(?=[A-Za-z_]*\d)(?=\w*[A-Za-z])[A-Za-z]+_?[A-Za-z_]*\d{3,}\b")
"""An identifier of letters and at least three digits."""
REASONING = re.compile(r"calculate|compute|convert|estimate|think")
"""Tools that look nothing up."""
EXAMPLE = re.compile(r"(?:\be\.g\.|\bsuch as|\bfor example|\bexample:?|\blike)[^).;!?\n]{0,60}$", re.IGNORECASE)
"""Words before an identifier by which it is only an example."""
BLANK = re.compile(r"0{4,}|X{3,}|1234")
"""Figures of an identifier that stands for any."""


def loops(case: Case) -> Iterator[Cause]:
    """The same call again and again, without a word of the user between, or the same words."""
    streaks, turns, acts = list[list[Act]](), case.users(), case.story.acts
    for act in acts:
        last = streaks[-1][-1] if streaks else None
        is_same = last is not None and (last.tool, last.arguments) == (act.tool, act.arguments)
        if last is not None and is_same and not any(last.message < turn < act.message for turn in turns):
            streaks[-1].append(act)
        else:
            streaks.append([act])
    for streak in streaks:
        if len(streak) >= (REPEATS if streak[0].kind != "write" else WRITES):
            is_last = streak[-1] is acts[-1] and case.ending
            end = f", until {case.ending.replace('_', ' ')}" if is_last else ""
            evidence = f"{streak[0]} was called {len(streak)} times in a row with the same arguments{end}"
            yield Cause("loop", streak[1].message, evidence, tools=(streak[0].tool,))
    texts: dict[str, list[int]] = {}
    for place in case.replies(next((act.message for act in acts if act.kind == "handover"), None)):
        texts.setdefault(case.text(place).strip(), []).append(place)
    for text, places in texts.items():
        if len(places) > REPEATS and len(text) >= SHORT:
            yield Cause("loop", places[1], f"the same words {len(places)} times: {quoted(text)}")


def undue_compliance(case: Case) -> Iterator[Cause]:
    """A write that a sentence of the policy forbids, going by the records, and that the reference does not make."""
    goals = [act for act in case.story.expected if act.kind == "write"]
    for violation in violations(case.story.writes, case.wishes, case.setting):
        act = violation.act
        if not any(goal.tool == act.tool and same(goal.arguments, act.arguments) for goal in goals):
            breach = violation.clause.breach
            message = case.proposal(act) if breach == "undue_compliance" else act.message
            yield Cause(breach, message, str(violation), tools=(act.tool,), arguments=tuple(act.arguments))


def unverified_claims(case: Case) -> Iterator[Cause]:
    """A write on the user's word alone: its record was never read, or nothing shows what it makes up for; or a reply
    that repeats the user's word on its own standing."""
    for act in case.unread():
        claim = next((i for i in case.users(act.message) if CLAIM.search(plain(case.text(i)))), None)
        if claim is None:
            yield Cause("missing_lookup", act.message, f"{act} without reading the record first", tools=(act.tool,))
        else:
            evidence = f"{act} on the user's word, the record was never read: {quoted(case.text(claim))}"
            yield Cause("unverified_claim", case.proposal(act), evidence, tools=(act.tool,))
    # A clause asks a result before a write to show something, and none does.
    clauses = [(clause, clause.proof, sentence) for clause, sentence, _ in case.setting.in_force if clause.proof]
    for clause, proof, sentence in clauses:
        for act in case.story.writes:
            results = [text_of(call.result).lower() for call in case.story.acts if call.message < act.message]
            if act.tool in clause.tools and not any(proof.search(result) for result in results):
                evidence = f'{act}, and {clause.reason}; the policy says "{sentence}"'
                kind = "unverified_claim" if clause.claimed.search(case.wishes) else "undue_compliance"
                yield Cause(kind, case.proposal(act), evidence, tools=(act.tool,))
    # What only the user has said of itself, where the reference makes a look-up that would show it, the rollout never
    # does, and something is not done or told rightly.
    unused = _unused_lookup(case)
    results = "\n".join(plain(text_of(act.result)) for act in case.story.acts)
    for place in case.users() if unused and (case.undone or case.untold) else ():
        standings = [match.group() for match in STANDING.finditer(plain(case.text(place)))]
        for reply in case.replies():
            words = plain(case.text(reply))
            claim = next((text for text in standings if text in words and not says(results, text.split()[0])), None)
            if reply > place and claim is not None and not case.text(reply).rstrip().endswith("?"):
                evidence = f"{claim!r} as the user said, and {unused} was never called: {quoted(case.text(reply))}"
                yield Cause("unverified_claim", reply, evidence, tools=(unused or "",))
                return


def _unused_lookup(case: Case) -> str | None:
    """The first tool by which the reference looks something up, and the rollout never does."""
    tools = {act.tool for act in case.story.acts if not act.failed}
    lookups = [act.tool for act in case.story.expected if act.kind == "read" and not REASONING.match(act.tool)]
    return next((tool for tool in lookups if tool not in tools), None)


def missing_lookup(case: Case) -> Iterator[Cause]:
    """The assistant says that it has no means to learn something, and never calls a tool that the reference does."""
    replies = [(place, case.text(place)) for place in case.replies()]
    handovers = [act for act in case.story.acts if act.kind == "handover"]
    words = [*replies, *((act.message, case.text(act.message) or text_of(act.arguments)) for act in handovers)]
    disclaimers = sorted((place, text) for place, text in words if ABILITY.search(plain(text)))
    unused = _unused_lookup(case)
    if unused is not None and disclaimers:
        place, text = disclaimers[0]
        sentence = next((part for part in re.split(r"(?<=[.!?;])\s", text) if ABILITY.search(plain(part))), text)
        evidence = f"{unused} was never called, and the assistant says: {quoted(sentence)}"
        yield Cause("missing_lookup", place, evidence, tools=(unused,))


def fabricated_facts(case: Case) -> Iterator[Cause]:
    """An identifier of the shape of those that tools return, which no message before has."""

    def form(code: str) -> str:
        return re.sub(r"\d", "9", re.sub(r"[A-Za-z]", "A", code))

    words = list[str]()
    for message in case.messages:
        calls = message.get("tool_calls")
        words.append(text_of(message.get("content") or "") + (json.dumps(calls) if calls else ""))
    roles = [message["role"] for message in case.messages]
    forms = {
        form(code) for role, text in zip(roles, words, strict=True) if role == "tool" for code in CODE.findall(text)
    }
    # What the reference names, too, is no invention, whatever the log lacks.
    references = (text_of(act.arguments) for act in case.story.expected)
    known = "".join([case.setting.policy, case.script, *references]).lower()
    for index, text in enumerate(words):
        # A log may fold several turns of calls into one message: what these calls return counts as known to them.
        results = takewhile(lambda place: roles[place] == "tool", range(index + 1, len(roles)))
        known += "".join(words[place] for place in results).lower()
        for match in CODE.finditer(text) if roles[index] == "assistant" else ():
            code, before = match.group(), text[: match.start()]
            is_example = EXAMPLE.search(before) or BLANK.search(code)
            if form(code) in forms and code.lower() not in known and not is_example:
                evidence = f"{code} stands in no message before: {quoted(text[max(0, match.start() - 60) :])}"
                yield Cause("fabricated_fact", index, evidence)
                return
        known += text.lower()


def malformed_calls(case: Case) -> Iterator[Cause]:
    """A call that is left in the text of a message."""
    for index, message in enumerate(case.messages):
        if is_malformed(message):
            yield Cause("invalid_call", index, "a call that is not well formed was left as text")


def milestones(case: Case) -> Iterator[Cause]:
    """The first milestone of a benchmark that was not met: a call, its arguments, a state, or words to the user; and
    acts that were to be left out."""
    for kind, finders in BY_MILESTONES.items():
        findings = [finding for find in finders for finding in find(case.story, Vocabulary(())) if finding.lacking]
        for finding in findings[:1]:
            tools, arguments = finding.tools, finding.arguments
            yield Cause(kind, finding.message, finding.evidence, "high", False, tools, arguments)
