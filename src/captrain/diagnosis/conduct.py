"""Causes within a rollout by itself: the log, the records and the policy prove them, whatever the reference does.

These causes hold of a rollout whose reference is suspect, too. Some ask the reference whether a hand-over or a look-up
was due at all, which even a reference with a wrong write can say.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from captrain.capabilities import BY_MILESTONES, SIMULATOR, Act, Vocabulary, is_malformed, same, says, text_of
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
DENIAL = re.compile(
    r"\b(?:don[’']t|do not|can[’']t|cannot|not) (?:\w+ ){0,3}?(?:have|remember|recall|know|sure)\b[^.?!,]{0,40}?"
    r"\b(?:(?:user|customer|member|account|profile|guest) (?:id|name|number)|(?:that|this|such) information)\b"
)
"""Words with which a user says that it cannot tell who it is."""
ACCOUNT = re.compile(r"\b[a-z]+_[a-z]+_\d{3,}\b")
"""An account's identifier."""
CODE = re.compile(r"\b(?=[A-Za-z_]*\d)(?=\w*[A-Za-z])[A-Za-z]+_?[A-Za-z_]*\d{3,}\b")
"""An identifier of letters and at least three digits."""
DETAIL = re.compile(r"(?=.*[A-Za-z])(?=.*\d)[\w#., -]+")
"""A value of letters and figures."""
REASONING = re.compile(r"calculate|compute|convert|estimate|think")
"""Tools that look nothing up."""
EXAMPLE = re.compile(r"(?:\be\.g\.|\bsuch as|\bfor example|\bexample:?|\blike)[^).;!?\n]{0,60}$", re.IGNORECASE)
"""Words before an identifier by which it is only an example."""
BLANK = re.compile(r"0{4,}|X{3,}|1234")
"""Figures of an identifier that stands for any."""


def loops(case: Case) -> Iterator[Cause]:
    """The same call again and again, or the same words."""
    for streak in _streaks(case):
        if len(streak) >= (REPEATS if streak[0].kind != "write" else WRITES):
            is_last = streak[-1] is case.story.acts[-1] and case.ending
            end = f", until {case.ending.replace('_', ' ')}" if is_last else ""
            evidence = f"{streak[0]} was called {len(streak)} times in a row with the same arguments{end}"
            yield Cause("loop", streak[1].message, evidence, tools=(streak[0].tool,))
    yield from _refrains(case)


def _refrains(case: Case) -> Iterator[Cause]:
    """The same words again: often in all, or so many times in a row that even short ones are no courtesy."""
    texts: dict[str, list[int]] = {}
    for place in case.replies(next((act.message for act in case.story.acts if act.kind == "handover"), None)):
        texts.setdefault(case.text(place).strip(), []).append(place)
    order = [text for text, _ in groupby(case.text(place).strip() for place in case.replies())]
    for text, places in texts.items():
        if len(places) > REPEATS and (len(text) >= SHORT or len(places) - order.count(text) >= REPEATS):
            yield Cause("loop", places[1], f"the same words {len(places)} times: {quoted(text)}")


def _streaks(case: Case) -> list[list[Act]]:
    """Runs of calls with equal arguments that no word of the user interrupts."""
    streaks: list[list[Act]] = []
    turns = case.users()
    for act in case.story.acts:
        last = streaks[-1][-1] if streaks else None
        is_same = last is not None and (last.tool, last.arguments) == (act.tool, act.arguments)
        if last is not None and is_same and not any(last.message < turn < act.message for turn in turns):
            streaks[-1].append(act)
        else:
            streaks.append([act])
    return streaks


def undue_compliance(case: Case) -> Iterator[Cause]:
    """A write that a sentence of the policy forbids, going by the records, and that the reference does not make."""
    goals = [act for act in case.story.expected if act.kind == "write"]
    for violation in violations(case.story.writes, case.wishes, case.setting):
        act = violation.act
        if not any(goal.tool == act.tool and same(goal.arguments, act.arguments) for goal in goals):
            breach = violation.clause.breach
            message = case.proposal(act) if breach == "undue_compliance" else act.message
            yield Cause(breach, message, str(violation), tools=(act.tool,), arguments=tuple(act.arguments))
    yield from _forbidden_offers(case, goals)


