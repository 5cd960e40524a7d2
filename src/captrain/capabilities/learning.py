"""What tools do and which arguments name records, learnt from rollouts instead of schemas.

The kind of a tool comes from the first source that knows it:

1. the user (`--tools-as`),
2. the benchmark (`readOnlyHint`, its `kinds`),
3. a replay of references,
4. effects in the rollouts,
5. the tool's whole name.

Otherwise the kind is "unknown". A transfer to a human must be declared or have a telling name: in rollouts it looks
like any other call that ends a dialogue.

Effects in rollouts:

- A read returns values that it was not given. Rollouts pass without it.
- A change only confirms. Rollouts end with it.
- An environment gets arguments that the agent wrote itself. It returns varied answers.

A key is an argument that names a record. It is an argument of a change whose value an earlier look-up took, in a
reference or a rollout. The look-up may have other arguments and may use another name for the key.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import product

from captrain.benchmarks import Replay, ToolKind, Worlds
from captrain.capabilities.calls import Call, calls_in
from captrain.capabilities.text import text_of
from captrain.capabilities.toolbox import CHANGES, Toolbox, kind_of
from captrain.contract import calls_of
from captrain.errors import InfrastructureError, UserError
from captrain.records import JsonObject, Message, Rollout, leaves

PASSES = 2
"""Tasks that must pass without a tool before it counts as a look-up. One alone may be a grader's error."""
MOST_PLAYS = 6
"""Maximum number of references that are replayed to learn what a tool does."""
VARIED = 3
"""Minimum number of different answers of a tool that returns information. A change only confirms."""
PLAYS = 3
"""Replayed references in which a tool must change nothing and not be missed, to count as a look-up."""
SHARE = 0.5
"""Minimum share of a change's calls in which a look-up took the argument's value, for the argument to be a key."""


def learn_toolbox(
    rollouts: Iterable[Rollout],
    tools: Sequence[JsonObject],
    worlds: Worlds | None = None,
    kinds: Mapping[str, ToolKind] | None = None,
) -> Toolbox:
    """Learn what tools do and which arguments name records.

    Args:
        rollouts: of one or several environments. They are read several times and not kept in memory.
        tools: their schemas.
        worlds: to replay their references in. They also declare what tools do.
        kinds: what tools do, as a user says.
    """
    world = next((worlds.of(rollout) for rollout in rollouts), None) if worlds is not None else None
    declared: dict[str, ToolKind] = {**(world.kinds if world else {}), **(kinds or {})}
    toolbox, observed = Toolbox(tools, declared), _ToolEvidence()
    for rollout in rollouts:
        observed.add(rollout, toolbox)
    tool_kinds = observed.kinds
    deciding: dict[str, ToolKind] = dict.fromkeys(observed.deciding, "read")
    if worlds is not None and world is not None:
        replayed = _kinds_by_replay(rollouts, worlds, toolbox.schemas.keys() - toolbox.declared.keys())
        # A look-up may leave a trace that a check asks for, but a change tells little.
        tool_kinds |= {
            tool: kind for tool, kind in replayed.items() if kind == "read" or tool not in observed.informative
        }
        deciding = {tool: kind for tool, kind in deciding.items() if replayed.get(tool) != "write"}
    known: dict[str, ToolKind] = {**deciding, **tool_kinds}
    learnt: dict[str, ToolKind] = {name: kind for name, kind in known.items() if kind_of(name) != "handover"}
    learnt |= toolbox.declared
    return Toolbox(
        tools, learnt, _keys(rollouts, Toolbox(tools, learnt, {}, observed.shared_fields)), observed.shared_fields
    )


Feed = tuple[str, str, str]
"""A tool that returns a value, the tool of a later call that takes it, and the argument."""


