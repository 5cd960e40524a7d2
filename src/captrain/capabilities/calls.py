"""Tool calls of a rollout or of its reference, by the assistant or by a user with tools, and features of their order.

The order of calls may correlate with failure. Texts of several words are not compared, because two wordings can mean
the same.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from captrain.benchmarks import ToolKind
from captrain.capabilities.association import EVERY, Traits
from captrain.capabilities.text import (
    are_plain,
    is_error,
    is_value,
    number_of,
    occurs,
    result_of,
    same,
    squeezed,
    text_of,
    words_of,
)
from captrain.capabilities.toolbox import CHANGES, Toolbox
from captrain.contract import calls_of
from captrain.records import JsonObject, Message, Rollout, digest

QUOTED = 160
OF_USER = " (the user's)"
BY_BOTH = ("assistant", "user")


@dataclass(frozen=True)
class Call:
    """One tool call.

    Attributes:
        tool: its name.
        arguments: by name.
        by: "assistant" or "user".
        message: index of its message.
        place: its index in its list of calls.
        kind: what the tool does.
        failed: whether its result reports an error or, without a result, whether it does not fit the tool's schema.
        changed: whether it changed the world, as far as known.
        result: its result; None if unknown.
        record: the arguments that name records, by the common names of `Toolbox.keys`.
        content: the other arguments.
        compared: for a reference call, the names of the arguments that are compared; None: all.
        unsourced: names of the arguments whose value is in no earlier message. Only `sourced_calls` sets it.
    """

    tool: str
    arguments: JsonObject
    by: str = "assistant"
    message: int = 0
    place: int = 0
    kind: ToolKind = "write"
    failed: bool = False
    changed: bool = True
    result: object = None
    record: JsonObject = field(default_factory=dict[str, object])
    content: JsonObject = field(default_factory=dict[str, object])
    compared: tuple[str, ...] | None = None
    unsourced: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.tool}({', '.join(text_of(value) for value in self.arguments.values())})"
        return text if len(text) <= QUOTED else text[: QUOTED - 2] + "…)"

    @property
    def step(self) -> str:
        """The name of the tool, with a mark if the user calls it."""
        return self.tool + OF_USER * (self.by == "user")

    @property
    def values(self) -> dict[str, str]:
        """The arguments as text, by name. A digest replaces a long text."""
        texts = {name: text_of(value) for name, value in self.arguments.items()}
        return {k: text if is_value(text) else f"~{digest(self.arguments[k])}" for k, text in texts.items()}

    @property
    def names(self) -> list[str]:
        """Names of the arguments that are compared."""
        return [name for name in self.arguments if self.compared is None or name in self.compared]

    def equals(self, goal: "Call") -> bool:
        """Return whether both calls are by the same side, of the same tool, and with equal compared arguments."""
        return (self.by, self.tool) == (goal.by, goal.tool) and not self.differing(goal)

    def differing(self, goal: "Call") -> list[str]:
        """Return the names of the goal's compared arguments that have another value here. More arguments may exist."""
        names = goal.names
        wrong = [name for name in names if not same(goal.arguments[name], self.arguments.get(name))]
        lists = [name for name in names if isinstance(goal.arguments[name], list) and are_plain(goal.arguments[name])]
        lengths = {len(call.arguments[name]) for name in lists if name not in wrong for call in (goal, self)}
        if len(lists) > 1 and not {*lists} & {*wrong} and len(lengths) == 1:
            # Lists of equal length belong together item by item, so compare them as rows.
            rows = [
                Counter(zip(*(map(number_of, call.arguments[name]) for name in lists), strict=True))
                for call in (goal, self)
            ]
            wrong += lists if rows[0] != rows[1] else []
        return wrong


def make_call(
    toolbox: Toolbox,
    tool: str,
    arguments: Mapping[str, object],
    by: str,
    place: int,
    *,
    message: int = 0,
    failed: bool | None = None,
    result: object = None,
    compared: tuple[str, ...] | None = None,
) -> Call:
    """Make a call; the toolbox gives its kind and its keys. `failed` is None if the result is unknown."""
    kind = toolbox.kind(tool)
    return Call(
        tool,
        {**arguments},
        by,
        message,
        place,
        kind,
        bool(failed),
        failed is None or (kind in CHANGES and not failed),
        result,
        {toolbox.keys[name]: value for name, value in arguments.items() if name in toolbox.keys},
        {name: value for name, value in arguments.items() if name not in toolbox.keys},
        compared,
    )


