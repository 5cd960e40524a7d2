"""What a rollout left undone beside its reference: refused, put in the wrong order, kept from the agent, or left out.

An omission shows at the end alone, and anything before it may be why. So the words of the assistant are searched for a
refusal of what was due, and the calls for one that closed the record, before it is said that something was left out.
"""

import re
from collections.abc import Iterator

from captrain.capabilities import SIMULATOR, Act, differing, leaves, same, says, text_of
from captrain.diagnosis.book import objects
from captrain.diagnosis.case import IDENTIFIER, REFUSAL, Case, plain
from captrain.diagnosis.cause import Cause, quoted
from captrain.diagnosis.clauses import violations

HARD = re.compile(r"\b(not|unable|unfortunately)\b|n[’']t\b|\bcannot\b")
"""What tells a refusal from a condition that is merely named."""
AFTERWARDS = re.compile(r"\b(afterwards?|further|again|once|any ?more|from then on)\b")
"""What tells a notice of what comes later from a refusal."""
PROCEED = re.compile(r"\b(?:proceed|go ahead)\b[^?]*\?")
DENIAL = re.compile(
    r"\b(?:don[’']t|do not|can[’']t|cannot|not) (?:\w+ ){0,3}?(?:have|remember|recall|know|sure)\b[^.?!,]{0,40}?"
    r"\b(?:(?:user|customer|member|account|profile|guest) (?:id|name|number)|(?:that|this|such) information)\b"
)
"""Words with which a user says that it cannot tell who it is."""
WAIVER = re.compile(
    r"\b(?:no need|do(?:n[’']t| not) (?:need|want)|(?:keep|leave)\b[^.!?]{0,40}\b(?:as (?:it )?is|as they are|alone|"
    r"unchanged|untouched))\b"
)
"""Words with which a user wants something left as it is."""
TOKEN = re.compile(r"###[A-Z-]+###")
"""How a simulated user ends a conversation."""
AGREES = re.compile(r"\b(yes|yeah|sure|go ahead|please do|proceed|correct|that works|sounds good)\b")
"""Words with which a user agrees."""
UNREAL = re.compile(r"\b(not|once|after|when|if|would|will|can|could|unless|until|already|cannot|yet)\b|n[’']t\b|\?")
"""What in a sentence tells a condition or a plan from a report."""
COMPLETION = "initiated|processed|submitted|completed|requested|placed"
"""Participles with which an assistant reports an operation by its noun."""
CODE = re.compile(r"\b[a-z]+_[a-z]+_\d{3,}\b")
"""An account's identifier."""
LONG = re.compile(r"(?=.*\d)[\w#-]{6,}")
"""An identifier, which nobody tells by chance."""
COLLEAGUE = re.compile(r"\b(transfer|connect|hand)(ring|ing)? you\b")
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
SYNONYMS = {
    "update": "modif|chang|updat|upgrad|add",
    "modify": "modif|chang|exchang|updat|switch|swap|replac",
    "exchange": "exchang|switch|swap|replac",
    "cancel": "cancel",
    "return": "return|refund",
    "book": r"\bbook(?!ing|ed [^.]{0,12}\d)|\breserve\b|\bnew (?:flight|reservation|booking)",
    "send": "send|sent|issu|compensat|certificate",
}
"""Stems of the words for what a tool does, by the verb of its name."""


def withheld(case: Case) -> Cause | None:
    """The message in which the simulated user says that it has no identifier, though its script gives one that it
    never says, and nothing was changed for want of it."""
    codes = {code for code in CODE.findall(case.script) if not says(case.story.user, code)}
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


def abandoned(case: Case) -> Cause | None:
    """The message in which the user agrees to what is still to be done, and ends the dialogue before it can be."""
    question, farewell = max(case.replies(), default=0), len(case.messages) - 1
    words = TOKEN.sub("", case.text(farewell)).strip() if case.messages else ""
    if not case.undone or case.story.last != question or not TOKEN.search(case.text(farewell)):
        return None
    if not case.asks(question) or (words and not AGREES.search(plain(words))):
        return None
    offer = next((goal for goal in case.undone if re.search(stems_of(goal.tool), plain(case.text(question)))), None)
    evidence = f"the user agrees to {offer} and leaves: {quoted(case.text(farewell))}"
    return Cause(SIMULATOR, farewell, evidence, "high", False) if offer else None