def _forbidden_offers(case: Case, goals: Sequence[Act]) -> Iterator[Cause]:
    """A write that was put to the user, that the tools then refused for what the policy says of its record, and that
    concerns nothing which the reference treats or which was treated otherwise."""
    treated = [act.record for act in (*goals, *case.story.writes)]
    for act in case.story.acts:
        if act.kind != "write" or not act.failed or not act.record or any(same(act.record, peer) for peer in treated):
            continue
        proposal = case.proposal(act)
        for violation in violations([act], case.wishes, case.setting):
            if proposal < act.message and case.asks(proposal) and violation.clause.breach == "undue_compliance":
                yield Cause("undue_compliance", proposal, str(violation), "medium", tools=(act.tool,))
                return


def unverified_claims(case: Case) -> Iterator[Cause]:
    """A write on the user's word alone: its record was never read, or nothing shows what it makes up for; or answers
    without a single look-up, where the reference makes some."""
    story = case.story
    for act in case.unread():
        claim = next((i for i in case.users(act.message) if CLAIM.search(plain(case.text(i)))), None)
        if claim is None:
            yield Cause("missing_lookup", act.message, f"{act} without reading the record first", tools=(act.tool,))
        else:
            evidence = f"{act} on the user's word, the record was never read: {quoted(case.text(claim))}"
            yield Cause("unverified_claim", case.proposal(act), evidence, tools=(act.tool,))
    yield from _unconfirmed(case)
    yield from _repeated_claims(case)
    answers = [place for place in case.replies() if len(case.users(place)) > 0 and place > 2]
    if (
        (case.undone or case.untold)
        and answers
        and not story.acts
        and [act.kind for act in story.expected[:1]] == ["read"]
    ):
        reply = answers[0]
        if any(CLAIM.search(plain(case.text(place))) for place in case.users(reply)):
            evidence = f"answered on the user's word, without a single look-up: {quoted(case.text(reply))}"
            yield Cause("unverified_claim", reply, evidence)
        yield Cause("missing_lookup", reply, "no look-up was made at all")


def _repeated_claims(case: Case) -> Iterator[Cause]:
    """A reply that says of the user what only the user has said, where the reference makes a look-up that would show
    it, the rollout never does, and something is not done or told rightly."""
    tools = {act.tool for act in case.story.acts if not act.failed}
    lookups = [act.tool for act in case.story.expected if act.kind == "read" and not REASONING.match(act.tool)]
    unused = next((tool for tool in lookups if tool not in tools), None)
    if unused is None or not (case.undone or case.untold):
        return
    for place in case.users():
        results = "\n".join(plain(text_of(act.result)) for act in case.story.acts)
        standings = [match.group() for match in STANDING.finditer(plain(case.text(place)))]
        for reply in case.replies():
            words = plain(case.text(reply))
            claim = next((text for text in standings if text in words and not says(results, text.split()[0])), None)
            if reply > place and claim is not None and not case.text(reply).rstrip().endswith("?"):
                evidence = f"{claim!r} as the user said, and {unused} was never called: {quoted(case.text(reply))}"
                yield Cause("unverified_claim", reply, evidence, tools=(unused,))
                return


def _unconfirmed(case: Case) -> Iterator[Cause]:
    """A write for which a clause asks a result to show something, and none before it does."""
    clauses = [(clause, clause.proof, sentence) for clause, sentence, _ in case.setting.in_force if clause.proof]
    for clause, proof, sentence in clauses:
        for act in case.story.writes:
            results = [text_of(call.result).lower() for call in case.story.acts if call.message < act.message]
            if act.tool in clause.tools and not any(proof.search(result) for result in results):
                evidence = f'{act}, and {clause.reason}; the policy says "{sentence}"'
                kind = "unverified_claim" if clause.claimed.search(case.wishes) else "undue_compliance"
                yield Cause(kind, case.proposal(act), evidence, tools=(act.tool,))


