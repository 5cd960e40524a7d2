"""A rollout parsed once: its calls, the calls of its reference, its facts, and where each value was seen.

Tools and keys are learnt from rollouts (`captrain.capabilities.learning`), so nothing here names a domain. All rules
(`captrain.capabilities.rules`) ask this view, with or without a replay.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import takewhile
from typing import Literal

from captrain.capabilities.alignment import Pair, align, goal_pairs
from captrain.capabilities.calls import Call, calls_in, goals_in, handover_in
from captrain.capabilities.clauses import DiagnosisContext, RecordBook, violations
from captrain.capabilities.text import (
    AFTERWARDS,
    AWAITS_REPLY,
    CODE,
    CONSENT,
    SENTENCE,
    asks_consent,
    atoms,
    identifiers_in,
    is_common,
    is_identifier,
    is_reply,
    number_of,
    plain,
    refuses,
    same,
    says,
    shape,
    split_mark,
    squeezed,
    text_of,
)
from captrain.capabilities.toolbox import CHANGES, EFFECTS, Toolbox
from captrain.records import Message, Milestone, Rollout, leaves

PAST_END = 1_000_000
"""A message index beyond every dialogue."""
MOST_NUMBERS = 100
"""Maximum number of numbers of a tool's result that are combined in pairs."""
SHORT = 2
"""Maximum length of a value that is likely to occur by chance inside another one."""
EditKind = Literal["insert", "replace", "drop", "end", "say"]


@dataclass(frozen=True)
class Edit:
    """A difference between a rollout and its reference.

    Attributes:
        kind: the kind of edit.
        goal: the call of the reference.
        calls: the calls of the rollout that are replaced or dropped.
        before: place of the call before which the goal is inserted; None: at the end.
        text: the text that the agent must tell the user.
    """

    kind: EditKind
    goal: Call | None = None
    calls: tuple[Call, ...] = ()
    before: int | None = None
    text: str = ""

    @property
    def subject(self) -> str:
        """The edit's goal or text, in short."""
        return str(self.goal or self.text or "the end")

    @property
    def step(self) -> str:
        """The kind of step, as rules name it. Insertions are split by the kind of the inserted call."""
        if self.kind == "insert" and self.goal is not None:
            kinds = dict.fromkeys(CHANGES, "write") | {"handover": "handover"}
            return "insert step of user" if self.goal.by == "user" else f"insert {kinds.get(self.goal.kind, 'read')}"
        return "drop handover" if self.kind == "drop" and self.calls[0].kind == "handover" else self.kind

    @property
    def tools(self) -> tuple[str, ...]:
        """The tools of its calls and of its goal."""
        calls = (*self.calls, *((self.goal,) if self.goal else ()))
        return tuple(dict.fromkeys(call.tool for call in calls))

    @property
    def wrong(self) -> list[str]:
        """Names of the arguments that differ, for a call to be replaced."""
        return self.calls[0].differing(self.goal) if self.kind == "replace" and self.goal else []

    def _values(self, calls: Sequence[Call]) -> list[object]:
        return [value for call in calls for name in self.wrong for value in atoms(call.arguments.get(name))]

    @property
    def missing(self) -> list[object]:
        """Expected values that the call to be replaced lacks."""
        actual = self._values(self.calls)
        return [value for value in self._values([self.goal] if self.goal else []) if value not in actual]

    @property
    def strange(self) -> list[object]:
        """Unexpected values of the call to be replaced."""
        due = self._values([self.goal] if self.goal else [])
        return [value for value in self._values(self.calls) if value not in due]

    @property
    def corrections(self) -> str:
        """The corrections of a call to be replaced, in words: "name X should be Y"."""
        call, due = self.calls[0].arguments, self.goal.arguments if self.goal else {}
        pairs = [f"{name} {text_of(call.get(name))} should be {text_of(due[name])}" for name in self.wrong]
        return f"{self.calls[0].tool}: {'; '.join(pairs)}"


@dataclass(frozen=True)
class Repair:
    """The smallest change after which a rollout passes.

    Attributes:
        differences: all edits that were considered.
        edits: those of the smallest set.
        proven: whether a replay proved it.
        passes: whether the logged calls pass unchanged.
        is_unsound: whether the reference fails its own check.
    """

    differences: tuple[Edit, ...] = ()
    edits: tuple[Edit, ...] = ()
    proven: bool = False
    passes: bool = False
    is_unsound: bool = False


