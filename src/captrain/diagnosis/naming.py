"""Names the cause of each edit of a repair, by where values come from: root before symptom.

Every change has needs: the look-ups that supply its values, and the record that it is on. The first need that was not
met names the cause. How the dialogue ended (a hand-over, a refusal, a stop) names it only where all needs were met.
Values are looked for in the user's words, in tools' results, in the policy and in the script; a number that stands in
none of them is worked out.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from captrain.capabilities import SIMULATOR, Call, leaves, text_of
from captrain.diagnosis.case import Case, Cause, quoted
from captrain.diagnosis.clauses import objects, violations
from captrain.diagnosis.endings import cause_of_end, first_refusal, handover_in, user_left
from captrain.diagnosis.provenance import atoms, holds, is_common, is_identifier, shape, squeezed, values_of
from captrain.diagnosis.repair import Edit, Repair

SUPERLATIVE = re.compile(
    r"\b(cheapest|lowest|highest|dearest|priciest|longest|shortest|earliest|latest|(?:most|least) \w+)\b"
)
"""Words with which a user asks for a choice by numbers."""
NUMBER = re.compile(r"[\d.,-]*\d[\d.,-]*")
WORD = re.compile(r"#?\w(?:[\w.,-]*\w)?")
END = 1_000_000
SHORT = 6
"""Figures that say nothing of what they are of."""
ENDS = ("missing_write", "over_escalation")
"""Causes of a step that had all that it needs, and that nobody has refused."""
FURTHER = ("missing_lookup", "incomplete_search", "missing_write")
"""Causes of a step that say nothing where one before it was not made."""


@dataclass(frozen=True)
class Namer:
    """The causes of the edits of one rollout's repair."""

    case: Case
    repair: Repair

    def causes(self) -> list[tuple[Edit, Cause]]:
        """The cause of each needed edit, in their order."""
        return [(edit, self._cause(edit)) for edit in self.repair.edits]

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
        place = next(place for place, step in enumerate(self.repair.goals) if step is goal)
        return [lookup for lookup in self._due_lookups if any(lookup is step for step in self.repair.goals[:place])]

    @cached_property
    def _handover(self) -> Call | None:
        return handover_in(self.repair)

    def _left(self) -> int | None:
        return user_left(self.case, self.repair)

    @cached_property
    def _texts(self) -> list[tuple[str, int, str]]:
        """Role, place and searchable words of every message."""
        return [(m["role"], place, squeezed(self.case.text(place))) for place, m in enumerate(self.case.messages)]

    def _seen(self, value: object, before: int, *roles: str) -> list[int]:
        return [place for role, place, text in self._texts if place < before and role in roles and holds(text, value)]

    def _in_view(self, value: object, before: int = END) -> bool:
        return bool(self._seen(value, before, "user", "tool"))

    def _cause(self, edit: Edit) -> Cause:
        departure = self._left()
        if departure is not None and len(self.case.users()) == 1:
            return Cause(SIMULATOR, departure, "the user left at once", inherent=False)
        namings = {
            "end": lambda _: cause_of_end(self.case, self.repair),
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
        # What no clause forbids is due, even if something else of the reference is not.
        is_due = edit.kind == "insert" and edit.goal is not None and self._is_sound(edit.goal)
        inherent = is_due and kind in ("missing_write", "partial_refusal")
        return Cause(kind, min(message, last), evidence, "high", inherent, tools)

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

    def _is_sound(self, goal: Call) -> bool:
        """A step of the reference names no people, of whom a wrong one says wrong things, and breaks no clause."""
        goals = [pair.goal for pair in self.case.story.pairs]
        forbidden = [breach.act for breach in violations(goals, self.case.wishes, self.case.setting)]
        is_of_people = any("first_name" in person for person in objects(goal.arguments))
        return not is_of_people and not any(
            (act.tool, act.arguments) == (goal.tool, goal.arguments) for act in forbidden
        )

    def _of_saying(self, edit: Edit) -> tuple[str, int, str]:
        last, value = self.case.story.last, edit.text
        alternative = self._told_instead(value)
        if not self._in_view(value):
            if unmet := self._unmet([value], END):
                return unmet[0], last, unmet[1]
            for goal in self._due_lookups if NUMBER.search(value) else ():
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
        if (departure := self._left()) is not None:
            return SIMULATOR, departure, f"the user left before {value} was told"
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
                is_shown, forms = self._in_view(rival, place), [re.sub(r"\d", "9", word) for word in (rival, value)]
                is_alike = forms[0] == forms[1] or (bool(NUMBER.fullmatch(rival)) and self._is_near(rival, value))
                is_own = is_alike and rival != value and not self._seen(rival, place, "user")
                if is_own and (not is_shown or (forms[0] == forms[1] and len(value) > SHORT)):
                    return place, rival
        return None

    def _is_near(self, rival: str, value: str) -> bool:
        """Two numbers of more than two figures, both with a fraction or without one, of about one size."""
        lengths = [len(word) for word in (rival, value)]
        return min(lengths) > 2 and abs(lengths[0] - lengths[1]) < 2 and ("." in rival) == ("." in value)

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
        entries = [(n, v) for n, v in call.arguments.items() if self._names_record(n, v)]
        return [(name, text_of(value)) for name, value in entries[::-1]]

    def _names_record(self, name: str, value: object) -> bool:
        return isinstance(value, str) and (
            name in self.case.setting.toolbox.keys or (is_identifier(value) and shape(value) in self._shapes)
        )

    def _record(self, call: Call) -> tuple[str, str] | None:
        return next(iter(self._records(call)), None)

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

    def _is_slip(self, call: Call, target: str) -> bool:
        """A call names what nobody has said, of the shape of what was meant."""
        values = [value for value in call.arguments.values() if is_identifier(value)]
        return any(shape(value) == shape(target) and not self._in_view(value, call.message) for value in values)

    def _of_drop(self, edit: Edit) -> tuple[str, int, str]:
        call, record = self.repair.calls[edit.places[0]], self._record(self.repair.calls[edit.places[0]])
        dropped = {place for step in self.repair.edits if step.kind == "drop" for place in step.places}
        remainder = [step for place, step in enumerate(self.repair.calls) if place not in dropped]
        if any(call.equals(step) and step.changed for step in remainder):
            return "extra_write", call.message, f"{call} was made before, and again"
        if call.kind == "handover":
            return "over_escalation", call.message, f"{call} was called where the reference hands nothing over"
        if unread := self._unread(call):
            return "missing_lookup", call.message, f"{call}, and {unread} was never made before"
        inserted = [step.goal for step in self.repair.edits if step.kind == "insert" and step.goal]
        for goal in inserted:
            if self._is_twin(goal, edit):
                unmet = self._unmet([*values_of(goal)], call.message, goal)
                evidence = f"{call}, where {goal} was due"
                return (unmet[0], call.message, unmet[1]) if unmet else ("wrong_operation", call.message, evidence)
        for goal in inserted:
            if record and goal.tool == call.tool:
                return "wrong_record", call.message, f"{call}, where {goal} was meant"
        if breach := next(iter(self._breaches(call)), None):
            return "undue_compliance", self._proposal(call), breach
        expected = {text_of(value) for goal in self.repair.goals if goal.kind != "read" for value in values_of(goal)}
        values = [v for v in values_of(call) if isinstance(v, str) and not is_common(v) and v not in expected]
        scripted = [value for value in values if holds(squeezed(self.case.script), value)]
        if any(self._seen(value, call.message, "user") for value in scripted):
            evidence = f"{call}, as the user asked, where the reference leaves this as it is"
            return "undue_compliance", self._proposal(call), evidence
        origin = self._users_own(call)
        if origin is not None:
            return (
                SIMULATOR,
                origin,
                f"the user asked for {call}, which its script does not: {quoted(self.case.text(origin))}",
            )
        if (
            record
            and call.arguments.get(record[0])
            and shape(record[1]) in self._shapes
            and self._is_known(record[1])
            and self._seen(record[1], call.message, "user")
            and not self._opened(record[1], call.message)
        ):
            return "unverified_claim", call.message, f"{call}, and {record[1]} was never looked up"
        proposals = [place for place in self.case.replies(call.message) if self.case.asks(place)]
        if proposals:
            return "undue_compliance", proposals[-1], f"{call}, which was put to the user, and no reference makes"
        return "extra_write", call.message, f"{call}, which the reference does not make"

    def _needs_opening(self, record: str) -> bool:
        """A record of a change was not opened, and the reference opens it, if it says what it looks up at all."""
        lookups = [goal for goal in self.repair.goals if goal.kind == "read"]
        is_due = not lookups or any(record in [*leaves(goal.arguments)] for goal in lookups)
        return is_due and not self._opened(record)

    def _unread(self, call: Call) -> Call | None:
        """The look-up by which the reference opens a record of a change, and that was not made before."""
        for _, record in self._records(call):
            reads = [goal for goal in self.repair.goals if goal.kind == "read" and record in [*leaves(goal.arguments)]]
            if reads and not self._opened(record, call.message) and call.by == "assistant":
                return reads[0]
        return None

    def _breaches(self, call: Call) -> Iterator[str]:
        acts = [act for act in self.case.story.writes if act.message == call.message and act.tool == call.tool]
        earlier = [act for act in self.case.story.writes if act.message < call.message]
        for violation in violations([*earlier, *acts], self.case.wishes, self.case.setting):
            if violation.act in acts:
                yield str(violation)

    def _proposal(self, call: Call) -> int:
        """The message in which a change was put to the user first, its own where it is the user's."""
        acts = [act for act in self.case.story.acts if (act.message, act.tool) == (call.message, call.tool)]
        return self.case.proposal(acts[0]) if acts else call.message

    def _is_known(self, value: object) -> bool:
        """The value names something that some look-up opens."""
        return any(
            text_of(value) in [*leaves(goal.arguments)] for goal in self.repair.goals if goal.kind == "read"
        ) or any(holds(text, value) for role, _, text in self._texts if role == "tool")

    def _users_own(self, call: Call) -> int | None:
        """The message in which the user first named a value of a call that its script does not have, and that neither
        the assistant nor a tool had named."""
        for value in values_of(call) if self.case.script and self.case.is_answered and call.by == "assistant" else ():
            if not isinstance(value, str) or is_common(value) or holds(squeezed(self.case.script), value):
                continue
            # To name a record is no wish by itself.
            spoken = self._seen(value, call.message, "user") if not self._opened(value) else []
            if spoken and not self._seen(value, spoken[0], "assistant", "tool"):
                return spoken[0]
        return None

    def _of_replacing(self, edit: Edit) -> tuple[str, int, str]:
        call, goal = self.repair.calls[edit.places[0]], edit.goal
        assert goal is not None
        names = call.differing(goal)
        corrections = "; ".join(
            f"{name} {text_of(call.arguments.get(name))} should be {text_of(goal.arguments[name])}" for name in names
        )
        evidence = f"{call.tool}: {corrections}"
        if call.failed and (departure := self._left()) is not None:
            return SIMULATOR, departure, f"the user left before {call.tool} was corrected"
        record = next((entry for entry in self._records(goal) if entry[0] in names), None)
        if record and not self._in_view(call.arguments.get(record[0]), call.message):
            return "fabricated_fact", call.message, f"{evidence}; it stands in no message before"
        if record:
            wrong = text_of(call.arguments.get(record[0]))
            is_due = any(wrong in [*leaves(goal.arguments)] for goal in self.repair.goals if goal.kind != "read")
            opening = call.message if is_due else self._opened_instead(record[1]).get(wrong, call.message)
            return (
                "wrong_record",
                call.message if self._opened(record[1], call.message) else min(opening, call.message),
                evidence,
            )
        if partial := self._of_part(call, goal, names):
            return partial[0], partial[1], evidence
        due = [value for name in names for value in atoms(goal.arguments[name])]
        actual = [value for name in names for value in atoms(call.arguments.get(name))]
        missing = [value for value in due if value not in actual]
        strange = [value for value in actual if value not in due]
        words = [value for value in missing if isinstance(value, str)]
        is_at_hand = bool(words) and all(self._in_view(word, call.message) for word in words)
        invented = next((value for value in strange if self._is_invented(value, call.message)), None)
        if invented is not None and not is_at_hand:
            return "fabricated_fact", call.message, f"{evidence}; {invented} stands in no message before"
        if unmet := self._unmet(words, call.message, goal):
            return unmet[0], call.message, f"{evidence}; {unmet[1]}"
        if breach := next(iter(self._breaches(call)), None):
            return "wrong_argument", call.message, f"{evidence}; {breach}"
        if superlative := self._chosen(missing, strange):
            return "wrong_computation", self._proposal(call), f"{evidence}: not the {superlative}"
        if believed := next((name for name in names if self._believed(name, call, goal)), None):
            return "unverified_claim", self._proposal(call), f"{evidence}; {believed} as the user said"
        for value in strange:
            if isinstance(value, str) and re.search(r"\d", value):
                spoken = self._seen(value, call.message, "user")
                if spoken and not self._seen(value, spoken[0], "tool", "assistant"):
                    is_scripted = not self.case.script or holds(squeezed(self.case.script), value)
                    # Where a record has what is due, it contradicted the user.
                    is_scripted |= any(self._seen(item, call.message, "tool") for item in missing)
                    kind = "unverified_claim" if is_scripted else SIMULATOR
                    if kind == SIMULATOR and not self.case.is_answered:
                        continue
                    return kind, spoken[0], f"{evidence}; {value} is the user's word"
        if not any(self._seen(value, call.message, "user") for value in missing) and (unread := self._unread(call)):
            return "missing_lookup", call.message, f"{evidence}; {unread} was never made before"
        numbers = [value for value in missing if isinstance(value, int | float) and not is_common(value)]
        if not words and (unmet := self._unmet(numbers, call.message, goal)):
            return unmet[0], call.message, f"{evidence}; {unmet[1]}"
        return "wrong_argument", call.message, evidence

    def _is_invented(self, value: object, before: int) -> bool:
        """A word with figures or signs in it, which stands in no message before, and not in the policy."""
        is_name = isinstance(value, str) and re.search(r"\d|\w[@:/.]\w", value) is not None
        return is_name and not self._in_view(value, before) and not holds(squeezed(self.case.setting.policy), value)

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
                refusal = first_refusal(self.case, [], self._shapes)
                is_refused = refusal is not None and refusal < call.message
                return ("partial_refusal", refusal) if is_refused and refusal else ("missing_write", call.message)
        return None

    def _chosen(self, missing: Sequence[object], strange: Sequence[object]) -> str | None:
        """The superlative that the user asked for, where what was taken differs from what was due in numbers shown."""
        superlative = SUPERLATIVE.search(self.case.wishes)
        sets = [{*self._numbers(value)} for values in (missing, strange) for value in values if isinstance(value, str)]
        return superlative.group() if superlative and len(sets) > 1 and sets[0] and sets[-1] - sets[0] else None

    def _numbers(self, value: object) -> Iterator[tuple[str, float]]:
        for record in self.case.shown(value):
            for name, entry in record.items():
                for number in entry.values() if isinstance(entry, dict) else [entry]:
                    if isinstance(number, int | float) and not isinstance(number, bool):
                        yield name, number

    def _believed(self, name: str, call: Call, goal: Call) -> bool:
        """A value is the user's, without its script, where a record that was read before has the right one."""
        words = text_of(call.arguments.get(name)).replace("_", " ")
        reads = [act for act in self.case.story.acts if act.message < call.message]
        is_on_record = any(record.get(name) == goal.arguments[name] for act in reads for record in objects(act.result))
        return (
            is_on_record
            and bool(self._seen(words, call.message, "user"))
            and not holds(squeezed(self.case.script), words)
        )

    def _of_insertion(self, edit: Edit) -> tuple[str, int, str]:
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
        reads = [call.message for call in self._lookups if call.by == "assistant"]
        if self._handover and self._handover.message <= min(reads, default=END):
            return "over_escalation", end, f"{self._handover} was called before any look-up, where {goal} was due"
        for record in [entry for entry in self._records(goal) if self._needs_opening(entry[1])]:
            openings = self._opened_instead(record[1])
            slip = next((call for call in self._lookups if call.failed and self._is_slip(call, record[1])), None)
            if slip is not None:
                return "wrong_argument", slip.message, f"{slip}, where {record[1]} was named, which was never looked up"
            if not self._in_view(record[1]) or not openings:
                return "missing_lookup", end, f"{record[1]} was never looked up, and {goal} never made"
            due = {
                entry[1]
                for step in self.repair.goals
                if step.kind == "write"
                for entry in self._records(step)
                if shape(entry[1]) == shape(record[1])
            }
            replies = [self.case.text(place) for place in self.case.replies()]
            if len(openings) == 1 and len(due) == 1 and not any(holds(squeezed(text), record[1]) for text in replies):
                return "wrong_record", min(openings.values()), f"{next(iter(openings))} was taken for {record[1]}"
            return (
                "incomplete_search",
                max(openings.values()),
                f"{record[1]} was never looked up, {', '.join(openings)} were",
            )
        if unmet := self._unmet([value for value in values_of(goal) if isinstance(value, str)], END, goal):
            return unmet[0], end, f"{unmet[1]}, and {goal} never made"
        if (departure := self._left()) is not None:
            return SIMULATOR, departure, f"the user agrees to {goal} and leaves"
        for lookup in self._needs(goal):
            if not any(call.tool == lookup.tool for call in self._lookups):
                return "missing_lookup", end, f"{lookup} was never made, nor any like it, and {goal} never made"
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
        if (refusal := first_refusal(self.case, [value for _, value in self._records(goal)], self._shapes)) is not None:
            return "partial_refusal", refusal, f"{goal} was refused: {quoted(self.case.text(refusal))}"
        if self._handover:
            return "over_escalation", end, f"{self._handover} was called, where {goal} was due"
        return "missing_write", last, f"{goal} was never made"

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
        call, record = self.repair.calls[edit.places[0]], self._record(goal)
        is_on_record = record is not None and call.arguments.get(record[0]) == record[1]
        return goal.by == call.by == "assistant" and (is_on_record or (goal.arguments == call.arguments != {}))
