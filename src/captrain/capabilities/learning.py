"""Kinds of tools and keys of records, learnt from rollouts rather than read off the form of schemas.

What a tool does is taken from the first of these that knows: the user, the benchmark (`readOnlyHint`, its `kinds`), a
replay of references, the rollouts, the tool's name. A hand-over is declared or told by its name: to whatever is looked
at it is like any other call that ends a dialogue.

A key is an argument of a change whose value a look-up was told before, in references or in rollouts: it names what was
looked at, however many arguments the look-up takes and whatever it calls them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import product

from captrain.benchmarks import Replay, Worlds
from captrain.capabilities.calls import Call, calls_in
from captrain.capabilities.text import text_of
from captrain.capabilities.toolbox import Kind, Toolbox, kind_of
from captrain.contract import calls_of
from captrain.errors import InfrastructureError, UserError
from captrain.records import JsonObject, Message, Rollout, leaves

PASSES = 2
"""Rollouts that pass without a call before it is taken for a look-up: one may be a grader's slip."""
MOST_PLAYS = 6
"""References that are played to see what a tool does."""
VARIED = 3
"""Different answers by which a tool tells something, where a change says that it is done."""
PLAYS = 3
"""References in whose replay a tool changes nothing and is not missed before it is taken for a look-up."""
SHARE = 0.5
"""Share of the calls of a change, of those after a look-up, whose argument the look-up was told, of a key."""


def learn_toolbox(
    rollouts: Iterable[Rollout],
    tools: Sequence[JsonObject],
    worlds: Worlds | None = None,
    kinds: Mapping[str, str] | None = None,
) -> Toolbox:
    """Learn what tools do, and which arguments name records.

    Args:
        rollouts: of one environment or several; they are read a few times over, and none stays in memory.
        tools: their schemas.
        worlds: that their references are replayed in, and that declare what tools do.
        kinds: what a user says that tools do.
    """
    world = next((worlds.of(rollout) for rollout in rollouts), None) if worlds is not None else None
    declared = {**(world.kinds if world else {}), **(kinds or {})}
    toolbox, observed = Toolbox(tools, declared), _Observed()
    for rollout in rollouts:
        observed.add(rollout, toolbox)
    # Nobody passes without a change.
    tool_kinds: dict[str, str] = {
        tool: "read" for tool in observed.telling - observed.closing if observed.spared[tool] >= PASSES
    }
    deciding = dict.fromkeys(observed.deciding, "read")
    if worlds is not None and world is not None:
        replayed = _kinds_by_replay(rollouts, worlds, toolbox.schemas.keys() - toolbox.declared.keys())
        # A look-up may leave a trace that a check asks for, but a change tells little.
        tool_kinds |= {tool: kind for tool, kind in replayed.items() if kind == "read" or tool not in observed.telling}
        deciding = {tool: kind for tool, kind in deciding.items() if replayed.get(tool) != "write"}
    tool_kinds = {t: kind for t, kind in (deciding | tool_kinds).items() if kind_of(t) != "handover"} | toolbox.declared
    return Toolbox(tools, tool_kinds, _keys(rollouts, Toolbox(tools, tool_kinds, {}, observed.fields)), observed.fields)


Feed = tuple[str, str, str]
"""A tool whose answer gives a value, the tool of a later call that takes it, and the argument."""


@dataclass
class _Observed:
    """Evidence of tools in rollouts: the fields that each has always returned, its answers (so many as matter) without
    what it was told, and in how many rollouts that passed it was left out where the reference calls it, or without a
    reference came before another; `closing` are the tools that such a rollout called last, as it does a change.

    `fed` counts the rollouts that passed in which an argument of a call had its value from a tool's answer, `misled`
    the failed ones that leave the tool out and give the argument another value than the reference, and `final` are the
    tools with which a reference ends, or a rollout that passed."""

    fields: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    answers: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    spared: Counter[str] = field(default_factory=Counter[str])
    closing: set[str] = field(default_factory=set[str])
    fed: Counter[Feed] = field(default_factory=Counter[Feed])
    misled: Counter[Feed] = field(default_factory=Counter[Feed])
    final: set[str] = field(default_factory=set[str])

    def add(self, rollout: Rollout, toolbox: Toolbox) -> None:
        """Count a rollout in."""
        acts = calls_in(rollout.messages, toolbox, ("assistant",))
        for act in [act for act in acts if not act.failed]:
            names, answers = frozenset(act.result if isinstance(act.result, dict) else ()), self.answers
            self.fields[act.tool] = self.fields.get(act.tool, names) & names
            if len(answers.setdefault(act.tool, set())) < VARIED:
                answers[act.tool].add(" ".join(sorted({*leaves(act.result)} - {*leaves(act.arguments)})))
        if rollout.outcome == "passed" and acts:
            self.spared.update(_tools(rollout.reference) - _tools(rollout.messages))
            if not rollout.reference:
                self.spared.update({act.tool for act in acts} - {acts[-1].tool})
                self.closing.add(acts[-1].tool)
            self.fed.update(_fed(acts))
            self.final.add(acts[-1].tool)
        if goals := calls_in(rollout.reference, toolbox, ("assistant",)):
            self.final.add(goals[-1].tool)
            skipped = _tools(rollout.reference) - _tools(rollout.messages) if rollout.outcome == "failed" else ()
            for tool, (later, name) in product(skipped, _misled(acts, goals) if skipped else ()):
                self.misled[tool, later, name] += 1

    @property
    def telling(self) -> set[str]:
        """Tools that answer with values that they were not told, not the same ones each time."""
        return {tool for tool, answers in self.answers.items() if len(answers) >= VARIED}

    @property
    def deciding(self) -> set[str]:
        """Telling tools whose answer decides an argument of a later call that is made, with another value, without
        them: what a change has created, a call is refused without."""
        feeds = [feed for feed, count in self.misled.items() if min(count, self.fed[feed]) >= PASSES]
        return {tool for tool, _, _ in feeds} & self.telling - self.final


