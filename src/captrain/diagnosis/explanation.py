"""Explanation of a failed rollout: one primary cause, the secondary ones apart, or nothing that log and replay prove.

The needed edits of the smallest repair name the causes (`naming`); beside them stands what log, records and policy
prove whatever the reference does. Some of that asks the reference whether a hand-over or a look-up was due at all,
which even one with a wrong write can say. The primary cause is the earliest root. How the dialogue ended is a field of
its own, and the cause only where nothing before it needs repair.

A benchmark's solutions are written by people, and some are wrong. So each reference is held against what the log holds
beside it: the clauses of the policy that records can decide, what records say of people, and whether its values occur
anywhere. With a suspect reference only what holds by itself is charged to the agent.
"""

import json
import re
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from captrain.capabilities import (
    BY_MILESTONES,
    INFRASTRUCTURE,
    KINDS,
    SIMULATOR,
    SUSPECT,
    Act,
    Vocabulary,
    differing,
    is_malformed,
    same,
    says,
    slip_of,
    text_of,
)
from captrain.diagnosis.case import ABILITY, Case, Cause, plain, quoted
from captrain.diagnosis.clauses import objects, violations
from captrain.diagnosis.naming import Namer
from captrain.diagnosis.repair import Edit, Repair

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
DETAIL = re.compile(r"(?=.*[A-Za-z])(?=.*\d)[\w#., -]+")
"""A value of letters and figures."""
CODE = re.compile(r"\b(?=[A-Za-z_]*\d)(?=\w*[A-Za-z])[A-Za-z]+_?[A-Za-z_]*\d{3,}\b")
"""An identifier of letters and at least three digits."""
REASONING = re.compile(r"calculate|compute|convert|estimate|think")
"""Tools that look nothing up."""
EXAMPLE = re.compile(r"(?:\be\.g\.|\bsuch as|\bfor example|\bexample:?|\blike)[^).;!?\n]{0,60}$", re.IGNORECASE)
"""Words before an identifier by which it is only an example."""
BLANK = re.compile(r"0{4,}|X{3,}|1234")
"""Figures of an identifier that stands for any."""
REFERENCE_CODE = re.compile(r"\b(?=\w*\d)(?=\w*[A-Za-z])\w{5,}\b|\b\d{5,}\b")
"""An identifier: of letters and figures, or a long number."""
COMMON = 3
"""One in so many identifiers of a reference may occur in dialogues of any task."""
LAPSES = ("over_escalation", "missing_lookup", "incomplete_search", "loop")
"""Causes that an agent may show because it refuses what a wrong reference asks for."""
UNREFERENCED = ("loop", "undue_compliance", "fabricated_fact")
"""Causes that are told without looking at the reference."""
ENDS = ("partial_refusal", "missing_write", "missing_information", "premature_stop", "missing_escalation")
RANKS = {"loop": 1, **dict.fromkeys(ENDS, 2), "over_escalation": 3}
"""Causes that show at the end alone, and anything before may be why: those of rank 0 come first."""
SEQUELS = ("extra_write", "partial_refusal", "fabricated_fact", "missing_escalation")
"""Causes that come of an earlier root, more often than not: told only where they come first."""


@dataclass(frozen=True)
class Explanation:
    """Explanation of a rollout: its causes, the primary one first; what speaks against its reference; the edits that
    would repair it, each with its cause; and how the dialogue ended."""

    causes: tuple[Cause, ...]
    suspicions: tuple[str, ...]
    steps: tuple[tuple[Edit, Cause], ...]
    ended_by: str