@dataclass
class _ToolEvidence:
    """Evidence on tools in rollouts.

    Attributes:
        shared_fields: tool -> fields that every answer has.
        distinct_answers: tool -> different answers, without the values that it was given; at most `VARIED`.
        passed_without: tool -> tasks that passed without it although the reference calls it or, without a reference, in
            which it was not the last call. Trials of one task count once, because one grader judges them all.
        last_unreferenced: tools that passed rollouts without a reference called last. A change is often the last call.
        passed_feeds: for each feed, the number of passed rollouts with it.
        failed_without: for each feed, the number of failed rollouts that skip the tool and give the argument another
            value than the reference.
        last: tools that a reference or a passed rollout calls last.
        calls: tool -> number of successful calls.
        own_text_calls: tool -> number of these calls with a text that no earlier message contains, so the agent wrote
            it.
    """

    shared_fields: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    distinct_answers: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    passed_without: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    last_unreferenced: set[str] = field(default_factory=set[str])
    passed_feeds: Counter[Feed] = field(default_factory=Counter[Feed])
    failed_without: Counter[Feed] = field(default_factory=Counter[Feed])
    last: set[str] = field(default_factory=set[str])
    own_text_calls: Counter[str] = field(default_factory=Counter[str])
    calls: Counter[str] = field(default_factory=Counter[str])

    def add(self, rollout: Rollout, toolbox: Toolbox) -> None:
        """Add the evidence of a rollout."""
        acts = calls_in(rollout.messages, toolbox, ("assistant",))
        for act in [act for act in acts if not act.failed]:
            names, answers = frozenset(act.result if isinstance(act.result, dict) else ()), self.distinct_answers
            self.shared_fields[act.tool] = self.shared_fields.get(act.tool, names) & names
            self.calls[act.tool] += 1
            texts = [text for text in leaves(act.arguments) if len(text.split()) > 1]
            are_known = all(_is_in_earlier_message(text, act, rollout) for text in texts)
            self.own_text_calls[act.tool] += bool(texts) and not are_known
            if len(answers.setdefault(act.tool, set())) < VARIED:
                answers[act.tool].add(" ".join(sorted({*leaves(act.result)} - {*leaves(act.arguments)})))
        if rollout.outcome == "passed" and acts:
            unneeded = _tools(rollout.reference) - _tools(rollout.messages)
            if not rollout.reference:
                unneeded = {act.tool for act in acts} - {acts[-1].tool}
                self.last_unreferenced.add(acts[-1].tool)
            for tool in unneeded:
                self.passed_without.setdefault(tool, set()).add(rollout.task.id)
            self.passed_feeds.update(_feeds(acts))
            self.last.add(acts[-1].tool)
        if due := [tool for tool, _ in _calls(rollout.reference)]:
            self.last.add(due[-1])
            skipped = {*due} - {act.tool for act in acts}
            if skipped and rollout.outcome == "failed":
                goals = calls_in(rollout.reference, toolbox, ("assistant",))
                for tool, (later, name) in product(skipped, _wrong_arguments(acts, goals)):
                    self.failed_without[tool, later, name] += 1

    @property
    def kinds(self) -> dict[str, ToolKind]:
        """The kinds that effects show. No rollout passes without a change, and a change only confirms."""
        kinds: dict[str, ToolKind] = {}
        for tool, called in self.calls.items():
            if kind_of(tool) == "environment":
                continue
            if tool in self.informative:
                is_own = 2 * self.own_text_calls[tool] >= called and kind_of(tool) != "write"
                is_read = tool not in self.last_unreferenced and len(self.passed_without.get(tool, ())) >= PASSES
                kinds |= {tool: "environment"} if is_own else {tool: "read"} if is_read else {}
            elif called >= VARIED and len(self.distinct_answers[tool]) == 1 and kind_of(tool) == "unknown":
                is_write = tool in self.last | self.last_unreferenced and tool not in self.passed_without
                kinds |= {tool: "write"} if is_write else {}
        return kinds

    @property
    def informative(self) -> set[str]:
        """Tools that return varying values that they were not given."""
        return {tool for tool, answers in self.distinct_answers.items() if len(answers) >= VARIED}

    @property
    def deciding(self) -> set[str]:
        """Read tools whose output sets a later argument.

        Rollouts that skip such a tool give the later call another value. If they skipped a change, it would be refused.
        """
        feeds = [feed for feed, count in self.failed_without.items() if min(count, self.passed_feeds[feed]) >= PASSES]
        return {tool for tool, _, _ in feeds} & self.informative - self.last


def _is_in_earlier_message(text: str, act: Call, rollout: Rollout) -> bool:
    """Return whether a message before the call contains the text."""
    return any(text in text_of(message.get("content") or "") for message in rollout.messages[: act.message])


def _feeds(acts: Sequence[Call]) -> set[Feed]:
    """Return the feeds from each tool's answer to later calls, for values that the tool was not given."""
    feeds, sources = set[Feed](), dict[str, set[str]]()
    for act in [act for act in acts if not act.failed]:
        for name, value in act.arguments.items():
            feeds |= {(tool, act.tool, name) for leaf in leaves(value) for tool in sources.get(leaf, ())}
        for leaf in {*leaves(act.result)} - {*leaves(act.arguments)}:
            sources.setdefault(leaf, set()).add(act.tool)
    return feeds


