"""A rollout beside its reference solution: which call stands for which, read from messages and tool schemas alone.

Nothing here names a domain: which tools look up, change or hand over, and which arguments are keys of records, is
learnt from rollouts (`captrain.capabilities.learning`); all other arguments are content. Each write of the rollout is
aligned with one write of the reference, so that every mismatch has one home: what stands for nothing is extra, what
nothing stands for is missing, and a pair that differs differs in record, tool or content.

Values are compared as a benchmark does that compares the resulting records: text exactly, a number with its decimal
text, lists of plain values in any order (but lists that go together item by item stay together), lists of objects in
their order, objects by the entries that the reference gives.
"""

import json
import re
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from heapq import merge
from itertools import combinations, product
from math import comb
from typing import Literal, NamedTuple

from captrain.benchmarks import annotated
from captrain.contract import calls_of
from captrain.records import JsonObject, Message, Rollout, leaves

READS = re.compile(
    "calculate|check|compare|compute|convert|count|describe|estimate|fetch|find|get|list|"
    "look|lookup|query|read|retrieve|search|show|think|validate|verify|view"
)
HANDOVERS = {"escalate", "handoff", "handover"}
COLLEAGUES = {"agent", "agents", "human", "humans", "operator", "specialist", "support", "supervisor"}
CALL_MARKS = ("<tool_call", "</tool_call")
ERRORS = re.compile(r"\w*(error|exception|traceback)\b", re.IGNORECASE)
NOT_FOUND = re.compile(r"\bnot found\b|\bno (such|match)|\bdoes not exist\b", re.IGNORECASE)
CONSENT = re.compile(r"\b(confirm|proceed|go ahead|shall i|would you like)\b", re.IGNORECASE)
QUOTED = 160
RANKS = 5
"""Degrees of `_affinity`."""

Kind = Literal["read", "write", "handover"]


class Finding(NamedTuple):
    """One occasion on which a rollout exercised a capability: whether it went wrong, why, at which message, and the
    tools and arguments in question."""

    lacking: bool
    evidence: str
    message: int
    tools: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


@cache
def kind_of(tool: str) -> Kind:
    """Tell by the words of its name what calling a tool does: a look-up, a hand-over to a colleague, or a write."""
    words = re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", tool).lower())
    if HANDOVERS & {*words} or ("transfer" in words and COLLEAGUES & {*words}):
        return "handover"
    return "read" if words and READS.fullmatch(words[0]) else "write"


class Toolbox:
    """Tools as rollouts are read with them: what each does, and by which arguments they name records.

    Args:
        tools: their schemas.
        kinds: what tools do, where that is known; of others, annotations of their schemas tell, or their names.
        keys: the arguments that name records, each with the name that all those of its kind of record go by; None:
            those that some look-up and some other tool take alike.
        fields: what each look-up has always returned, where that is known.
    """

    def __init__(
        self,
        tools: Iterable[JsonObject],
        kinds: Mapping[str, str] | None = None,
        keys: Mapping[str, str] | None = None,
        fields: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        tools = [*tools]
        self.declared: dict[str, str] = {**annotated(tools), **(kinds or {})}
        self.schemas: dict[str, JsonObject] = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
        }
        self.fields = {**(fields or {})}
        self.keys = {**(self.shared_names((), (), ()) if keys is None else keys)}

    @property
    def unnamed(self) -> dict[str, Kind]:
        """Kinds of the tools whose names say something else."""
        return {name: self.kind(name) for name in self.schemas if self.kind(name) != kind_of(name)}

    def kind(self, tool: str) -> Kind:
        """Tell what calling a tool does."""
        match self.declared.get(tool):
            case "read" | "write" | "handover" as kind:
                return kind
            case None:
                return kind_of(tool)
        return "read"

    def shared_names(self, keys: Collection[str], lookups: Collection[str], changes: Collection[str]) -> dict[str, str]:
        """Names that changes without a key share with look-ups, but for known searches: with those never called, or
        with any where nothing has shown yet what such a change comes after."""
        names = {tool: {*schema.get("properties", {})} for tool, schema in self.schemas.items()}
        pairs = [
            (change, lookup)
            for change in names
            for lookup in names
            if self.kind(change) == "write" and self.kind(lookup) == "read" and self.fields.get(lookup, True)
        ]
        return {
            name: name
            for change, lookup in pairs
            if not names[change] & {*keys} and not (lookup in lookups and change in changes)
            for name in names[change] & names[lookup]
        }

    def accepts(self, tool: str, arguments: Mapping[str, object]) -> bool:
        """Tell if the tool exists and the argument names are allowed by its schema, the required ones all there."""
        schema = self.schemas.get(tool)
        return schema is not None and {*schema.get("required", [])} <= {*arguments} <= {*schema.get("properties", {})}