def explain(case: Case, repair: Repair) -> Explanation:
    """Find what explains a rollout."""
    against = [*dict.fromkeys(suspicions(case))]
    if repair.is_unsound:
        against.append("the reference, replayed, fails its own check")
    namer = Namer(case, repair)
    steps = tuple((edit, namer.cause(edit)) for edit in repair.edits)
    finders = (loops, undue_compliance, unverified_claims, missing_lookup, fabricated_facts, malformed_calls)
    proven = [cause for finder in finders for cause in finder(case)]
    # A replay that meets all milestones shows that nothing else is lacking than its edits.
    is_repaired = repair.proven and bool(repair.edits) and not repair.is_unsound
    proven += [cause for cause in milestones(case) if not is_repaired or cause.kind == "undue_compliance"]
    # Of one message the causes of needed steps come first, and of these the root.
    order = [*KINDS]
    roots = sorted((cause for _, cause in steps), key=lambda cause: order.index(cause.kind))
    roots += sorted((c for c in proven if _is_needed(c, case, repair)), key=lambda cause: order.index(cause.kind))
    causes = [cause for cause in roots if cause.inherent or not against]
    if (handover := _undue_handover(case, repair)) is not None:
        causes.append(handover)
    if looped := {tool for cause in causes if cause.kind == "loop" for tool in cause.tools}:
        # These say no more than that a call was repeated without end.
        causes = [cause for cause in causes if cause.kind != "premature_stop"]
        causes = [cause for cause in causes if cause.kind != "extra_write" or not {*cause.tools} <= looped]
    if is_foreign(case):
        causes = [cause for cause in causes if cause.kind in UNREFERENCED]
    if (slip := slip_of(case.rollout)) is not None:
        # What was still to be done when the user failed is left undone because of it.
        omissions = [cause for edit, cause in steps if edit.kind in ("insert", "say") and cause.message >= slip[0] - 1]
        causes = [cause for cause in causes if cause not in omissions] + [Cause(SIMULATOR, *slip, inherent=False)]
    if (denial := _withheld(case)) is not None:
        # For want of it nothing could be looked up, and the dialogue ends as it does.
        causes = [c for c in causes if RANKS.get(c.kind, 0) == 0 and c.kind != "missing_lookup"] + [denial]
    earliest: dict[str, Cause] = {}
    for cause in sorted(causes, key=lambda cause: (RANKS.get(cause.kind, 0), cause.message)):
        earliest.setdefault(cause.kind, cause)
    ordered = [*earliest.values()]
    if ordered and ordered[0].of_agent and ordered[0].kind not in RANKS:
        # A user who gives up on an agent that has gone wrong says nothing more.
        ordered = ordered[:1] + [cause for cause in ordered[1:] if cause.kind not in (SIMULATOR, *SEQUELS)]
    of_agent = {cause.kind for cause in ordered if cause.of_agent}
    if against and SIMULATOR not in earliest and (not of_agent or _is_reference_alone(case, of_agent)):
        ordered = [Cause(SUSPECT, case.story.last, against[0]), *(c for c in ordered if c.kind != "over_escalation")]
    if repair.passes and case.rollout.outcome == "failed":
        evidence = "its calls, replayed, pass the check: grader or infrastructure failed"
        ordered = [Cause(INFRASTRUCTURE, case.story.last, evidence)]
    return Explanation(tuple(ordered), tuple(against), steps, namer.ended_by)


def _withheld(case: Case) -> Cause | None:
    """The message in which the simulated user says that it has no identifier, though its script gives one that it
    never says, and nothing was changed for want of it."""
    codes = sorted(code for code in {*ACCOUNT.findall(case.script)} if not says(case.story.user, code))
    arguments = [text_of(act.arguments) for act in case.story.acts]
    if not codes or case.story.writes or any(says(text, code) for text in arguments for code in codes):
        return None
    place = next((place for place in case.users() if DENIAL.search(plain(case.text(place)))), None)
    if place is None:
        return None
    evidence = f"the user keeps {codes[0]} of its script to itself: {quoted(case.text(place))}"
    return Cause(SIMULATOR, place, evidence, "high", False)


def _undue_handover(case: Case, repair: Repair) -> Cause | None:
    """A hand-over that the reference does not make, and that left something undone or stands for an answer."""
    handover = next((act for act in case.story.acts if act.kind == "handover"), None)
    is_due = any(goal.kind == "handover" for goal in repair.goals)
    if handover is None or is_due or not case.story.has_reference:
        return None
    # What rollouts that passed have done where theirs hands nothing over is no answer left out.
    is_answer = not (repair.edits or repair.passes or handover.tool in case.setting.needless)
    if not (is_answer or any(edit.kind == "insert" for edit in repair.edits)):
        return None
    evidence = f"{handover} was called where the reference hands nothing over"
    return Cause("over_escalation", handover.message, evidence, "high", False, (handover.tool,))


def _is_needed(cause: Cause, case: Case, repair: Repair) -> bool:
    """A repair does without what is none of its edits: a loop that came to an end; a proven one without a call that it
    leaves as it is, too."""
    if cause.kind == "loop" and repair.goals:
        # A loop that came to an end cost nothing but time; it is open where no log says so, and nobody had a last word.
        is_cut = not case.ending and bool(case.messages) and case.messages[-1]["role"] != "assistant"
        return is_cut or any(edit.kind == "end" for edit in repair.edits)
    if cause.kind == "fabricated_fact" and cause.tools and repair.goals:
        return False  # the steps of a repair say which change is wrong, and why
    if cause.kind not in ("undue_compliance", "wrong_argument"):
        return True
    touched = {repair.calls[place].tool for edit in repair.edits for place in edit.places}
    return not repair.proven or repair.passes or repair.is_unsound or bool({*cause.tools} & touched)