def waiver(case: Case, goal: Act) -> Cause | None:
    """The message in which the user, who has a script, wants a write of the reference left out, and asks for it in none
    after that."""
    stems, users = re.compile(stems_of(goal.tool)), case.users()
    for place in users if case.script else ():
        sentences = [part for part in SENTENCE.split(case.text(place)) if WAIVER.search(plain(part))]
        is_named = any(
            says(part, [*goal.record.values()]) or (stems.search(plain(part)) and not _is_elsewhere(part, goal))
            for part in sentences
        )
        if is_named and not any(stems.search(plain(case.text(later))) for later in users if later > place):
            evidence = f"the user wants {goal} left out, which its script asks for: {quoted(case.text(place))}"
            return Cause(SIMULATOR, place, evidence, "medium", False)
    return None


def undone_writes(case: Case) -> Iterator[Cause]:
    """A write of the reference that nothing stands for: refused, not found for want of a search, or left out."""
    if not case.undone:
        return
    locks = {id(goal): [*_out_of_order(case, goal)] for goal in case.undone}
    for causes in locks.values():
        yield from causes
    # What an earlier write has locked is neither refused by choice nor left out.
    waivers = {id(goal): waiver(case, goal) for goal in case.undone}
    yield from (cause for cause in waivers.values() if cause is not None)
    undone = [goal for goal in case.undone if not locks[id(goal)] and waivers[id(goal)] is None]
    if not undone:
        return
    refusal = next(((goal, place) for goal in undone for place in _refusals(case, goal)), None)
    goals = [pair.goal for pair in case.story.pairs]
    forbidden = [violation.act for violation in violations(goals, case.wishes, case.setting)]
    tools = tuple(sorted({goal.tool for goal in undone}))
    if refusal is not None:
        evidence = f"{refusal[0]} was refused: {quoted(_sentence(case.text(refusal[1])))}"
        # What no clause forbids is due, even if something else of the reference is not.
        yield Cause("partial_refusal", refusal[1], evidence, "high", refusal[0] not in forbidden, tools)
        return
    handed = any(act.kind == "handover" for act in case.story.acts)
    if not handed and not case.disclaimers():
        count = len(case.story.pairs)
        certain = [goal for goal in undone if goal not in forbidden and not _is_of_people(goal)]
        left_out = next(iter(certain), undone[0])
        evidence = f"{count - len(case.undone)} of {count} operations carried out, {left_out} left out"
        # So is what is left out, unless it names people, of whom a wrong reference says wrong things.
        yield Cause("missing_write", case.story.last, evidence, "high", bool(certain), tools)


def _is_of_people(goal: Act) -> bool:
    """Whether a call names people."""
    return any("first_name" in person for person in objects(goal.arguments))


def _out_of_order(case: Case, goal: Act) -> Iterator[Cause]:
    """A write after which its record takes the goal no more, where the reference makes the goal first."""
    order = [pair.goal for pair in case.story.pairs]
    for attempt in case.attempts(goal):
        for pair in case.story.pairs:
            act = pair.write
            is_before = act is not None and act.message < attempt.message and same(goal.record, act.record)
            if act is not None and is_before and order.index(goal) < order.index(pair.goal):
                reason = quoted(text_of(attempt.result))
                evidence = f"{act} before {goal}, which was refused from then on: {reason}"
                yield Cause("wrong_operation", act.message, evidence, "high", False, (act.tool, goal.tool))
                return


def _refusals(case: Case, goal: Act) -> list[int]:
    """The replies that refuse what the goal does, unless a later one offers it."""
    values = [leaf for leaf in leaves(goal.arguments) if not leaf.replace(".", "").isdigit()]
    texts = {place: case.text(place) for place in case.replies() if case.asks(place)}
    offers = [place for place, text in texts.items() if any(says(text, value) for value in values)]
    offers = [place for place in offers if not REFUSAL.search(plain(texts[place]))]
    return [place for place in denials(case, goal) if not any(offer > place for offer in offers)]