@dataclass(frozen=True)
class Act:
    """One tool call: `message` is the index of its message, `arguments` are all by name, `record` the key ones (by the
    names of their kinds of records, see `Toolbox`), `content` the others; `failed` when its result reports an error, or
    when it got no result and does not fit the tool's schema; `result` is what it returned. A call of a
    reference may say which arguments are compared (`compared`, None: all)."""

    message: int
    tool: str
    kind: Kind
    arguments: JsonObject
    record: JsonObject
    content: JsonObject
    failed: bool
    result: object = None
    compared: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return call_text(self.tool, self.arguments)


@dataclass(frozen=True)
class Pair:
    """One write of the reference and the write of the rollout that stands for it (None: missing).

    `derived` are the reference's key arguments whose value no user message states; `lookups` what the reference reads
    of the record since its write before, or else earlier; `guards` its key arguments by which it does.
    """

    goal: Act
    derived: tuple[str, ...]
    lookups: tuple[Act, ...]
    guards: tuple[str, ...]
    write: Act | None = None


def call_text(tool: str, arguments: Mapping[str, object]) -> str:
    """A call as a reader would quote it."""
    text = f"{tool}({', '.join(text_of(value) for value in arguments.values())})"
    return text if len(text) <= QUOTED else text[: QUOTED - 2] + "…)"


