"""A rollout beside its reference solution: which call stands for which, read from messages and tool schemas alone.

Nothing here names a domain: tools are read-only or not by the verb in their name, and argument names that several
tools share are taken for the keys of records; the other arguments are content. Each write of the rollout is aligned
with one write of the reference, so that every mismatch has one home: what stands for nothing is extra, what nothing
stands for is missing, and a pair that differs differs in record, tool or content.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from captrain.contract import calls_of
from captrain.records import Message, Rollout

READS = {
    "calculate", "check", "compare", "count", "describe", "fetch", "find", "get", "list", "look", "lookup", "query",
    "read", "retrieve", "search", "show", "view",
}  # fmt: skip
HANDOVERS = {"escalate", "handoff", "handover"}
COLLEAGUES = {"agent", "agents", "human", "humans", "operator", "specialist", "support", "supervisor"}
CALL_MARKS = ("<tool_call", "</tool_call")

Kind = Literal["read", "write", "handover"]


@cache
def kind_of(tool: str) -> Kind:
    """What calling a tool does, told by the words of its name: a look-up, a hand-over to a colleague, or a write."""
    words = re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", tool).lower())
    if HANDOVERS & {*words} or ("transfer" in words and COLLEAGUES & {*words}):
        return "handover"
    return "read" if words and words[0] in READS else "write"


class Toolbox:
    """What the schemas tell of the tools: `keys` are the argument names that several tools share."""

    def __init__(self, tools: Iterable[dict[str, Any]]) -> None:
        functions = [tool["function"] for tool in tools]
        self.schemas: dict[str, dict[str, Any]] = {one["name"]: one.get("parameters") or {} for one in functions}
        shared = Counter(name for schema in self.schemas.values() for name in schema.get("properties", {}))
        self.keys = frozenset(name for name, count in shared.items() if count > 1)

    def accepts(self, tool: str, arguments: Mapping[str, Any]) -> bool:
        """Whether the tool exists and the argument names are those of its schema."""
        schema = self.schemas.get(tool)
        return schema is not None and {*schema.get("required", [])} <= {*arguments} <= {*schema.get("properties", {})}


@dataclass(frozen=True)
class Act:
    """One tool call: `at` is the index of its message, `record` its key arguments, `content` its other arguments;
    `failed` when it was malformed or its result reports an error."""

    at: int
    tool: str
    kind: Kind
    record: dict[str, Any]
    content: dict[str, Any]
    failed: bool

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name."""
        return {**self.record, **self.content}

    def __str__(self) -> str:
        return f"{self.tool}({', '.join(text_of(value) for value in self.arguments.values())})"


@dataclass(frozen=True)
class Pair:
    """One write of the reference and the write of the rollout that stands for it (None: missing).

    `derived` are the reference's key arguments whose value no user message states; `guards` its key arguments whose
    record the reference reads before, with `guard_tools`.
    """

    goal: Act
    derived: tuple[str, ...]
    guards: tuple[str, ...]
    guard_tools: tuple[str, ...]
    write: Act | None = None


def text_of(value: Any) -> str:
    """A JSON value as a reader would quote it."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def leaves(value: Any) -> Iterator[str]:
    """The strings and numbers inside a JSON value, as text."""
    if isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(item)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)


def says(text: str, value: Any) -> bool:
    """Whether the text holds every string and number of the value as whole words; no for a value without any."""
    text, wanted = text.lower(), [leaf.lower() for leaf in leaves(value)]
    # Looking for the bare substring first spares most values a pattern of their own.
    return bool(wanted) and all(
        leaf in text and re.search(rf"(?<![\w#]){re.escape(leaf)}(?!\w)", text) for leaf in wanted
    )


def result_of(message: Message) -> Any:
    """What a tool message holds: JSON where it is JSON, else its text."""
    content = message.get("content") or ""
    try:
        return json.loads(content)
    except ValueError:
        return content


def reports_error(message: Message) -> bool:
    """Whether a tool message reports an error: by a flag, an `error` entry of its JSON, or how its text begins."""
    result = result_of(message)
    named = isinstance(result, Mapping) and bool(result.get("error"))
    begun = isinstance(result, str) and result.lower().startswith(("error", "traceback"))
    return bool(message.get("error")) or named or begun


def is_malformed(message: Message) -> bool:
    """An assistant message with the marks of a tool call left in its text: the call was not well formed."""
    return message["role"] == "assistant" and any(mark in (message.get("content") or "") for mark in CALL_MARKS)


def is_reply(message: Message) -> bool:
    """An assistant message that speaks to the user: words, and no call."""
    spoken = message["role"] == "assistant" and bool((message.get("content") or "").strip())
    return spoken and not message.get("tool_calls") and not is_malformed(message)


def acts_of(messages: Sequence[Message], toolbox: Toolbox) -> list[Act]:
    """All tool calls in order; the k-th call of a message is answered by the k-th message after it, if a tool's."""
    acts: list[Act] = []
    for at, message in enumerate(messages):
        for tool_index, (tool, arguments) in enumerate(calls_of(message), start=1):
            answer = messages[at + tool_index] if at + tool_index < len(messages) else {"role": ""}
            refused = answer["role"] == "tool" and reports_error(answer)
            record = {name: value for name, value in arguments.items() if name in toolbox.keys}
            content = {name: value for name, value in arguments.items() if name not in toolbox.keys}
            failed = refused or not toolbox.accepts(tool, arguments)
            acts.append(Act(at, tool, kind_of(tool), record, content, failed))
    return acts