def denials(case: Case, goal: Act) -> list[int]:
    """The messages that say that what the goal does cannot be done, the plainest first."""
    stems = re.compile(stems_of(goal.tool))
    refusals = [place for place in case.refusals() if stems.search(plain(_sentence(case.text(place))))]
    refusals = [place for place in refusals if not _goes_on(case.text(place), stems)]
    refusals = [place for place in refusals if not _is_elsewhere(_sentence(case.text(place)), goal)]
    # "It cannot be done" is said of what the reply names before.
    refusals = [place for place in refusals if not _is_elsewhere(case.text(place), goal)]
    refusals = [place for place in refusals if not _is_report(case, goal, place)]
    refusals = [place for place in refusals if not _is_notice(case, goal, place)]
    refusals = [place for place in refusals if not _is_of_peer(case, goal, _sentence(case.text(place)))]
    nouns = {*goal.tool.split("_")[1:]} - {
        noun for tool in case.setting.toolbox.schemas for noun in _others(tool, goal)
    }

    def rank(place: int) -> tuple[bool, bool, int]:
        text = plain(case.text(place))
        # A reply that names a condition and asks for details goes on with the request.
        is_condition = not HARD.search(text) and "?" in text
        return is_condition, bool(nouns) and not any(noun in plain(_sentence(text)) for noun in nouns), place

    return sorted(refusals, key=rank)


def _is_of_peer(case: Case, goal: Act, sentence: str) -> bool:
    """Whether a sentence names what another tool with the verb of the goal's treats, and not what the goal's does."""
    nouns, words = {*goal.tool.split("_")[1:]}, plain(sentence)
    peers = {noun for tool in case.setting.toolbox.schemas for noun in _others(tool, goal)} - nouns
    remainder = nouns - {noun for tool in case.setting.toolbox.schemas for noun in _others(tool, goal)}
    return any(noun.rstrip("s") in words for noun in peers) and not any(noun.rstrip("s") in words for noun in remainder)


def _others(tool: str, goal: Act) -> set[str]:
    """The words of the name of another tool with the verb of the goal's."""
    words = tool.split("_")
    return {*words[1:]} if tool != goal.tool and words[0] == goal.tool.split("_")[0] else set()


def _goes_on(text: str, stems: re.Pattern[str]) -> bool:
    """Whether a reply asks the user whether to go ahead with the very thing of which it refuses a part."""
    return any(PROCEED.search(part) and stems.search(plain(part)) for part in SENTENCE.split(text))


def _is_notice(case: Case, goal: Act, place: int) -> bool:
    """Whether a reply tells what will not be possible afterwards, or names a condition of which nobody knows yet
    whether it is met, since the record was not read."""
    sentence = plain(_sentence(case.text(place)))
    reads = [act for act in case.story.acts if act.kind == "read" and not act.failed and act.message < place]
    is_known = any(act.record and same(goal.record, act.record) for act in reads) or not goal.record
    return AFTERWARDS.search(sentence) is not None or not (is_known or HARD.search(sentence))


def _is_report(case: Case, goal: Act, place: int) -> bool:
    """Whether a reply reports that the tool has just refused the very call that is due."""
    turn = max(case.users(place), default=0)
    return any(turn < attempt.message < place for attempt in case.attempts(goal))


def _is_elsewhere(sentence: str, goal: Act) -> bool:
    """Whether a sentence names records, and not the goal's."""
    codes = {code for code in re.findall(r"[\w-]+", sentence) if IDENTIFIER.fullmatch(code) and code.upper() == code}
    return bool(codes) and bool(goal.record) and not any(says(sentence, value) for value in goal.record.values())


def _sentence(text: str) -> str:
    """The sentence that refuses."""
    return next((part for part in SENTENCE.split(text) if REFUSAL.search(plain(part))), text)


def stems_of(tool: str) -> str:
    """A pattern of the words for what a tool does."""
    verb = tool.partition("_")[0]
    return SYNONYMS.get(verb, re.escape(verb))