def missing_lookup(case: Case) -> Iterator[Cause]:
    """The assistant says that it has no means to learn something, and never calls a tool that the reference does."""
    if not case.undone and all(pair.write is None or pair.write.failed for pair in case.story.pairs):
        return
    tools = {act.tool for act in case.story.acts if not act.failed}
    lookups = [act for act in case.story.expected if act.kind == "read" and not REASONING.match(act.tool)]
    unused = next((act for act in lookups if act.tool not in tools), None)
    disclaimer = next(iter(case.disclaimers()), None)
    if unused is None or disclaimer is None:
        return
    words = case.text(disclaimer) or next(text_of(act.arguments) for act in case.story.acts if act.kind == "handover")
    sentence = next((part for part in re.split(r"(?<=[.!?;])\s", words) if ABILITY.search(plain(part))), words)
    evidence = f"{unused.tool} was never called, and the assistant says: {quoted(sentence)}"
    yield Cause("missing_lookup", disclaimer, evidence, tools=(unused.tool,))


def fabricated_facts(case: Case) -> Iterator[Cause]:
    """An identifier of the shape of those that tools return, or a value of a write, which no message before has."""
    yield from _invented_values(case)
    shapes = {_shape(code) for m in case.messages if m["role"] == "tool" for code in CODE.findall(_words(m))}
    # What the reference names, too, is no invention, whatever the log lacks.
    context = "".join([case.setting.policy, case.script, *(text_of(act.arguments) for act in case.story.expected)])
    context = context.lower()
    for index, message in enumerate(case.messages):
        words = _words(message)
        # A log may fold several turns of calls into one message: what these calls return counts as known to them.
        results = index + 1
        while results < len(case.messages) and case.messages[results]["role"] == "tool":
            context += _words(case.messages[results]).lower()
            results += 1
        for match in CODE.finditer(words) if message["role"] == "assistant" else ():
            code = match.group()
            if (
                _shape(code) in shapes
                and code.lower() not in context
                and not EXAMPLE.search(words[: match.start()])
                and not BLANK.search(code)
            ):
                evidence = f"{code} stands in no message before: {quoted(words[max(0, match.start() - 60) :])}"
                yield Cause("fabricated_fact", index, evidence)
                return
        context += words.lower()


def _invented_values(case: Case) -> Iterator[Cause]:
    """A value of words and figures in a write, such as an address, which neither user nor tool nor policy has said."""
    for act in case.story.acts:
        if act.kind != "write":
            continue
        context = plain(
            "\n".join(
                [case.setting.policy, case.script, *(text_of(act.arguments) for act in case.story.expected)]
                + [_words(message) for message in case.messages[: act.message] if message["role"] != "assistant"]
            )
        )
        values = [value for value in act.content.values() if isinstance(value, str) and len(value) <= SHORT]
        strange = [value for value in values if DETAIL.fullmatch(value) and plain(value) not in context]
        if strange:
            evidence = f"{', '.join(strange)} in {act.tool} stands in no message of the user or a tool before"
            yield Cause("fabricated_fact", case.proposal(act), evidence, tools=(act.tool,))
            return


def _words(message: dict[str, object]) -> str:
    calls = message.get("tool_calls")
    return text_of(message.get("content") or "") + (json.dumps(calls) if calls else "")


def _shape(code: str) -> str:
    return re.sub(r"\d", "9", re.sub(r"[A-Za-z]", "A", code))


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


def withheld(case: Case) -> Cause | None:
    """The message in which the simulated user says that it has no identifier, though its script gives one that it
    never says, and nothing was changed for want of it."""
    codes = {code for code in ACCOUNT.findall(case.script) if not says(case.story.user, code)}
    if (
        not codes
        or case.story.writes
        or any(says(text_of(act.arguments), code) for act in case.story.acts for code in codes)
    ):
        return None
    for place in case.users():
        if DENIAL.search(plain(case.text(place))):
            evidence = f"the user keeps {sorted(codes)[0]} of its script to itself: {quoted(case.text(place))}"
            return Cause(SIMULATOR, place, evidence, "high", False)
    return None