def _goal(act: Act, reference: Sequence[Act], user: str) -> Pair:
    read = [
        (name, other.tool)
        for other in reference
        for name, value in act.record.items()
        if other.kind == "read" and other.at < act.at and other.record.get(name) == value
    ]
    derived = tuple(name for name, value in act.record.items() if not says(user, value))
    return Pair(act, derived, tuple(sorted({name for name, _ in read})), tuple(sorted({tool for _, tool in read})))


def align(goals: Sequence[Pair], writes: Sequence[Act]) -> tuple[list[Pair], list[Act]]:
    """Let each write of the rollout stand for at most one of the reference.

    Pairs are made from the surest on (`_affinity`), among equals those with more equal arguments first, then in the
    order of both. Returns the pairs, and the writes that stand for nothing.
    """
    records = [pair.goal.record for pair in goals]
    ranked = sorted(
        (affinity, -_agreeing(pair.goal, write), i, j)
        for i, pair in enumerate(goals)
        for j, write in enumerate(writes)
        if (affinity := _affinity(pair, write, records)) is not None
    )
    taken: dict[int, int] = {}
    for _, _, i, j in ranked:
        if i not in taken and j not in taken.values():
            taken[i] = j
    pairs = [
        Pair(pair.goal, pair.derived, pair.guards, pair.guard_tools, writes[taken[i]] if i in taken else None)
        for i, pair in enumerate(goals)
    ]
    return pairs, [write for j, write in enumerate(writes) if j not in taken.values()]


def _agreeing(goal: Act, write: Act) -> int:
    return sum(write.arguments.get(name) == value for name, value in goal.arguments.items())


def _affinity(pair: Pair, write: Act, records: Sequence[dict[str, Any]]) -> int | None:
    """How surely the write stands for the goal: 0 is surest, None is not at all.

    A write elsewhere is a substitute: on a record that the reference does not treat, or for a record that had to be
    derived and was picked wrongly. Treating a record twice is no substitute for one that the user named: that one was
    left out.
    """
    same_record, same_tool = write.record == pair.goal.record, write.tool == pair.goal.tool
    substitute = write.record not in records or bool(pair.derived)
    cases = (
        same_record and same_tool,
        same_record and bool(pair.guards),
        same_tool and substitute,
        substitute,
        same_record and bool(write.record),
    )
    return next((rank for rank, holds in enumerate(cases) if holds), None)


class Story:
    """One rollout read beside its reference; the task's data is not looked at.

    `acts` and `expected` are the calls of the rollout and of the reference, `pairs` and `extras` the aligned writes
    and those of the rollout that stand for nothing (refused calls are no writes), `user` all that the user said,
    `last` the index of the assistant's last message, `final` and `expected_final` the last message of the rollout
    and of the reference where it speaks to the user.
    """

    def __init__(self, rollout: Rollout, toolbox: Toolbox) -> None:
        self.messages, self.reference = rollout.messages, rollout.reference
        self.acts, self.expected = acts_of(self.messages, toolbox), acts_of(self.reference, toolbox)
        self.user = "\n".join(text_of(m.get("content") or "") for m in self.messages if m["role"] == "user")
        goals = [_goal(act, self.expected, self.user) for act in self.expected if act.kind == "write"]
        self.pairs, self.extras = align(goals, [act for act in self.acts if act.kind == "write" and not act.failed])
        self.last = max((at for at, m in enumerate(self.messages) if m["role"] == "assistant"), default=0)
        self.final = _reply(self.messages[self.last]) if self.messages else None
        self.expected_final = _reply(self.reference[-1]) if self.reference else None

    def read_before(self, write: Act, names: Iterable[str]) -> bool:
        """Whether the record under each of these key arguments of the write was read in an earlier message."""
        reads = [act for act in self.acts if act.kind == "read" and not act.failed and act.at < write.at]
        return all(any(read.record.get(name) == write.record[name] for read in reads) for name in names)

    def informed(self, values: Iterable[str]) -> list[str]:
        """Those of the values that the reference's last message tells and the user has not said."""
        return [value for value in values if says(self.expected_final or "", value) and not says(self.user, value)]


def _reply(message: Message) -> str | None:
    return message["content"] if is_reply(message) else None