def suspicions(case: Case) -> Iterator[str]:
    """Yield what speaks against the reference of a rollout."""
    if is_foreign(case):
        yield "nothing that the task names occurs in the log, where the user names other things: it is of another task"
        return
    goals = [act for act in case.story.expected if act.kind == "write"]
    for violation in violations(goals, case.wishes, case.setting):
        yield f"the reference's {violation}"
    for goal in goals:
        for person in objects(goal.arguments):
            if "first_name" in person and "last_name" in person:
                # A person of whom records say otherwise, or of whom nobody has spoken.
                name, records = f"{person['first_name']} {person['last_name']}", case.setting.book.people(person)
                for field, value in person.items():
                    values = {str(record[field]) for record in records if field in record}
                    if values and str(value) not in values and not says(f"{case.script}\n{case.story.user}", value):
                        yield f"{goal}: {field} of {name} is {value}, where records say {', '.join(sorted(values))}"
                # Both names in one breath: those of two people are no third person.
                texts, names = [case.script, *map(case.text, case.users())], [person["first_name"], person["last_name"]]
                if not records and not any(says(text, names) for text in texts):
                    yield f"{goal}: {name} is in no record, and the user does not speak of such a person"


def is_foreign(case: Case) -> bool:
    """Tell if the dialogue is of another task: the user names things, and nothing that the script identifies occurs in
    the log, nor much of what the reference does, which has common things, too."""
    script, goals = (
        {*REFERENCE_CODE.findall(case.script)},
        "\n".join(text_of(act.arguments) for act in case.story.expected),
    )
    reference = {*REFERENCE_CODE.findall(goals)}
    dialogue = "\n".join(text_of(message) for message in case.messages)
    spoken = {code for place in case.users() for code in REFERENCE_CODE.findall(case.text(place))}
    reads = [act for act in case.story.acts if act.kind == "read" and not act.failed]
    if not reads or not spoken or len(script | reference) < 2 or any(code in dialogue for code in script):
        return False
    return sum(code in dialogue for code in reference) <= (len(reference) / COMMON if script else 0)


def _is_reference_alone(case: Case, agent_kinds: set[str]) -> bool:
    """Tell if a suspect reference explains a failure by itself: the agent made no write but those of the reference,
    left undone nothing but what the policy forbids, and its own causes are such as only the reference can tell."""
    goals = [act for act in case.story.expected if act.kind == "write"]
    forbidden = [violation.act for violation in violations(goals, case.wishes, case.setting)]
    faithful = not case.story.extras and all(
        pair.write is None
        or pair.goal in forbidden
        or (pair.write.tool == pair.goal.tool and not differing(pair.goal, pair.write))
        for pair in case.story.pairs
    )
    lapses = {*LAPSES} - ({"loop"} if "max" in case.ending else set())
    return faithful and all(goal in forbidden for goal in case.undone) and agent_kinds <= lapses


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
    # Short words are a courtesy, unless they follow each other without a new call between.
    texts, again, previous = dict[str, list[int]](), Counter[str](), -1
    first = {json.dumps([act.tool, act.arguments], sort_keys=True): act.message for act in reversed(acts)}
    steps = sorted(first.values())
    for place in case.replies(next((act.message for act in acts if act.kind == "handover"), None)):
        text = case.text(place).strip()
        places = texts.setdefault(text, [])
        again[text] += places[-1:] == [previous] and bisect(steps, previous) == bisect(steps, place)
        places.append(place)
        previous = place
    for text, places in texts.items():
        if len(places) > REPEATS and (len(text) >= SHORT or again[text] >= REPEATS):
            yield Cause("loop", places[1], f"the same words {len(places)} times: {quoted(text)}")


def undue_compliance(case: Case) -> Iterator[Cause]:
    """A write that a sentence of the policy forbids, going by the records, and that the reference does not make."""
    goals = [act for act in case.story.expected if act.kind == "write"]
    for violation in violations(case.story.writes, case.wishes, case.setting):
        act = violation.act
        if not any(goal.tool == act.tool and same(goal.arguments, act.arguments) for goal in goals):
            breach = violation.clause.breach
            message = case.proposal(act) if breach == "undue_compliance" else act.message
            yield Cause(breach, message, str(violation), tools=(act.tool,))
    # It was put to the user, the tools then refused it for what the policy says of its record, and that concerns
    # nothing which the reference treats or which was treated otherwise.
    treated = [act.record for act in (*goals, *case.story.writes)]
    for act in case.story.acts:
        proposal = case.proposal(act) if act.kind == "write" and act.failed and act.record else act.message
        if proposal < act.message and case.asks(proposal) and not any(same(act.record, peer) for peer in treated):
            for violation in violations([act], case.wishes, case.setting):
                if violation.clause.breach == "undue_compliance":
                    yield Cause("undue_compliance", proposal, str(violation), "medium", tools=(act.tool,))
                    return


