"""The end of a dialogue: by a hand-over, a refusal, the simulated user, a loop, or cut off."""

import json
import re
from collections.abc import Collection, Sequence

from captrain.capabilities import Call, slip_of
from captrain.diagnosis.case import REFUSAL, Case, plain
from captrain.diagnosis.provenance import is_identifier, shape
from captrain.diagnosis.repair import Repair

TOKEN = re.compile(r"###[A-Z-]+###")
"""Words by which a simulated user ends a conversation."""
CONSENT = re.compile(r"\W*(yes|yeah|sure|ok|okay|confirm\w*|please( do)?|go ahead)?[\s\w,]{0,24}[.!\s]*", re.IGNORECASE)
ASKS = re.compile(r"\?|\b(confirm|please provide|would you like|let me know|reply)\b", re.IGNORECASE)
REPEATS = 3

SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
AFTERWARDS = re.compile(r"\b(afterwards?|further|again|from then on)\b")
"""Words that tell a notice of what comes later from a refusal."""
CODES = re.compile(r"[#\w-]+")


def handover_in(repair: Repair) -> Call | None:
    """The first hand-over of a rollout."""
    return next((call for call in repair.calls if call.kind == "handover"), None)


def ended_by(case: Case, repair: Repair) -> str:
    """Name the end of the dialogue."""
    if user_left(case, repair) is not None or slip_of(case.rollout) is not None:
        return "simulator"
    if any(edit.kind == "end" for edit in repair.differences):
        return "loop" if cause_of_end(case, repair)[0] == "loop" else "cut off"
    if handover_in(repair):
        return "hand-over"
    last = case.replies()[-1:]
    return "refusal" if last and last[0] in case.refusals() else "stop"


def cause_of_end(case: Case, repair: Repair) -> tuple[str, int, str]:
    """Name the cause, message and evidence of a dialogue that does not come to an end."""
    counts: dict[str, list[Call]] = {}
    for call in repair.calls:
        counts.setdefault(json.dumps([call.tool, call.arguments], sort_keys=True), []).append(call)
    most = max(counts.values(), key=len, default=[])
    ending = case.ending.replace("_", " ") or "it is cut off"
    if len(most) >= REPEATS:
        return (
            "loop",
            most[1].message,
            f"{most[0]} was called {len(most)} times with the same arguments, until {ending}",
        )
    return "premature_stop", case.story.last, f"it does not come to an end: {ending}"


def user_left(case: Case, repair: Repair) -> int | None:
    """The user's last message, where it leaves on a question of the assistant's without declining, or on one of its
    own; or where it has said nothing else."""
    users = case.users()
    if not users or handover_in(repair) or not TOKEN.search(case.text(users[-1])):
        return None
    place, words = users[-1], TOKEN.sub("", case.text(users[-1])).strip()
    if len(users) == 1:
        return place
    question = case.text(place - 1) if case.messages[place - 1]["role"] == "assistant" else ""
    return place if ASKS.search(question[-300:]) and (CONSENT.fullmatch(words) or "?" in words) else None


def first_refusal(case: Case, records: Sequence[str], shapes: Collection[str]) -> int | None:
    """The first message that refuses something, unless it names other records alone, or a later one asks the user
    to agree to it after all."""
    proposals = [place for place in case.replies() if case.asks(place) and place not in case.refusals()]
    for place in case.refusals():
        text = case.text(place)
        codes = {code for code in CODES.findall(text) if is_identifier(code) and shape(code) in shapes}
        offers = [offer for offer in proposals if offer > place and {*records} & {*CODES.findall(case.text(offer))}]
        sentences = SENTENCE.split(text)
        offers += [place] if any("?" in part and {*records} & {*CODES.findall(part)} for part in sentences) else []
        denial = next((part for part in sentences if REFUSAL.search(plain(part))), text)
        offers += [place] if AFTERWARDS.search(plain(denial)) else []
        is_of_it = not codes or not records or bool(codes & {*records})
        if is_of_it and not offers:
            return place
    return None