def hollow_reports(case: Case) -> Iterator[Cause]:
    """A reply that says that something has been done, where no write of such a tool ever went through, or none on the
    record that the reply names."""
    verbs = {act.tool.partition("_")[0] for act in case.story.writes}
    for goal in case.undone:
        stems, is_of_record = stems_of(goal.tool), goal.tool.partition("_")[0] in verbs
        if is_of_record and (not goal.record or any(same(goal.record, act.record) for act in case.story.writes)):
            continue
        success = re.compile(
            rf"\b(?:has|have) been (?:successfully )?(?:{stems})\w*|"
            rf"\bi(?:[’']ve| have) (?:now |just |successfully )?(?:{COMPLETION})\b[^.]*?(?:{stems})"
        )
        for place in case.replies():
            sentences = [part for part in SENTENCE.split(case.text(place)) if success.search(plain(part))]
            if is_of_record:
                sentences = [part for part in sentences if says(part, goal.record)]
            claim = next((part for part in sentences if not UNREAL.search(plain(part))), None)
            if claim is not None:
                evidence = f"{goal.tool} never went through, and the assistant says: {quoted(claim)}"
                yield Cause("fabricated_fact", place, evidence, "high", False, (goal.tool,))
                return


def missing_information(case: Case) -> Iterator[Cause]:
    """A value to be told, by the reference's own account, that no message of the assistant says, though all that was to
    be done is done: what was left undone cannot be told."""
    yield from _told_of_another(case)
    deviates = any(pair.write is None or differing(pair.goal, pair.write) for pair in case.story.pairs)
    if case.untold and not deviates and not case.story.extras:
        evidence = f"{', '.join(case.untold)} was not told"
        yield Cause("missing_information", case.story.last, evidence, "high", False)


def _told_of_another(case: Case) -> Iterator[Cause]:
    """A reply that tells the user of another record what is to be told of one: before the right one was read, the value
    that stands there under the same name."""
    for value in case.untold:
        owners = [act for act in case.story.acts if act.kind == "read" and value in _entries(act.result).values()]
        names = {name for act in owners for name, entry in _entries(act.result).items() if entry == value}
        further = (
            [act for act in case.story.acts if act.kind == "read" and act.message < owners[0].message] if owners else []
        )
        for act in further:
            twins = {entry for name, entry in _entries(act.result).items() if name in names}
            places = [place for place in case.replies(owners[0].message) if place > act.message]
            reply = next((place for place in places if any(says(case.text(place), twin) for twin in twins)), None)
            if reply is not None and act.tool == owners[0].tool:
                evidence = f"told of {act}, where {value} of {owners[0]} was to be told: {quoted(case.text(reply))}"
                yield Cause("wrong_record", reply, evidence, "high", False, (act.tool,))
                return


def _entries(result: object, name: str = "") -> dict[str, str]:
    """The identifiers of letters or many figures inside a result, by the names under which they stand."""
    if isinstance(result, dict):
        return {key: entry for part, value in result.items() for key, entry in _entries(value, part).items()}
    if isinstance(result, list):
        return {key: entry for value in result for key, entry in _entries(value, name).items()}
    return {name: result} if isinstance(result, str) and LONG.fullmatch(result) else {}


def endings(case: Case) -> Iterator[Cause]:
    """A dialogue that is cut off without a last word, or without the hand-over that is due."""
    story = case.story
    due = next((act for act in story.expected if act.kind == "handover"), None)
    handover = next((act for act in story.acts if act.kind == "handover"), None)
    is_done = all(pair.write is not None and not differing(pair.goal, pair.write) for pair in story.pairs)
    if (
        due is not None
        and is_done
        and handover is None
        and not any(COLLEAGUE.search(plain(case.text(i))) for i in case.replies())
    ):
        yield Cause("missing_escalation", story.last, f"{due} is missing", "high", False, (due.tool,))
    if story.final is None and handover is None and story.messages[story.last :][-1:] and case.rollout.score:
        reason = f" ({case.ending.replace('_', ' ')})" if case.ending else ""
        yield Cause("premature_stop", story.last, f"is cut off without a last message{reason}")