def calls_in(
    messages: Sequence[Message], toolbox: Toolbox, roles: Collection[str] = BY_BOTH, *, are_goals: bool = False
) -> list[Call]:
    """Return the calls of these roles. The k-th tool message after a message answers its k-th call.

    Calls of a reference (`are_goals`) do not fail.
    """
    calls: list[Call] = []
    for index, message in enumerate(messages):
        entries = calls_of(message) if message["role"] in roles else []
        for number, (tool, arguments) in enumerate(entries):
            answer = messages[index + number + 1] if index + number + 1 < len(messages) else {"role": ""}
            is_answered = answer["role"] == "tool"
            result = result_of(answer) if is_answered else None
            # Trust the tool's answer more than the schema, which may be inferred from a few calls.
            failed = is_error(answer, result) if is_answered else not toolbox.accepts(tool, arguments)
            names = message["tool_calls"][number].get("compare")
            compared = None if names is None else tuple(names)
            place = len(calls)
            calls.append(
                make_call(
                    toolbox,
                    tool,
                    arguments,
                    message["role"],
                    place,
                    message=index,
                    failed=failed and not are_goals,
                    result=result,
                    compared=compared,
                )
            )
    return calls


def goals_in(rollout: Rollout, toolbox: Toolbox) -> list[Call]:
    """Return the calls of a rollout's reference, followed by those that its simulated user was supposed to make."""
    goals = calls_in(rollout.reference, toolbox, are_goals=True)
    for step in rollout.task.facts.user_calls:
        goals.append(make_call(toolbox, step.name, step.arguments, "user", len(goals)))
    return goals


def sourced(calls: Iterable[Call], messages: Sequence[Message]) -> list[Call]:
    """Return the calls, each with its unsourced arguments. Their values are in no earlier message."""
    texts = [squeezed(text_of(message.get("content") or "")) for message in messages]
    marked: list[Call] = []
    for call in calls:
        before, unsourced = texts[: call.message], list[str]()
        for name, value in call.arguments.items():
            words = words_of(value) if is_value(value) else []
            # Search each message by itself: joining all of them for every call takes quadratic time.
            if not all(any(occurs(text, word) for text in before) for word in words):
                unsourced.append(name)
        marked.append(replace(call, result=None, unsourced=tuple(unsourced)))
    return marked


def handover_in(calls: Iterable[Call]) -> Call | None:
    """Return the first transfer to a human; None if there is none."""
    return next((call for call in calls if call.kind == "handover"), None)


def order_traits(calls: list[Call]) -> Traits:
    """Collect features of calls: their order, repetitions, refusals, and values that are in no earlier message."""
    traits = Traits()
    first = {call.step: place for place, call in reversed([*enumerate(calls)])}
    last = {call.step: place for place, call in enumerate(calls)}
    earlier: dict[tuple[str, str], set[str]] = {}
    always: dict[tuple[str, str], set[str]] = {}
    for call in calls:
        for name, value in call.values.items():
            callers = earlier.setdefault((name, value), set())
            always[call.step, name] = always.get((call.step, name), callers) & callers
            callers.add(call.step)
    for x in first:
        peers = [call for call in calls if call.step == x]
        # The next command of a shell may be any other, so its success corrects nothing.
        failures = [call for call in peers if call.failed and call.kind != "environment"]
        traits.hold(("called", x), EVERY)
        traits.bases |= {("call", x)} | ({("refused", x)} if failures else set())
        if failures and not peers[-1].failed:
            traits.hold(("repaired", x), ("refused", x))
        if len({text_of(call.values) for call in peers}) == len(peers):
            traits.hold(("once", x), ("call", x))
        for y in first:
            if first[y] < first[x]:
                traits.hold(("after", x, y), ("call", x), first[x] - first[y])
            if last[y] > last[x]:
                traits.hold(("followed", x, y), ("call", x), last[y] - last[x])
    unsourced = {(call.step, name) for call in calls for name in call.unsourced}
    for (x, name), steps in always.items():
        traits.bases.add(("argument", x, name))
        if (x, name) not in unsourced:
            traits.hold(("sourced", x, name), ("argument", x, name))
        for y in steps - {x}:
            traits.hold(("same", x, y, name), ("argument", x, name), first[x] - first[y])
    return traits


def place_of(key: tuple[str, ...], calls: list[Call]) -> Call:
    """Return the call that shows an order feature or its absence.

    For `repaired` it is the last refused call of the tool, for `sourced` the first call with an unsourced value.
    Otherwise it is the first call of the tool, or the last call of the rollout if the tool was not called.
    """
    peers = [call for call in calls if call.step == key[1]]
    failures = [call for call in reversed(peers) if call.failed and key[0] == "repaired"]
    unsourced = [call for call in peers if key[0] == "sourced" and key[2] in call.unsourced]
    return [*failures, *unsourced, *peers, *calls[-1:]][0]