class RolloutView:
    """A rollout beside its reference.

    Args:
        rollout: passed or failed.
        context: tools, policy and records of its environment.
        calls: its calls as replayed; None: as logged.
        goals: calls of the reference as replayed; None: as logged.
    """

    def __init__(
        self,
        rollout: Rollout,
        context: DiagnosisContext,
        calls: Sequence[Call] | None = None,
        goals: Sequence[Call] | None = None,
    ) -> None:
        self.rollout, self.context, self.toolbox, self.facts = rollout, context, context.toolbox, rollout.task.facts
        self.messages: Sequence[Message] = rollout.messages
        self.calls = calls_in(self.messages, self.toolbox) if calls is None else [*calls]
        self.goals = goals_in(rollout, self.toolbox) if goals is None else [*goals]
        self.repair = Repair()
        self.last = max((index for index, m in enumerate(self.messages) if m["role"] == "assistant"), default=0)
        ending = rollout.reference[-1] if rollout.reference else {"role": ""}
        self.informs = [text_of(value) for value in ending.get("informs", [])]
        self.final = _reply(self.messages[self.last]) if self.messages else None
        # A message that only lists values to tell does not show how to word them.
        self.expected_final = None if "informs" in ending else _reply(ending)

    # What was called

    @cached_property
    def acts(self) -> list[Call]:
        """The assistant's calls."""
        return [call for call in self.calls if call.by == "assistant"]

    @cached_property
    def expected(self) -> list[Call]:
        """The assistant's calls in the reference."""
        return [goal for goal in self.goals if goal.by == "assistant"]

    @cached_property
    def writes(self) -> list[Call]:
        """The assistant's writes that were not refused."""
        return [act for act in self.acts if act.kind in CHANGES and not act.failed]

    @cached_property
    def lookups(self) -> list[Call]:
        """All reads, including those of the user."""
        return [call for call in self.calls if call.kind == "read"]

    @cached_property
    def handover(self) -> Call | None:
        """The first transfer to a human."""
        return handover_in(self.calls)

    @property
    def inserted(self) -> list[Call]:
        """The calls of the reference that the repair inserts."""
        return [edit.goal for edit in self.repair.edits if edit.kind == "insert" and edit.goal]

    @cached_property
    def equal_calls(self) -> list[list[Call]]:
        """All calls, grouped by tool and arguments."""
        groups: dict[str, list[Call]] = {}
        for call in self.calls:
            groups.setdefault(json.dumps([call.tool, call.arguments], sort_keys=True), []).append(call)
        return [*groups.values()]

    def has_like(self, goal: Call) -> bool:
        """Return whether the rollout made a look-up with the goal's tool."""
        return any(call.tool == goal.tool for call in self.lookups)

    @cached_property
    def _aligned(self) -> tuple[list[Pair], list[Call]]:
        pairs = goal_pairs(self.expected, self.user)
        return align(pairs, self.writes if self.rollout.reference else [])

    @property
    def pairs(self) -> list[Pair]:
        """The writes of the reference, each with the matching write of the rollout."""
        return self._aligned[0]

    @property
    def extras(self) -> list[Call]:
        """Writes of the rollout that match no write of the reference; empty if there is no reference."""
        return self._aligned[1]

    @cached_property
    def milestones(self) -> list[tuple[Milestone, float]]:
        """The task's milestones, each with its score."""
        parts = self.rollout.score.parts if self.rollout.score else {}
        return [(entry, parts[entry.part]) for entry in self.facts.milestones if entry.part in parts]

    # What was said

    @property
    def closing(self) -> int:
        """The index of the message that transfers to a human; without one, of the assistant's last message."""
        return self.handover.message if self.handover else self.last

    @property
    def ending(self) -> str:
        """The reason why the dialogue ended, in words."""
        return self.facts.ending.replace("_", " ")

    @cached_property
    def _words(self) -> list[str]:
        return [text_of(message.get("content") or "") for message in self.messages]

    @cached_property
    def _users(self) -> list[int]:
        return [index for index, message in enumerate(self.messages) if message["role"] == "user"]

    @cached_property
    def _replies(self) -> list[int]:
        return [index for index, message in enumerate(self.messages) if is_reply(message)]

    def text(self, index: int) -> str:
        """Return the text of a message."""
        return self._words[index]

    def users(self, before: int = PAST_END) -> list[int]:
        """Return the indices of the user's messages before message `before`; None: of all."""
        return [index for index in self._users if index < before]

    def replies(self, before: int = PAST_END) -> list[int]:
        """Return the indices of the assistant's messages to the user before message `before`; None: of all."""
        return [index for index in self._replies if index < before]

    def user_before(self, before: int = PAST_END) -> str:
        """Return the text of all user messages before message `before`; None: of all."""
        return "\n".join(self.text(index) for index in self.users(before))

    @cached_property
    def user(self) -> str:
        """The text of all user messages."""
        return self.user_before()

    @cached_property
    def wishes(self) -> str:
        """The text of all user messages and of the user's script, normalised by `plain`."""
        return plain(f"{self.user}\n{self.facts.script}")

    @cached_property
    def is_idle(self) -> bool:
        """Whether the agent neither called nor said anything, and the reference begins with a look-up."""
        turns = [message for message in self.messages if message["role"] == "assistant"]
        is_silent = not any((message.get("content") or "").strip() or message.get("tool_calls") for message in turns)
        return is_silent and [goal.kind for goal in self.expected[:1]] == ["read"]

    @cached_property
    def is_answered(self) -> bool:
        """Whether a user speaks after the assistant's first message. If False, the agent works alone."""
        spoken = (index for index, message in enumerate(self.messages) if message["role"] == "assistant")
        first = next(spoken, len(self.messages))
        return any(place > first for place in self.users())

    @cached_property
    def refusals(self) -> list[int]:
        """The indices of the assistant's messages that say that something cannot be done."""
        spoken = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        return [index for index in spoken if refuses(self.text(index))]

    @cached_property
    def left(self) -> int | None:
        """The index of the user's last message if the simulated user left too early; None otherwise.

        It left too early if that message was its only one, or if it left a question open without declining.
        """
        users = self.users()
        marks, words = split_mark(self.text(users[-1])) if users else ([], "")
        if not marks or self.handover:
            return None
        place = users[-1]
        if len(users) == 1:
            return place
        question = self.text(place - 1) if self.messages[place - 1]["role"] == "assistant" else ""
        return place if AWAITS_REPLY.search(question[-300:]) and (CONSENT.fullmatch(words) or "?" in words) else None

    def proposal(self, call: Call) -> int:
        """Return the index of the reply that proposed a write to the user; without one, of the write's own message.

        It is the first of these that exists: the first reply with an identifier that the assistant introduced; the
        first reply that asks for consent and names the record; the last reply that asks for consent, if it has a word
        of the tool's name.
        """
        replies = self.replies(call.message) if call.by == "assistant" else []
        codes = [leaf for leaf in leaves(call.content) if len(leaf) > 3 and is_identifier(leaf)]
        own = [code for code in codes if not says(self.wishes, code)]
        sources = [index for index in replies if any(says(self.text(index), code) for code in own)]
        about = [index for index in replies if asks_consent(self.text(index))]
        proposals = [index for index in about if call.record and says(self.text(index), call.record)]
        words = re.findall("[a-z]{4,}", call.tool)
        last = [index for index in about[-1:] if any(word in self.text(index).lower() for word in words)]
        return next(iter([*sources, *proposals, *last]), call.message)

    def is_wished(self, call: Call) -> bool:
        """Return whether the user asked for a value of the call that the script has and the reference lacks."""
        goals = [goal for goal in self.goals if goal.kind in EFFECTS]
        expected = {text_of(value) for goal in goals for value in atoms(goal.arguments)}
        values = [v for v in atoms(call.arguments) if isinstance(v, str) and v not in expected and not is_common(v)]
        return any(says(self.facts.script, value) and self.seen(value, call.message, "user") for value in values)

    def put_to_user(self, write: Call) -> bool:
        """Return whether the assistant, before the write, named its record or last asked for consent."""
        replies = [self.text(index) for index in self.replies(write.message)]
        return bool(replies) and (says("\n".join(replies), write.record) or asks_consent(replies[-1]))

    def first_telling(self, value: str) -> int | None:
        """Return the first message in which the assistant tells the value. Short values must be whole words."""
        expected = squeezed(value)
        for index, message in enumerate(self.messages):
            text, is_long = self.text(index), len(value) > SHORT
            if message["role"] == "assistant" and (says(text, value) or (is_long and expected in squeezed(text))):
                return index
        return None

    @property
    def is_lacking(self) -> bool:
        """Whether a write of the reference is missing, or a required value was not told."""
        is_undone = any(pair.write is None for pair in self.pairs)
        return is_undone or any(self.first_telling(value) is None for value in self.informs)

    def told_by_reference(self, values: Iterable[str]) -> list[str]:
        """Return those of the values that the reference's last message tells and the user did not say."""
        return [value for value in values if says(self.expected_final or "", value) and not says(self.user, value)]

    # Where values come from

    @cached_property
    def _texts(self) -> list[tuple[str, int, str]]:
        roles = [message["role"] for message in self.messages]
        return [*zip(roles, range(len(roles)), self._words, strict=True)]

    def seen(self, value: object, before: int, *roles: str) -> list[int]:
        """Return the indices of the messages of these roles before message `before` that contain the value."""
        return [place for role, place, text in self._texts if place < before and role in roles and says(text, value)]

    def in_view(self, value: object, before: int = PAST_END) -> bool:
        """Return whether a user or tool message contains the value before message `before`."""
        return bool(self.seen(value, before, "user", "tool"))

    def knows(self, value: object) -> bool:
        """Return whether a value is common, in the log, script or policy, or computable from a tool's numbers."""
        texts = (self.facts.script, self.context.policy)
        is_seen = is_common(value) or self.seen(value, PAST_END, "user", "tool", "system", "developer")
        return bool(is_seen) or any(says(text, value) for text in texts) or number_of(value) in self._worked_out

    @cached_property
    def _worked_out(self) -> set[object]:
        """The sums, differences and products of each two numbers in one tool result."""
        numbers = set[object]()
        for call in self.calls:
            shown = {number_of(value) for value in atoms(call.result)}
            known = sorted(value for value in shown if isinstance(value, Decimal))[:MOST_NUMBERS]
            numbers |= {total for a in known for b in known for total in (a + b, a - b, a * b)}
        return numbers

    def is_traced(self, edit: Edit) -> bool:
        """Return whether the log shows where the record and values of an edit come from."""
        match edit.kind:
            case "insert" if edit.goal is not None and edit.goal.kind in CHANGES:
                records = [value for _, value in self.records(edit.goal)]
                values = records or [*atoms(edit.goal.arguments)]
                return edit.goal.by == "user" or not values or any(map(self.knows, values))
            case "replace":
                records = [value for name, value in self.records(edit.goal) if name in edit.wrong] if edit.goal else []
                return all(map(self.knows, records or edit.missing))
            case "say":
                return self.knows(edit.text)
            case "drop":
                return edit.calls[0].kind in CHANGES
            case "end":
                return True
        return False

    @cached_property
    def shapes(self) -> set[str]:
        """The shapes of the identifiers that reads take as arguments (see `captrain.capabilities.text.shape`)."""
        reads = [call for call in (*self.calls, *self.goals) if call.kind == "read"]
        return {shape(value) for call in reads for value in call.arguments.values() if is_identifier(value)}

    def records(self, call: Call) -> list[tuple[str, str]]:
        """Return (name, value) of the arguments of a call that name records, in reverse order."""
        entries = [(name, value) for name, value in call.arguments.items() if isinstance(value, str)]
        keys = self.toolbox.keys
        return [(n, v) for n, v in entries[::-1] if n in keys or (is_identifier(v) and shape(v) in self.shapes)]

    def opened(self, record: str, before: int = PAST_END) -> bool:
        """Return whether the assistant looked up the record before message `before`."""
        reads = [call for call in self.lookups if call.message < before and call.by == "assistant"]
        return any(record in leaves(call.arguments) for call in reads)

    def opened_instead(self, record: str) -> dict[str, int]:
        """Map every other opened record with an id of the same shape to the index of its first message."""
        openings: dict[str, int] = {}
        for call in self.lookups:
            if call.by == "assistant" and not call.failed:
                for _, other in self.records(call):
                    if other != record and shape(other) == shape(record):
                        openings.setdefault(other, call.message)
        return openings

    @cached_property
    def due_lookups(self) -> list[Call]:
        """The reads of the reference that the rollout does not make."""
        made = {text_of([call.by, call.tool, call.arguments]) for call in self.lookups}
        due = [goal for goal in self.goals if goal.kind == "read"]
        due = [goal for goal in due if text_of([goal.by, goal.tool, goal.arguments]) not in made]
        return [goal for goal in due if not any(call.equals(goal) for call in self.lookups)]

    def needs(self, goal: Call | None) -> list[Call]:
        """Return the reads of the reference before a goal that the rollout does not make. None as goal: all of them."""
        return [lookup for lookup in self.due_lookups if goal is None or lookup.place < goal.place]

    def unread(self, call: Call) -> Call | None:
        """Return the reference's read of a record of this call that the assistant did not open before, or None."""
        reads = [goal for goal in self.goals if goal.kind == "read"] if call.by == "assistant" else []
        unread = [record for _, record in self.records(call) if not self.opened(record, call.message)]
        return next((goal for record in unread for goal in reads if record in leaves(goal.arguments)), None)

    def read_before(self, write: Call, names: Iterable[str], lookups: Sequence[Call] = ()) -> bool:
        """Return whether the record under each key in `names` was read in a message before the write.

        A record counts as read if a look-up had its key as argument, or if another call returned it. If `lookups` of
        the reference are given, the read must show what one of them shows.
        """
        earlier = [act for act in self.acts if not act.failed and act.message < write.message]
        return all(any(self._shows(act, name, write.record[name], lookups) for act in earlier) for name in names)

    def _shows(self, act: Call, name: str, value: object, lookups: Sequence[Call]) -> bool:
        if act.kind == "read" and same(act.record.get(name), value):
            peers = [lookup for lookup in lookups if lookup.tool == act.tool]
            return not peers or any(same(lookup.content, act.content) for lookup in peers)
        # A result with only the key does not show the record.
        results = act.result if isinstance(act.result, list) else [act.result]
        records = [entry for entry in results if isinstance(entry, Mapping) and len(entry) > 1]
        needs = [self.toolbox.fields.get(lookup.tool, frozenset[str]()) for lookup in lookups] or [frozenset[str]()]
        return any(
            same(record.get(name), value) and any(fields <= record.keys() for fields in needs) for record in records
        )

    def has_looked(self, pair: Pair) -> bool:
        """Return whether the rollout made the look-ups of the reference before its matching write."""
        names = [name for name in pair.guards if pair.write is not None and name in pair.write.record]
        return pair.write is None or self.read_before(pair.write, names, pair.lookups)

    def breach(self, call: Call) -> str | None:
        """Return in words which policy clause forbids a write; None if no clause does."""
        acts = [*takewhile(lambda act: act is not call, self.writes), call] if call in self.writes else []
        found = violations(acts, self.wishes, self.context)
        return next((str(violation) for violation in found if violation.act is call), None)

    def refusal(self, records: Sequence[str]) -> int | None:
        """Return the first message that refuses a request on `records`; None if there is none.

        These do not count:

        - a message that names only other records,
        - a refusal of something that the same message or a later one offers,
        - a notice that something cannot be done afterwards.
        """
        targets = {*records}
        proposals = [p for p in self.replies() if asks_consent(self.text(p)) and p not in self.refusals]
        for place in self.refusals:
            text = self.text(place)
            codes = {code for code in identifiers_in(text) if shape(code) in self.shapes}
            sentences = SENTENCE.split(text)
            denial = next((part for part in sentences if refuses(part)), text)
            offers = [self.text(offer) for offer in proposals if offer > place]
            offers += [part for part in sentences if "?" in part]
            is_offered = any(targets & {*CODE.findall(offer)} for offer in offers)
            is_of_it = not codes or not records or bool(codes & targets)
            if is_of_it and not is_offered and not AFTERWARDS.search(plain(denial)):
                return place
        return None


def bare_view(rollout: Rollout, toolbox: Toolbox) -> RolloutView:
    """Return the view of a rollout without policy and records."""
    return RolloutView(rollout, DiagnosisContext(toolbox, "", RecordBook(), set(), set()))


def _reply(message: Message) -> str | None:
    return message["content"] if is_reply(message) else None