def text_of(value: object) -> str:
    """A JSON value as a reader would quote it."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def says(text: str, value: object) -> bool:
    """Tell if the text holds every string and number of the value as whole words; no for a value without any."""
    text, words = text.lower(), [leaf.lower() for leaf in leaves(value) if leaf]
    # People leave out the mark of "#W123" (of "#12" not: a bare 12 may be anything).
    words = [leaf[1:] if re.match(r"#[a-z]", leaf) else leaf for leaf in words]
    # Looking for the bare substring first spares most values a pattern of their own.
    return bool(words) and all(
        leaf in text and re.search(rf"(?<![\w#]){'#?' if leaf[0].isalpha() else ''}{re.escape(leaf)}(?!\w)", text)
        for leaf in words
    )


def same(expected: object, actual: object) -> bool:
    """Tell if two argument values come to the same (see the module's docstring); an object `actual` may say more."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        return all(same(value, actual.get(name)) for name, value in expected.items())
    if isinstance(expected, list) and isinstance(actual, list):
        if _plain(expected) and _plain(actual):
            return Counter(map(number_of, expected)) == Counter(map(number_of, actual))
        return len(expected) == len(actual) and all(map(same, expected, actual))
    if isinstance(expected, int | float) or isinstance(actual, int | float):
        return number_of(expected) == number_of(actual)
    return expected == actual


def _plain(values: list[object]) -> bool:
    return all(isinstance(value, str | int | float) for value in values)


def number_of(value: object) -> object:
    """Return the number a value is or spells, else the value; a truth value is no number, nor is a code such as 007."""
    if isinstance(value, bool):
        return str(value)
    # Exact, because long ids differ in digits that a float does not hold.
    return Decimal(str(value)) if re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", str(value)) else value


def differing(goal: "Act", write: "Act") -> list[str]:
    """The names of the goal's compared arguments whose values in the write come to something else."""
    names = [name for name in goal.arguments if goal.compared is None or name in goal.compared]
    wrong = [name for name in names if not same(goal.arguments[name], write.arguments.get(name))]
    lists = [name for name in names if isinstance(goal.arguments[name], list) and _plain(goal.arguments[name])]
    lengths = {len(act.arguments[name]) for name in lists if name not in wrong for act in (goal, write)}
    if len(lists) > 1 and not {*lists} & {*wrong} and len(lengths) == 1:
        rows = [
            Counter(zip(*(map(number_of, act.arguments[name]) for name in lists), strict=True)) for act in (goal, write)
        ]
        wrong += lists if rows[0] != rows[1] else []
    return wrong


def result_of(message: Message) -> object:
    """Read the content of a tool message: as JSON where it is JSON, else as its text."""
    content = message.get("content") or ""
    try:
        return json.loads(content)
    except ValueError:
        return content


def reports_error(message: Message) -> bool:
    """Tell if a tool message reports an error: by a flag, an `error` entry of its JSON, or how its text begins."""
    result = result_of(message)
    has_error_entry = isinstance(result, Mapping) and bool(result.get("error"))
    begins_as_error = isinstance(result, str) and ERRORS.match(result) is not None
    return bool(message.get("error")) or has_error_entry or begins_as_error


def is_malformed(message: Message) -> bool:
    """An assistant message with the marks of a tool call left in its text: the call was not well formed."""
    return message["role"] == "assistant" and any(mark in (message.get("content") or "") for mark in CALL_MARKS)


def is_reply(message: Message) -> bool:
    """An assistant message that speaks to the user: words, and no call."""
    spoken = message["role"] == "assistant" and bool((message.get("content") or "").strip())
    return spoken and not message.get("tool_calls") and not is_malformed(message)


def asks_consent(text: str) -> bool:
    """Tell if words of the assistant ask the user whether to go ahead with something."""
    return "?" in text and CONSENT.search(text) is not None


def acts_of(messages: Sequence[Message], toolbox: Toolbox) -> list[Act]:
    """The assistant's tool calls in order; the k-th call of a message is answered by the k-th message after it, if a
    tool's. A user may call tools, too: those are no acts of the agent."""
    acts: list[Act] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for tool_index, (tool, arguments) in enumerate(calls_of(message), start=1):
            answer = messages[index + tool_index] if index + tool_index < len(messages) else {"role": ""}
            has_result = answer["role"] == "tool"
            keyed = {name: value for name, value in arguments.items() if name in toolbox.keys}
            content = {name: value for name, value in arguments.items() if name not in toolbox.keys}
            # Schemas may have been inferred from a few calls: where the tool itself has answered, its word counts.
            failed = reports_error(answer) if has_result else not toolbox.accepts(tool, arguments)
            compared = message["tool_calls"][tool_index - 1].get("compare")
            acts.append(
                Act(
                    index,
                    tool,
                    toolbox.kind(tool),
                    {**keyed, **content},
                    {toolbox.keys[name]: value for name, value in keyed.items()},
                    content,
                    failed,
                    result=result_of(answer) if has_result else None,
                    compared=None if compared is None else tuple(compared),
                )
            )
    return acts


def _goals(reference: Sequence[Act], user: str) -> list[Pair]:
    """The writes of a reference, each with what it reads before."""
    writes = [act for act in reference if act.kind == "write"]
    names, messages = {name for act in writes for name in act.record}, [act.message for act in writes]
    reads = defaultdict[tuple[str, object], list[int]](list)
    for k, act in enumerate(reference):
        for name in names if act.kind == "read" else ():
            reads[name, _coarse(act.record.get(name))].append(k)
    goals: list[Pair] = []
    for act in writes:
        near = {k for name, value in _coarse_items(act.record).items() for k in reads[name, value]}
        earlier = [reference[k] for k in sorted(near) if reference[k].message < act.message]
        peers = [read for read in earlier if _shared_keys(read, act)]
        before = bisect_left(messages, act.message)
        lookups = [lookup for lookup in peers if not before or lookup.message > messages[before - 1]] or peers
        derived = tuple(name for name, value in act.record.items() if not says(user, value))
        guards = {name for lookup in lookups for name in _shared_keys(lookup, act)}
        goals.append(Pair(act, derived, tuple(lookups), tuple(sorted(guards))))
    return goals


def _shared_keys(lookup: Act, act: Act) -> list[str]:
    return [name for name, value in act.record.items() if same(lookup.record.get(name), value)]


def align(goals: Sequence[Pair], writes: Sequence[Act]) -> tuple[list[Pair], list[Act]]:
    """Let each write of the rollout stand for at most one of the reference.

    Pairs are made from the surest on (`_affinity`), among equals those with more equal arguments first, then in the
    order of both. Returns the pairs, and the writes that stand for nothing.
    """
    records = {_hashable(pair.goal.record) for pair in goals}
    elsewhere = [_hashable(write.record) not in records for write in writes]
    assigned, matched = dict[int, int](), set[int]()

    @cache
    def match(i: int, j: int) -> tuple[int | None, int]:
        return _affinity(goals[i], writes[j], elsewhere=elsewhere[j]), _agreeing(goals[i].goal, writes[j])

    levels = range(max((len(pair.goal.arguments) for pair in goals), default=0), -1, -1)
    for rank in range(RANKS):
        candidates = _Candidates(rank, [(j, writes[j], elsewhere[j]) for j in range(len(writes)) if j not in matched])
        for level, (i, pair) in product(levels, enumerate(goals)):
            for j in candidates.of(pair, level, matched) if i not in assigned else ():
                affinity, agreeing = match(i, j)
                if affinity == rank and agreeing >= level:
                    assigned[i] = j
                    matched.add(j)
                    break
    pairs = [replace(pair, write=writes[assigned[i]] if i in assigned else None) for i, pair in enumerate(goals)]
    return pairs, [write for j, write in enumerate(writes) if j not in matched]


class _Candidates:
    """Writes that may stand for a goal with one affinity, found by the tool, record and arguments that they share.

    Most pairs are never looked at, so that the time does not grow with the square of the number of writes.
    """

    def __init__(self, rank: int, writes: Iterable[tuple[int, Act, bool]]) -> None:
        self.rank = rank
        self.buckets: dict[tuple[object, tuple[str, ...]], dict[tuple[object, ...], deque[int]]] = {}
        self.groups = defaultdict[object, list[tuple[int, JsonObject]]](list)
        for j, write, elsewhere in writes:
            self.groups[self.group(write, elsewhere)].append((j, _coarse_items(write.arguments)))

    def group(self, act: Act, elsewhere: bool) -> object:
        substitute = self.rank in (2, 3)
        record = (elsewhere, *sorted(act.record)) if substitute else frozenset(_coarse_items(act.record).items())
        return act.tool if self.rank in (0, 2) else None, record

    def of(self, pair: Pair, level: int, matched: Collection[int]) -> Iterator[int]:
        """Those that are not matched and may have as many arguments in common with the goal, in their order."""
        names = [name for name in pair.goal.arguments if pair.goal.compared is None or name in pair.goal.compared]
        least = level - len(pair.goal.arguments) + len(names)
        queues: list[deque[int]] = []
        if 0 <= least <= len(names) and (self.rank not in (1, 3) or pair.guards):
            values = _coarse_items(pair.goal.arguments)
            for group in {self.group(pair.goal, elsewhere) for elsewhere in (True, not pair.derived)}:
                few = comb(len(names), least) <= len(self.groups.get(group, ()))
                for shared in combinations(names, least) if few else [()]:
                    queues.append(self.bucket(group, shared).get(tuple(values[name] for name in shared), deque()))
        for bucket in queues:
            while bucket and bucket[0] in matched:
                bucket.popleft()
        return (j for j in merge(*queues) if j not in matched)

    def bucket(self, group: object, names: tuple[str, ...]) -> dict[tuple[object, ...], deque[int]]:
        """Writes of a group by the values of some of their arguments."""
        if (group, names) not in self.buckets:
            buckets = self.buckets[group, names] = defaultdict[tuple[object, ...], deque[int]](deque)
            for j, values in self.groups.get(group, ()):
                buckets[tuple(values.get(name) for name in names)].append(j)
        return self.buckets[group, names]


def _coarse(value: object) -> object:
    """Return one and the same for values that come to the same, and sometimes for others."""
    if isinstance(value, list):
        plain = _plain(value)
        return frozenset(Counter(map(number_of, value)).items()) if plain else tuple(map(_coarse, value))
    return Mapping if isinstance(value, Mapping) else number_of(value)


def _coarse_items(values: JsonObject) -> dict[str, object]:
    return {name: _coarse(value) for name, value in values.items()}


def _hashable(value: object) -> object:
    if isinstance(value, Mapping):
        return frozenset((name, _hashable(inner)) for name, inner in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _agreeing(goal: Act, write: Act) -> int:
    return len(goal.arguments) - len(differing(goal, write))


def _affinity(pair: Pair, write: Act, *, elsewhere: bool) -> int | None:
    """Rank how surely the write stands for the goal: 0 is surest, None is not at all.

    A write `elsewhere` is a substitute: on a record that the reference does not treat, or for a record that had to be
    derived and was picked wrongly. Treating a record twice is no substitute for one that the user named: that one was
    left out.
    """
    # Keys of another name are a record of another kind.
    alike = write.record.keys() == pair.goal.record.keys()
    same_record, same_tool = alike and same(pair.goal.record, write.record), write.tool == pair.goal.tool
    substitute = alike and (elsewhere or bool(pair.derived))
    cases = (
        same_record and same_tool,
        same_record and bool(pair.guards),
        same_tool and substitute,
        # Where the record decides on the operation, a wrong record may bring a wrong one with it.
        substitute and bool(pair.guards),
        same_record and bool(write.record),
    )
    return next((rank for rank, holds in enumerate(cases) if holds), None)


class Story:
    """One rollout read beside its reference.

    `acts` and `expected` are the calls of the rollout and of the reference, `pairs` and `extras` the aligned writes
    and those of the rollout that stand for nothing (refused calls are no writes), `user` all that the user said,
    `last` the index of the assistant's last message, `final` and `expected_final` the last message of the rollout
    and of the reference where it speaks to the user; `informs` are the values that the reference says must be told.
    Without a reference (`has_reference` is false) nothing is missing and nothing is extra. Of the task's data nothing
    is looked at but the benchmark's own `milestones`, each with how far it was reached.
    """

    def __init__(self, rollout: Rollout, toolbox: Toolbox) -> None:
        self.toolbox = toolbox
        self.messages, self.reference = rollout.messages, rollout.reference
        self.has_reference = bool(self.reference)
        self.acts, self.expected = acts_of(self.messages, toolbox), acts_of(self.reference, toolbox)
        self.user = "\n".join(text_of(m.get("content") or "") for m in self.messages if m["role"] == "user")
        self.writes = [act for act in self.acts if act.kind == "write" and not act.failed]
        self.pairs, self.extras = align(_goals(self.expected, self.user), self.writes if self.has_reference else [])
        self.last = max((index for index, m in enumerate(self.messages) if m["role"] == "assistant"), default=0)
        self.final = _reply(self.messages[self.last]) if self.messages else None
        ending = self.reference[-1] if self.has_reference else {"role": ""}
        self.informs = [text_of(value) for value in ending.get("informs", [])]
        # A message that stands for values to be told is no model of how to word them.
        self.expected_final = None if "informs" in ending else _reply(ending)
        parts, entries = rollout.score.parts if rollout.score else {}, rollout.task.data.get("milestones")
        milestones = entries if isinstance(entries, list) else []
        self.milestones: list[tuple[JsonObject, float]] = [
            (milestone, parts[f"milestone {number}"])
            for number, milestone in enumerate(milestones, start=1)
            if f"milestone {number}" in parts
            and isinstance(milestone, dict)
            and isinstance(milestone.get("tool", ""), str)
            and isinstance(milestone.get("arguments") or {}, dict)
        ]

    def user_before(self, act: Act) -> str:
        """All that the user said before a call."""
        messages = self.messages[: act.message]
        return "\n".join(text_of(m.get("content") or "") for m in messages if m["role"] == "user")

    def read_before(self, write: Act, names: Iterable[str], lookups: Sequence[Act] = ()) -> bool:
        """Tell if the record under each of these key arguments of the write was read in an earlier message, by its key
        or in the result of another call; as one of the look-ups of the reference does, where they are given."""
        earlier = [act for act in self.acts if not act.failed and act.message < write.message]
        return all(any(self._shows(act, name, write.record[name], lookups) for act in earlier) for name in names)

    def _shows(self, act: Act, name: str, value: object, lookups: Sequence[Act]) -> bool:
        """Tell whether a call returned the record of this key: it asked for it, and for the same of it where it uses a
        tool of the look-ups; or the result is or lists such records, with what a look-up returns of them."""
        if act.kind == "read" and same(act.record.get(name), value):
            peers = [lookup for lookup in lookups if lookup.tool == act.tool]
            return not peers or any(same(lookup.content, act.content) for lookup in peers)
        # A record is more than its key.
        results = act.result if isinstance(act.result, list) else [act.result]
        records = [entry for entry in results if isinstance(entry, Mapping) and len(entry) > 1]
        needs = [self.toolbox.fields.get(lookup.tool, frozenset[str]()) for lookup in lookups] or [frozenset[str]()]
        return any(
            same(record.get(name), value) and any(fields <= record.keys() for fields in needs) for record in records
        )

    def has_looked(self, pair: Pair) -> bool:
        """Tell whether the look-ups of the reference before a write were made before the one that stands for it."""
        names = [name for name in pair.guards if pair.write is not None and name in pair.write.record]
        return pair.write is None or self.read_before(pair.write, names, pair.lookups)

    def overrules(self, act: Act) -> bool:
        """Tell if the reference reads the act's record and then decides on other operations there."""
        pairs = [pair for pair in self.pairs if same(pair.goal.record, act.record)]
        return any(pair.guards for pair in pairs) and act.tool not in {pair.goal.tool for pair in pairs}

    def put_to_user(self, write: Act) -> bool:
        """Tell if the assistant spoke of the write's record to the user before it made the write, or had just asked the
        user whether to go ahead."""
        replies = [m["content"] for m in self.messages[: write.message] if is_reply(m)]
        return bool(replies) and (says("\n".join(replies), write.record) or asks_consent(replies[-1]))

    def first_telling(self, value: str) -> int | None:
        """The first message in which the assistant tells the value, as tau2 reads it: part of the text, without regard
        to case and commas."""
        expected = value.lower().replace(",", "")
        for index, message in enumerate(self.messages):
            text = text_of(message.get("content") or "") if message["role"] == "assistant" else ""
            if message["role"] == "assistant" and expected in text.lower().replace(",", ""):
                return index
        return None

    def informed(self, values: Iterable[str]) -> list[str]:
        """Those of the values that the reference's last message tells and the user has not said."""
        return [value for value in values if says(self.expected_final or "", value) and not says(self.user, value)]


def handover_of(acts: Iterable[Act]) -> Act | None:
    """The first hand-over among calls."""
    return next((act for act in acts if act.kind == "handover"), None)


def _reply(message: Message) -> str | None:
    return message["content"] if is_reply(message) else None
