"""Names the cause of each edit of a repair, by where values come from: root before symptom.

Every change has needs: the look-ups that supply its values, and the record that it is on. The first need that was not
met names the cause. How the dialogue ended (a hand-over, a refusal, a stop) names it only where all needs were met.
Values are looked for in the user's words, in tools' results, in the policy and in the script; a number that stands in
none of them is worked out.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TypeGuard

from captrain.capabilities import SIMULATOR, Call, leaves, slip_of, text_of
from captrain.diagnosis.case import REFUSAL, Case, Cause, plain, quoted
from captrain.diagnosis.clauses import objects, violations
from captrain.diagnosis.repair import Edit, Repair

SUPERLATIVE = re.compile(
    r"\b(cheapest|lowest|highest|dearest|priciest|longest|shortest|earliest|latest|(?:most|least) \w+)\b"
)
"""Words with which a user asks for a choice by numbers."""
IDENTIFIER = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[#\w-]{2,}|\d{8,}")
DATE = re.compile(r"\d{4}-\d\d-\d\d")
NUMBER = re.compile(r"[\d.,-]*\d[\d.,-]*")
WORD = re.compile(r"#?\w(?:[\w.,-]*\w)?")
CODES = re.compile(r"[#\w-]+")
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
TOKEN = re.compile(r"###[A-Z-]+###")
"""Words by which a simulated user ends a conversation."""
CONSENT = re.compile(r"\W*(yes|yeah|sure|ok|okay|confirm\w*|please( do)?|go ahead)?[\s\w,]{0,24}[.!\s]*", re.IGNORECASE)
ASKS = re.compile(r"\?|\b(confirm|please provide|would you like|let me know|reply)\b", re.IGNORECASE)
AFTERWARDS = re.compile(r"\b(afterwards?|further|again|from then on)\b")
"""Words that tell a notice of what comes later from a refusal."""
SMALL = 10
"""Numbers below this may be anything."""
SHORT = 6
"""Figures that say nothing of what they are of."""
REPEATS = 3
END = 1_000_000
ENDS = ("missing_write", "over_escalation")
"""Causes of a step that had all that it needs, and that nobody has refused."""
FURTHER = ("missing_lookup", "incomplete_search", "missing_write")
"""Causes of a step that say nothing where one before it was not made."""
Naming = tuple[str, int, str]
"""A kind of cause, the message where it shows, and the evidence."""


def is_identifier(value: object) -> TypeGuard[str]:
    """A string of letters and figures, or of many figures, that is no date."""
    return isinstance(value, str) and IDENTIFIER.fullmatch(value) is not None and not DATE.fullmatch(value)


def shape(value: str) -> str:
    """Pattern that identifiers of one kind share: a prefix of letters and so many figures, letters and figures mixed,
    or words and figures."""
    if re.fullmatch(r"\w+", value.strip("#")) and "_" not in value and not re.fullmatch(r"#?[A-Za-z]{1,2}\d+", value):
        return str(len(value))
    figures = re.sub(r"\d", "9", value)
    return re.sub(r"[A-Za-z]+", "A", figures) if re.search(r"[_-]", value) else figures


def squeezed(text: str) -> str:
    """A text in which values are looked for, whatever marks stand in numbers."""
    return text.lower().replace(",", "").replace("$", "").replace(" ", " ").replace("‑", "-")


def holds(text: str, value: object) -> bool:
    """The value stands in a squeezed text as one of its own."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    words = squeezed(text_of(value)).strip()
    if not words or words not in text:
        return False
    return re.search(rf"(?<![\w.]){re.escape(words)}(?:\.0+)?(?!\w|\.\d)", text) is not None


def is_common(value: object) -> bool:
    """The value says nothing of where it is from."""
    return isinstance(value, bool) or value in ("", None) or (isinstance(value, int | float) and abs(value) < SMALL)