def _fed(acts: Sequence[Call]) -> set[Feed]:
    """Feeds by values that a tool was not told itself."""
    feeds, sources = set[Feed](), dict[str, set[str]]()
    for act in [act for act in acts if not act.failed]:
        for name, value in act.arguments.items():
            feeds |= {(tool, act.tool, name) for leaf in leaves(value) for tool in sources.get(leaf, ())}
        for leaf in {*leaves(act.result)} - {*leaves(act.arguments)}:
            sources.setdefault(leaf, set()).add(act.tool)
    return feeds


def _misled(acts: Sequence[Call], goals: Sequence[Call]) -> set[tuple[str, str]]:
    """Tools of the reference that took a value which it gives them nowhere, with the argument."""
    due, actual = (
        {(act.tool, name, text_of(value)) for act in side if not act.failed for name, value in act.arguments.items()}
        for side in (goals, acts)
    )
    names = {(tool, name) for tool, name, _ in due}
    return {(tool, name) for tool, name, _ in actual - due} & names


def _tools(messages: Iterable[Message]) -> set[str]:
    return {tool for message in messages if message["role"] == "assistant" for tool, _ in calls_of(message)}


def _kinds_by_replay(rollouts: Iterable[Rollout], worlds: Worlds, unknown: Set[str]) -> dict[str, Kind]:
    """Kinds that replays of references show: without a change the check fails; what leaves the world as it is, and is
    not missed, looks up. What a world merely keeps a record of, such as pages that were read, shows neither."""
    idle, tries, tasks = Counter[str](), Counter[str](), set[str]()
    kinds: dict[str, Kind] = {}
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
            continue  # a world that takes no such calls shows nothing of tools; its rollouts say why
        changing = {call.tool for call, changed in zip(world.reference, whole.changed, strict=True) if changed}
        if not whole.passed:
            continue
        for tool, trial in zip(pending, trials, strict=True):
            idle[tool] += tool not in changing
            if not trial.passed or idle[tool] >= PLAYS:
                kinds[tool] = "read" if trial.passed else "write"
    return kinds


Flow = tuple[str, str, str, bool]
"""The tool of a change, its argument, the argument of a look-up that was told the same, and whether that returns an
object: such a look-up opens a record, where one that returns a list or a bare value searches for it."""


def _keys(rollouts: Iterable[Rollout], toolbox: Toolbox) -> dict[str, str]:
    """Names of key arguments, of changes and of the look-ups that were told the same values, each with the one that all
    of its kind of record go by. What a search was told is no key where a change has one that opens a record; where
    neither shows anything, names must do."""
    sources, tools = (Counter[Flow](), Counter[Flow]()), set[str]()
    for rollout in rollouts:
        for flows, messages in zip(sources, (rollout.reference, rollout.messages), strict=True):
            flows.update(_flows(calls_in(messages, toolbox, ("assistant",)), toolbox))
            tools |= _tools(messages)
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


def _flows(acts: Sequence[Call], toolbox: Toolbox) -> Iterator[Flow]:
    """Flows into each change, and of each change after a look-up its tool alone. Only a text is recognized under
    another name."""
    names_by_value: dict[str, set[tuple[str, bool]]] = {}
    for act in acts:
        values = {name: value for name, value in act.arguments.items() if value and isinstance(value, str | int)}
        if act.kind == "read":
            for name, value in values.items():
                names_by_value.setdefault(str(value), set()).add((name, bool(toolbox.fields.get(act.tool))))
        elif act.kind == "write" and names_by_value:
            yield act.tool, "", "", False
            for name, value in values.items():
                for source, opens in names_by_value.get(str(value), ()):
                    if source == name or isinstance(value, str):
                        yield act.tool, name, source, opens