def _wrong_arguments(acts: Sequence[Call], goals: Sequence[Call]) -> set[tuple[str, str]]:
    """Return the (tool, argument) pairs of the reference to which the rollout gave another value."""
    due, actual = (
        {(act.tool, name, text_of(value)) for act in side if not act.failed for name, value in act.arguments.items()}
        for side in (goals, acts)
    )
    names = {(tool, name) for tool, name, _ in due}
    return {(tool, name) for tool, name, _ in actual - due} & names


def _calls(messages: Iterable[Message]) -> Iterator[tuple[str, JsonObject]]:
    """Yield tool and arguments of the assistant's calls."""
    return (call for message in messages if message["role"] == "assistant" for call in calls_of(message))


def _tools(messages: Iterable[Message]) -> set[str]:
    return {tool for tool, _ in _calls(messages)}


def _kinds_by_replay(rollouts: Iterable[Rollout], worlds: Worlds, unknown: Set[str]) -> dict[str, ToolKind]:
    """Learn kinds of tools by replaying references without each tool.

    If the check then fails, the tool is a write. If the check passes and the tool leaves the world unchanged in `PLAYS`
    references, the tool is a look-up. Some worlds also record look-ups, such as pages that were read: such a tool stays
    unknown.
    """
    if not unknown:
        return {}
    idle, tries, tasks = Counter[str](), Counter[str](), set[str]()
    kinds: dict[str, ToolKind] = {}
    for rollout in rollouts:
        open_tools = _tools(rollout.reference) & unknown - kinds.keys()
        pending = sorted(tool for tool in open_tools if tries[tool] < MOST_PLAYS)
        is_new = pending and rollout.task.id not in tasks and rollout.outcome != "error"
        if not is_new:
            continue
        tasks.add(rollout.task.id)
        tries.update(pending)
        try:
            if (world := worlds.of(rollout)) is None:
                continue
            partial = [tuple(call for call in world.reference if call.tool != tool) for tool in pending]
            whole, *trials = world.play([Replay(calls, world.owed) for calls in (world.reference, *partial)])
        except (UserError, InfrastructureError):
            continue  # a world that rejects these calls is no evidence; its rollouts say why
        changing = {call.tool for call, changed in zip(world.reference, whole.changed, strict=True) if changed}
        if not whole.passed:
            continue
        for tool, trial in zip(pending, trials, strict=True):
            idle[tool] += tool not in changing
            if not trial.passed or idle[tool] >= PLAYS:
                kinds[tool] = "read" if trial.passed else "write"
    return kinds


Flow = tuple[str, str, str, bool]
"""The tool of a change, its argument, the argument of a look-up with the same value, whether that returns an object.

A look-up that returns an object opens a record; one that returns a list or a bare value searches."""


def _keys(rollouts: Iterable[Rollout], toolbox: Toolbox) -> dict[str, str]:
    """Return key arguments of changes and look-ups, each with the common name of its kind of record.

    An argument of a search is a key only if no argument of the change opens a record. If no values show a key, shared
    argument names decide.
    """
    sources, tools = (Counter[Flow](), Counter[Flow]()), set[str]()
    for rollout in rollouts:
        for flows, messages in zip(sources, (rollout.reference, rollout.messages), strict=True):
            calls = [*_calls(messages)]
            flows.update(_flows(calls, toolbox))
            tools |= {tool for tool, _ in calls}
    changes = {tool for flows in sources for tool, *_ in flows}
    keys: dict[str, str] = {}
    for tool in sorted(changes):
        steady = [
            flow
            for flows in sources
            for flow, count in sorted(flows.items())
            if flow[0] == tool and flow[1] and count >= SHARE * flows[tool, "", "", False]
        ]
        for _, name, source, _ in [flow for flow in steady if flow[3]] or steady:
            kind = next((keys[peer] for peer in (name, source) if peer in keys), name)
            keys |= {name: kind, source: kind}
    return keys | toolbox.shared_names(keys, tools, changes)


def _flows(calls: Iterable[tuple[str, JsonObject]], toolbox: Toolbox) -> Iterator[Flow]:
    """Yield the flows into each change, and one flow with empty names per change after a look-up, for counting.

    Numbers are matched only under the same argument name, text under any name.
    """
    names_by_value: dict[str, set[tuple[str, bool]]] = {}
    for tool, arguments in calls:
        kind = toolbox.kind(tool)
        values = {name: value for name, value in arguments.items() if value and isinstance(value, str | int)}
        if kind == "read":
            for name, value in values.items():
                names_by_value.setdefault(str(value), set()).add((name, bool(toolbox.fields.get(tool))))
        elif kind in CHANGES and names_by_value:
            yield tool, "", "", False
            for name, value in values.items():
                for source, opens in names_by_value.get(str(value), ()):
                    if source == name or isinstance(value, str):
                        yield tool, name, source, opens