def atoms(value: object) -> Iterator[object]:
    """The plain values inside a JSON value."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from atoms(item)
    elif value is not None:
        yield value


@dataclass(frozen=True)
class Namer:
    """The causes of the edits of one rollout's repair, and how its dialogue ended."""

    case: Case
    repair: Repair

    def cause(self, edit: Edit) -> Cause:
        """Name the cause of a needed edit."""
        departure = self._left
        if departure is not None and len(self.case.users()) == 1:
            return Cause(SIMULATOR, departure, "the user left at once", inherent=False)
        namings = {
            "end": lambda _: self._of_end(),
            "say": self._of_saying,
            "drop": self._of_drop,
            "replace": self._of_replacing,
            "insert": self._of_insertion,
        }
        lead = self._lead(edit)
        kind, message, evidence = self._of_insertion(lead) if lead else namings[edit.kind](edit)
        if id(edit) in self._sequels and kind in FURTHER:
            kind, message, evidence = self._of_insertion(self._sequels[id(edit)])
        calls = [self.repair.calls[place] for place in edit.places] + ([edit.goal] if edit.goal else [])
        tools = tuple(dict.fromkeys(call.tool for call in calls))
        last = max(0, len(self.case.messages) - 1)
        inherent = False
        if edit.kind == "insert" and edit.goal is not None and kind in ("missing_write", "partial_refusal"):
            # What no clause forbids is due, even if something else of the reference is not; but a wrong reference says
            # wrong things of people.
            goals, goal = [pair.goal for pair in self.case.story.pairs], edit.goal
            forbidden = [breach.act for breach in violations(goals, self.case.wishes, self.case.setting)]
            is_of_people = any("first_name" in person for person in objects(goal.arguments))
            is_forbidden = any((act.tool, act.arguments) == (goal.tool, goal.arguments) for act in forbidden)
            inherent = not is_of_people and not is_forbidden
        return Cause(kind, min(message, last), evidence, "high", inherent, tools)

    @property
    def ended_by(self) -> str:
        """Name the end of the dialogue."""
        if self._left is not None or slip_of(self.case.rollout) is not None:
            return "simulator"
        if any(edit.kind == "end" for edit in self.repair.differences):
            return "loop" if self._of_end()[0] == "loop" else "cut off"
        if self._handover:
            return "hand-over"
        last = self.case.replies()[-1:]
        return "refusal" if last and last[0] in self.case.refusals() else "stop"

    def _of_end(self) -> Naming:
        """Name a dialogue that does not come to an end."""
        counts: dict[str, list[Call]] = {}
        for call in self.repair.calls:
            counts.setdefault(json.dumps([call.tool, call.arguments], sort_keys=True), []).append(call)
        most = max(counts.values(), key=len, default=[])
        ending = self.case.ending.replace("_", " ") or "it is cut off"
        if len(most) >= REPEATS:
            evidence = f"{most[0]} was called {len(most)} times with the same arguments, until {ending}"
            return "loop", most[1].message, evidence
        return "premature_stop", self.case.story.last, f"it does not come to an end: {ending}"

    @cached_property
    def _handover(self) -> Call | None:
        return next((call for call in self.repair.calls if call.kind == "handover"), None)

    @cached_property
    def _left(self) -> int | None:
        """The user's last message, where it leaves on a question of the assistant's without declining, or on one of its
        own; or where it has said nothing else."""
        users = self.case.users()
        if not users or self._handover or not TOKEN.search(self.case.text(users[-1])):
            return None
        place, words = users[-1], TOKEN.sub("", self.case.text(users[-1])).strip()
        if len(users) == 1:
            return place
        question = self.case.text(place - 1) if self.case.messages[place - 1]["role"] == "assistant" else ""
        return place if ASKS.search(question[-300:]) and (CONSENT.fullmatch(words) or "?" in words) else None

    def _refusal(self, records: Sequence[str]) -> int | None:
        """The first message that refuses something, unless it names other records alone, or a later one asks the user
        to agree to it after all."""
        refusals, targets = self.case.refusals(), {*records}
        proposals = [place for place in self.case.replies() if self.case.asks(place) and place not in refusals]
        for place in refusals:
            text = self.case.text(place)
            codes = {code for code in CODES.findall(text) if is_identifier(code) and shape(code) in self._shapes}
            sentences = SENTENCE.split(text)
            denial = next((part for part in sentences if REFUSAL.search(plain(part))), text)
            offers = [self.case.text(offer) for offer in proposals if offer > place]
            offers += [part for part in sentences if "?" in part]
            is_offered = any(targets & {*CODES.findall(offer)} for offer in offers)
            is_of_it = not codes or not records or bool(codes & targets)
            if is_of_it and not is_offered and not AFTERWARDS.search(plain(denial)):
                return place
        return None

    @cached_property
    def _lookups(self) -> list[Call]:
        return [call for call in self.repair.calls if call.kind == "read"]

    @cached_property
    def _due_lookups(self) -> list[Call]:
        """Look-ups of the reference that the rollout does not make."""
        due = [goal for goal in self.repair.goals if goal.kind == "read"]
        return [goal for goal in due if not any(call.equals(goal) for call in self._lookups)]

    def _needs(self, goal: Call) -> list[Call]:
        """Look-ups that the reference makes before a step of its, and the rollout does not make."""
        before = {id(step) for step in takewhile(lambda step: step is not goal, self.repair.goals)}
        return [lookup for lookup in self._due_lookups if id(lookup) in before]

    @cached_property
    def _texts(self) -> list[tuple[str, int, str]]:
        """Role, place and searchable words of every message."""
        return [(m["role"], place, squeezed(self.case.text(place))) for place, m in enumerate(self.case.messages)]

    def _seen(self, value: object, before: int, *roles: str) -> list[int]:
        return [place for role, place, text in self._texts if place < before and role in roles and holds(text, value)]

    def _in_view(self, value: object, before: int = END) -> bool:
        return bool(self._seen(value, before, "user", "tool"))

    def _lead(self, edit: Edit) -> Edit | None:
        """The step left out before a call that was made in vain, or too early: made as the reference has it, and to be
        made again after that step."""
        calls = [self.repair.calls[place] for place in edit.places] if edit.kind == "drop" else [edit.goal]
        if edit.kind not in ("drop", "insert") or calls[0] is None:
            return None
        steps = [step for step in self.repair.edits if step.kind == "insert" and step.goal]
        again = [step.goal for step in steps if step.goal and calls[0].equals(step.goal)]
        if not again or not any(call.equals(calls[0]) for call in self.repair.calls):
            return None
        before = [goal for goal in takewhile(lambda goal: goal is not again[0], self.repair.goals)]
        missing = [step for step in steps if any(step.goal is goal for goal in before)]
        return next((s for s in missing if s.goal and not any(map(s.goal.equals, self.repair.calls))), None)

    def _of_saying(self, edit: Edit) -> Naming:
        last, value = self.case.story.last, edit.text
        alternative = self._told_instead(value)
        if unmet := self._unmet([value], END):
            return unmet[0], last, unmet[1]
        for goal in self._due_lookups if NUMBER.search(value) and not self._in_view(value) else ():
            kind, is_of_record = self._search_kind(goal), any(map(is_identifier, goal.arguments.values()))
            if kind == "missing_lookup" or is_of_record:
                message = alternative[0] if alternative and kind == "incomplete_search" else last
                return kind, message, f"{value} was not told, and {goal} never made"
        if alternative:
            kind = "incomplete_search" if self._in_view(alternative[1], alternative[0]) else "wrong_computation"
            return kind, alternative[0], f"{alternative[1]} was told, where {value} was asked for"
        for place in self.case.replies()[-1:] if NUMBER.search(value) and not self._in_view(value) else ():
            words = [word for word in WORD.findall(self.case.text(place)) if len(word) > 1 and NUMBER.fullmatch(word)]
            if worked_out := [word for word in words if not self._in_view(word, place)]:
                return "wrong_computation", place, f"{worked_out[0]} was worked out, and {value} not told"
        if self._left is not None:
            return SIMULATOR, self._left, f"the user left before {value} was told"
        if self._handover:
            return "over_escalation", self._handover.message, f"{self._handover} was called, and {value} not told"
        if choice := self._replaced_with(value):  # the reply tells of what was chosen, which was another
            return self._of_replacing(choice)
        return "missing_information", last, f"{value} was {'in view and ' * self._in_view(value)}not told"

    def _replaced_with(self, value: str) -> Edit | None:
        """The replaced call that was to name a value, or other words owed that a result shows beside it, and did not:
        the reply told of another choice."""
        owed = [edit.text for edit in self.repair.edits if edit.kind == "say"]
        results = [text for role, _, text in self._texts if role == "tool" and holds(text, value)]
        beside = [value, *(peer for peer in owed if any(holds(text, peer) for text in results))]
        for edit in self.repair.edits:
            if edit.kind == "replace" and edit.goal:
                call = self.repair.calls[edit.places[0]]
                due, actual = squeezed(text_of(edit.goal.arguments)), squeezed(text_of(call.arguments))
                if any(holds(due, peer) and not holds(actual, peer) for peer in beside):
                    return edit
        return None

    def _told_instead(self, value: str) -> tuple[int, str] | None:
        """The first reply that tells another value than the one of figures that is owed: one that nothing shows, or one
        of its form that was shown before it; and not the user's."""
        for place in self.case.replies() if NUMBER.search(value) else ():
            if self._in_view(value, place):
                return None
            for rival in WORD.findall(self.case.text(place)):
                # Numbers are alike of more than two figures, both with a fraction or without one, of about one size.
                lengths, is_of_form = (len(rival), len(value)), re.sub(r"\d", "9", rival) == re.sub(r"\d", "9", value)
                is_near = min(lengths) > 2 and abs(lengths[0] - lengths[1]) < 2 and ("." in rival) == ("." in value)
                is_alike = is_of_form or (is_near and NUMBER.fullmatch(rival) is not None)
                is_own = is_alike and rival != value and not self._seen(rival, place, "user")
                if is_own and (not self._in_view(rival, place) or (is_of_form and len(value) > SHORT)):
                    return place, rival
        return None

    def _search_kind(self, goal: Call) -> str:
        """A look-up of this kind was made of another record, or none was."""
        return "incomplete_search" if any(call.tool == goal.tool for call in self._lookups) else "missing_lookup"

    def _unmet(self, values: Sequence[object], before: int, goal: Call | None = None) -> tuple[str, str] | None:
        """The first need that was not met: a value in no message before, that a look-up of the reference, before a step
        of its, would have shown; or one to be worked out."""
        owed = [edit.text for edit in self.repair.edits if edit.text]
        for value in values:
            if is_common(value) or self._in_view(value, before):
                continue
            for lookup in self._due_lookups if goal is None else self._needs(goal):
                # A look-up of what was to be chosen is no need of the choice.
                keys = [*leaves(lookup.arguments)]
                is_of_it = all(any(holds(squeezed(text_of(peer)), leaf) for peer in (*values, *owed)) for leaf in keys)
                if holds(squeezed(lookup.result), value) and not is_of_it:
                    return self._search_kind(lookup), f"{text_of(value)} is shown by {lookup}, which was never made"
            if isinstance(value, int | float):
                return "wrong_computation", f"{value} is worked out, and stands in no message"
        return None

    @cached_property
    def _shapes(self) -> set[str]:
        """Shapes of the identifiers by which look-ups are told a record."""
        reads = [call for call in (*self.repair.calls, *self.repair.goals) if call.kind == "read"]
        return {shape(value) for call in reads for value in call.arguments.values() if is_identifier(value)}

    def _records(self, call: Call) -> list[tuple[str, str]]:
        """The arguments of a call that name records, such as look-ups open, the most special last named first."""
        keys = self.case.setting.toolbox.keys
        entries = [(name, value) for name, value in call.arguments.items() if isinstance(value, str)]
        return [(n, v) for n, v in entries[::-1] if n in keys or (is_identifier(v) and shape(v) in self._shapes)]

    def _opened(self, value: object, before: int = END) -> list[Call]:
        reads = [call for call in self._lookups if call.message < before and call.by == "assistant"]
        return [call for call in reads if text_of(value) in [*leaves(call.arguments)]]

    def _opened_instead(self, value: str) -> dict[str, int]:
        """Other records of the shape that were opened, with the message."""
        openings: dict[str, int] = {}
        for call in self._lookups:
            for _, record in self._records(call) if call.by == "assistant" and not call.failed else ():
                if record != value and shape(record) == shape(value):
                    openings.setdefault(record, call.message)
        return openings

    def _of_drop(self, edit: Edit) -> Naming:
        call = self.repair.calls[edit.places[0]]
        records = self._records(call)
        dropped = {place for step in self.repair.edits if step.kind == "drop" for place in step.places}
        remainder = [step for place, step in enumerate(self.repair.calls) if place not in dropped]
        if any(call.equals(step) and step.changed for step in remainder):
            return "extra_write", call.message, f"{call} was made before, and again"
        if call.kind == "handover":
            return "over_escalation", call.message, f"{call} was called where the reference hands nothing over"
        if unread := self._unread(call):
            return "missing_lookup", call.message, f"{call}, and {unread} was never made before"
        inserted = [step.goal for step in self.repair.edits if step.kind == "insert" and step.goal]
        if goal := next((goal for goal in inserted if self._is_twin(goal, edit)), None):
            unmet = self._unmet([*atoms(goal.arguments)], call.message, goal)
            evidence = f"{call}, where {goal} was due"
            return (unmet[0], call.message, unmet[1]) if unmet else ("wrong_operation", call.message, evidence)
        if records and (goal := next((goal for goal in inserted if goal.tool == call.tool), None)):
            return "wrong_record", call.message, f"{call}, where {goal} was meant"
        # The policy forbids it, or it was put to the user: the agent complied, and else did more than was asked for.
        if breach := self._breach(call):
            return "undue_compliance", self._proposal(call), breach
        goals = [goal for goal in self.repair.goals if goal.kind != "read"]
        expected = {text_of(value) for goal in goals for value in atoms(goal.arguments)}
        script = squeezed(self.case.script)
        wished = [v for v in atoms(call.arguments) if isinstance(v, str) and v not in expected and holds(script, v)]
        if any(self._seen(value, call.message, "user") for value in wished if not is_common(value)):
            evidence = f"{call}, as the user asked, where the reference leaves this as it is"
            return "undue_compliance", self._proposal(call), evidence
        # The user came up with a value that its script does not have, where to name a record is no wish by itself; or
        # it named a record that was never opened.
        texts = [value for value in atoms(call.arguments) if isinstance(value, str) and not is_common(value)]
        for value in texts if script and self.case.is_answered and call.by == "assistant" else ():
            spoken = self._seen(value, call.message, "user")
            is_own = bool(spoken) and not self._seen(value, spoken[0], "assistant", "tool")
            if is_own and not holds(script, value) and not self._opened(value):
                words = quoted(self.case.text(spoken[0]))
                return SIMULATOR, spoken[0], f"the user asked for {call}, which its script does not: {words}"
        for _, record in records[:1]:
            is_of_user = self._seen(record, call.message, "user") and not self._opened(record, call.message)
            if shape(record) in self._shapes and is_of_user and self._seen(record, END, "tool"):
                return "unverified_claim", call.message, f"{call}, and {record} was never looked up"
        if proposals := [place for place in self.case.replies(call.message) if self.case.asks(place)]:
            return "undue_compliance", proposals[-1], f"{call}, which was put to the user, and no reference makes"
        return "extra_write", call.message, f"{call}, which the reference does not make"

    def _unread(self, call: Call) -> Call | None:
        """The look-up by which the reference opens a record of a change, and that was not made before."""
        lookups = [goal for goal in self.repair.goals if goal.kind == "read"] if call.by == "assistant" else []
        unread = [record for _, record in self._records(call) if not self._opened(record, call.message)]
        return next((goal for record in unread for goal in lookups if record in [*leaves(goal.arguments)]), None)

    def _breach(self, call: Call) -> str | None:
        """Word the clause of the policy that forbids a change."""
        acts = [act for act in self.case.story.writes if act.message == call.message and act.tool == call.tool]
        earlier = [act for act in self.case.story.writes if act.message < call.message]
        breaches = violations([*earlier, *acts], self.case.wishes, self.case.setting)
        return next((str(breach) for breach in breaches if breach.act in acts), None)

    def _proposal(self, call: Call) -> int:
        """The message in which a change was put to the user first, its own where it is the user's."""
        acts = [act for act in self.case.story.acts if (act.message, act.tool) == (call.message, call.tool)]
        return self.case.proposal(acts[0]) if acts else call.message

    def _of_replacing(self, edit: Edit) -> Naming:
        call, goal = self.repair.calls[edit.places[0]], edit.goal
        assert goal is not None
        names = call.differing(goal)
        corrections = "; ".join(
            f"{name} {text_of(call.arguments.get(name))} should be {text_of(goal.arguments[name])}" for name in names
        )
        evidence = f"{call.tool}: {corrections}"
        if call.failed and self._left is not None:
            return SIMULATOR, self._left, f"the user left before {call.tool} was corrected"
        if record := next((entry for entry in self._records(goal) if entry[0] in names), None):
            return self._of_record(call, record, evidence)
        if partial := self._of_part(call, goal, names):
            return partial[0], partial[1], evidence
        due = [value for name in names for value in atoms(goal.arguments[name])]
        actual = [value for name in names for value in atoms(call.arguments.get(name))]
        missing = [value for value in due if value not in actual]
        strange = [value for value in actual if value not in due]
        words = [value for value in missing if isinstance(value, str)]
        # A word with figures or signs in it, which stands in no message before, and not in the policy.
        coined = [value for value in strange if isinstance(value, str) and re.search(r"\d|\w[@:/.]\w", value)]
        policy = squeezed(self.case.setting.policy)
        invented = [v for v in coined if not self._in_view(v, call.message) and not holds(policy, v)]
        if invented and not (words and all(self._in_view(word, call.message) for word in words)):
            return "fabricated_fact", call.message, f"{evidence}; {invented[0]} stands in no message before"
        if unmet := self._unmet(words, call.message, goal):
            return unmet[0], call.message, f"{evidence}; {unmet[1]}"
        if breach := self._breach(call):
            return "wrong_argument", call.message, f"{evidence}; {breach}"
        # The user asked for a choice by numbers, and those of what was taken differ from those of what was due.
        superlative = SUPERLATIVE.search(self.case.wishes)
        choices = [self._figures(value) for value in (*missing, *strange) if isinstance(value, str)]
        if superlative and len(choices) > 1 and choices[0] and choices[-1] - choices[0]:
            return "wrong_computation", self._proposal(call), f"{evidence}: not the {superlative.group()}"
        # The user said otherwise, without its script, than a record that was read before.
        reads = [act for act in self.case.story.acts if act.message < call.message]
        for name in names:
            claim = text_of(call.arguments.get(name)).replace("_", " ")
            is_of_user = self._seen(claim, call.message, "user") and not holds(squeezed(self.case.script), claim)
            records = [record for act in reads for record in objects(act.result)] if is_of_user else []
            if any(record.get(name) == goal.arguments[name] for record in records):
                return "unverified_claim", self._proposal(call), f"{evidence}; {name} as the user said"
        for value in strange:
            if isinstance(value, str) and re.search(r"\d", value):
                spoken = self._seen(value, call.message, "user")
                if spoken and not self._seen(value, spoken[0], "tool", "assistant"):
                    is_scripted = not self.case.script or holds(squeezed(self.case.script), value)
                    # Where a record has what is due, it contradicted the user.
                    is_scripted |= any(self._seen(item, call.message, "tool") for item in missing)
                    if is_scripted or self.case.is_answered:
                        kind = "unverified_claim" if is_scripted else SIMULATOR
                        return kind, spoken[0], f"{evidence}; {value} is the user's word"
        if not any(self._seen(value, call.message, "user") for value in missing) and (unread := self._unread(call)):
            return "missing_lookup", call.message, f"{evidence}; {unread} was never made before"
        numbers = [value for value in missing if isinstance(value, int | float) and not is_common(value)]
        if not words and (unmet := self._unmet(numbers, call.message, goal)):
            return unmet[0], call.message, f"{evidence}; {unmet[1]}"
        return "wrong_argument", call.message, evidence

    def _figures(self, identifier: str) -> set[tuple[str, float]]:
        """The numbers that look-ups show of a thing, with their names."""
        reads = [act for act in self.case.story.acts if act.kind == "read" and not act.failed]
        records = [record for act in reads for record in objects(act.result) if identifier in record.values()]
        entries = [entry for record in records for entry in record.items()]
        groups = [(name, entry.values() if isinstance(entry, dict) else [entry]) for name, entry in entries]
        values = [(name, value) for name, group in groups for value in group if not isinstance(value, bool)]
        return {(name, value) for name, value in values if isinstance(value, int | float)}

    def _of_record(self, call: Call, record: tuple[str, str], evidence: str) -> Naming:
        """Name a call on another record than this one: a guess, or one that was taken for it where it was opened."""
        if not self._in_view(call.arguments.get(record[0]), call.message):
            return "fabricated_fact", call.message, f"{evidence}; it stands in no message before"
        wrong = text_of(call.arguments.get(record[0]))
        is_due = any(wrong in [*leaves(goal.arguments)] for goal in self.repair.goals if goal.kind != "read")
        if is_due or self._opened(record[1], call.message):
            return "wrong_record", call.message, evidence
        return "wrong_record", min(self._opened_instead(record[1]).get(wrong, END), call.message), evidence

    def _of_part(self, call: Call, goal: Call, names: Sequence[str]) -> tuple[str, int] | None:
        """The cause and message of a list that lacks some of what is due, or holds more."""
        for name in names:
            expected, actual = goal.arguments[name], call.arguments.get(name)
            if not isinstance(expected, list) or not isinstance(actual, list) or len(expected) == len(actual):
                continue
            least, most = sorted((actual, expected), key=len)
            if all(item in most for item in least):
                if len(actual) > len(expected):
                    return "extra_write", call.message
                refusal = self._refusal([]) or END
                return ("partial_refusal", refusal) if refusal < call.message else ("missing_write", call.message)
        return None

    def _of_insertion(self, edit: Edit) -> Naming:
        goal, last = edit.goal, self.case.story.last
        assert goal is not None
        end = self._handover.message if self._handover else last
        twin = next((step for step in self.repair.edits if step.kind == "drop" and self._is_twin(goal, step)), None)
        if twin is not None:
            return self._of_drop(twin)
        if goal.by == "user":
            return "missing_write", last, f"{goal} of the user was never made"
        if goal.kind == "handover":
            return "missing_escalation", last, f"{goal} is missing"
        if goal.kind == "read":
            later = [call.message for call in self.repair.calls[edit.place or 0 :]] if edit.place is not None else []
            return self._search_kind(goal), next(iter(later), last), f"{goal} was never made"
        # What it needs: its record, its values, the look-ups before it.
        reads = [call.message for call in self._lookups if call.by == "assistant"]
        if self._handover and self._handover.message <= min(reads, default=END):
            return "over_escalation", end, f"{self._handover} was called before any look-up, where {goal} was due"
        due = [step for step in self.repair.goals if step.kind == "read"]
        for _, record in self._records(goal):
            # The reference opens it, if it says what it looks up at all, and the rollout does not.
            is_due = not due or any(record in [*leaves(lookup.arguments)] for lookup in due)
            if is_due and not self._opened(record):
                return self._of_unopened(goal, record, end)
        if unmet := self._unmet([value for value in atoms(goal.arguments) if isinstance(value, str)], END, goal):
            return unmet[0], end, f"{unmet[1]}, and {goal} never made"
        if self._left is not None:
            return SIMULATOR, self._left, f"the user agrees to {goal} and leaves"
        if lookup := next((need for need in self._needs(goal) if self._search_kind(need) == "missing_lookup"), None):
            return "missing_lookup", end, f"{lookup} was never made, nor any like it, and {goal} never made"
        # What was done instead, or refused; else it was left out, or handed over.
        swaps = [call for call in self.repair.calls if call.arguments == goal.arguments != {} and call.kind != "read"]
        swaps = [call for call in swaps if call.by == goal.by and not any(map(call.equals, self.repair.goals))]
        if swaps:
            return "wrong_operation", swaps[0].message, f"{swaps[0]}, where {goal} was due"
        peers = [call for call in self.repair.calls if (call.tool, call.by) == (goal.tool, goal.by)]
        again = [call for place, call in enumerate(peers) if call.failed and any(map(call.equals, peers[:place]))]
        if again and any(map(again[0].equals, self.repair.goals)):
            return "wrong_record", peers[0].message, f"{again[0]} was made twice, and {goal} never"
        attempts = [call for call in self.repair.calls if call.failed and self._is_attempt(call, goal)]
        locks = [call for call in self.repair.calls if call.changed and attempts and call.message < attempts[0].message]
        lock = next((call for call in locks if {*self._records(call)} & {*self._records(goal)}), None)
        if lock is not None and any(call.equals(goal) for call in attempts):
            return "wrong_operation", lock.message, f"{lock} before {goal}, which was refused from then on"
        if attempts:
            return "invalid_call", attempts[0].message, f"{attempts[-1]} was refused, and {goal} never made"
        if (refusal := self._refusal([value for _, value in self._records(goal)])) is not None:
            return "partial_refusal", refusal, f"{goal} was refused: {quoted(self.case.text(refusal))}"
        if self._handover:
            return "over_escalation", end, f"{self._handover} was called, where {goal} was due"
        return "missing_write", last, f"{goal} was never made"

    def _of_unopened(self, goal: Call, record: str, end: int) -> Naming:
        """Name a step left out whose record was never opened: by what was opened in its place."""
        openings = self._opened_instead(record)
        for call in self._lookups:
            # It names what nobody has said, of the shape of what was meant.
            codes = [value for value in call.arguments.values() if is_identifier(value) and call.failed]
            if any(shape(code) == shape(record) and not self._in_view(code, call.message) for code in codes):
                return "wrong_argument", call.message, f"{call}, where {record} was named, which was never looked up"
        if not self._in_view(record) or not openings:
            return "missing_lookup", end, f"{record} was never looked up, and {goal} never made"
        writes = [step for step in self.repair.goals if step.kind == "write"]
        due = {value for step in writes for _, value in self._records(step) if shape(value) == shape(record)}
        replies = [squeezed(self.case.text(place)) for place in self.case.replies()]
        if len(openings) == 1 and len(due) == 1 and not any(holds(text, record) for text in replies):
            return "wrong_record", min(openings.values()), f"{next(iter(openings))} was taken for {record}"
        evidence = f"{record} was never looked up, {', '.join(openings)} were"
        return "incomplete_search", max(openings.values()), evidence

    @cached_property
    def _sequels(self) -> dict[int, Edit]:
        """Steps at the end of the reference that are not made because one before them, which had all it needed, is not:
        nothing is said of their needs."""
        inserted = {id(edit.goal): edit for edit in self.repair.edits if edit.kind == "insert"}
        absent = {id(goal) for goal in self._due_lookups} | {*inserted}
        steps = takewhile(lambda goal: id(goal) in absent, reversed(self.repair.goals))
        tail = [inserted[id(goal)] for goal in steps if id(goal) in inserted]
        records = [value for goal in self.repair.goals if goal.kind != "read" for _, value in self._records(goal)]
        openings = {value for record in records for value in self._opened_instead(record)}
        is_apart = not tail or bool(openings - {*records}) or self._of_insertion(tail[-1])[0] not in ENDS
        return {} if is_apart else {id(edit): tail[-1] for edit in tail[:-1]}

    def _is_attempt(self, call: Call, goal: Call) -> bool:
        """A call does what a goal does, or something else to its record, to which nothing right was done afterwards."""
        if call.tool == goal.tool or (call.kind, call.by) != ("write", goal.by):
            return call.tool == goal.tool
        wrong = {place for edit in self.repair.edits for place in edit.places}
        right = [peer for place, peer in enumerate(self.repair.calls) if peer.changed and place not in wrong]
        later = {record for peer in right if peer.message > call.message for record in self._records(peer)}
        return bool({*self._records(call)} & {*self._records(goal)} - later)

    def _is_twin(self, goal: Call, edit: Edit) -> bool:
        call, records = self.repair.calls[edit.places[0]], self._records(goal)[:1]
        is_on_record = any(call.arguments.get(name) == value for name, value in records)
        return goal.by == call.by == "assistant" and (is_on_record or (goal.arguments == call.arguments != {}))