def unverified_claims(case: Case) -> Iterator[Cause]:
    """A write on the user's word alone: its record was never read, or nothing shows what it makes up for; or a reply
    that repeats the user's word on its own standing, or that comes without a single look-up, where some are due."""
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
    # Something is not done or told rightly, and nothing was looked up at all, where the reference does so first.
    speech, informs = "\n".join(case.text(place) for place in case.replies()), case.story.informs
    untold = [v for v in informs if case.story.first_telling(v) is None or (len(v) < 3 and not says(speech, v))]
    is_lacking = bool(case.undone or untold)
    answers = [place for place in case.replies() if place > 2 and case.users(place)]
    if is_lacking and answers and not case.story.acts and [act.kind for act in case.story.expected[:1]] == ["read"]:
        if any(CLAIM.search(plain(case.text(place))) for place in case.users(answers[0])):
            evidence = f"answered on the user's word, without a single look-up: {quoted(case.text(answers[0]))}"
            yield Cause("unverified_claim", answers[0], evidence)
        yield Cause("missing_lookup", answers[0], "no look-up was made at all")
    # Likewise, and what only the user has said of itself is said again, where the reference makes a look-up that would
    # show it, and the rollout never does.
    unused = _unused_lookup(case)
    results = "\n".join(plain(text_of(act.result)) for act in case.story.acts)
    for place in case.users() if unused and is_lacking else ():
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
    """The assistant says that it has no means to learn something, and never calls a tool that the reference does, for
    changes that are not all refused."""
    replies = [(place, case.text(place)) for place in case.replies()]
    handovers = [act for act in case.story.acts if act.kind == "handover"]
    words = [*replies, *((a.message, text) for a in handovers for text in (case.text(a.message), text_of(a.arguments)))]
    disclaimers = sorted((place, text) for place, text in words if ABILITY.search(plain(text)))
    unused = _unused_lookup(case)
    is_of_changes = any(pair.write is None or not pair.write.failed for pair in case.story.pairs)
    if unused is not None and disclaimers and is_of_changes:
        place, text = disclaimers[0]
        sentence = next((part for part in re.split(r"(?<=[.!?;])\s", text) if ABILITY.search(plain(part))), text)
        evidence = f"{unused} was never called, and the assistant says: {quoted(sentence)}"
        yield Cause("missing_lookup", place, evidence, tools=(unused,))


def fabricated_facts(case: Case) -> Iterator[Cause]:
    """A value of a write, or an identifier of the shape of those that tools return, which no message before has."""

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
    references = [text_of(act.arguments) for act in case.story.expected]
    for act in case.story.acts:
        if act.kind == "write":
            # A value of words and figures, such as an address, which neither user nor tool nor policy has said.
            spoken = [words[place] for place in range(act.message) if roles[place] != "assistant"]
            sources = plain("\n".join([case.setting.policy, case.script, *references, *spoken]))
            values = [v for v in act.content.values() if isinstance(v, str) and len(v) <= SHORT and DETAIL.fullmatch(v)]
            if strange := [value for value in values if plain(value) not in sources]:
                evidence = f"{', '.join(strange)} in {act.tool} stands in no message of the user or a tool before"
                yield Cause("fabricated_fact", case.proposal(act), evidence, tools=(act.tool,))
                break
    context = "".join([case.setting.policy, case.script, *references]).lower()
    for index, text in enumerate(words):
        # A log may fold several turns of calls into one message: what these calls return counts as known to them.
        results = takewhile(lambda place: roles[place] == "tool", range(index + 1, len(roles)))
        context += "".join(words[place] for place in results).lower()
        for match in CODE.finditer(text) if roles[index] == "assistant" else ():
            code, before = match.group(), text[: match.start()]
            is_example = EXAMPLE.search(before) or BLANK.search(code)
            if form(code) in forms and code.lower() not in context and not is_example:
                evidence = f"{code} stands in no message before: {quoted(text[max(0, match.start() - 60) :])}"
                yield Cause("fabricated_fact", index, evidence)
                return
        context += text.lower()


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
            yield Cause(kind, finding.message, finding.evidence, "high", False, finding.tools)
