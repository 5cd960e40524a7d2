"""Kinds of tools and keys of records, learnt from rollouts rather than read off the form of schemas.

What a tool does is taken from the first of these that knows: the user, the benchmark (`readOnlyHint`, its `kinds`), a
replay of references, the rollouts, the tool's name. A hand-over is declared or told by its name: to whatever is looked
at it is like any other call that ends a dialogue.

A key is an argument of a change whose value a look-up was told before: it names what was looked at, however many
arguments the look-up takes and whatever it calls them. Where references look up before they change, they say which;
else rollouts do.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from captrain.benchmarks import Replay, Worlds
from captrain.capabilities.alignment import Act, Kind, Toolbox, acts_of, kind_of, leaves
from captrain.contract import calls_of
from captrain.records import JsonObject, Message, Rollout

PASSES = 2
"""Rollouts that pass without a call before it is taken for a look-up: one may be a grader's slip."""
VARIED = 3
"""Different answers by which a tool tells something, where a change says that it is done."""
PLAYS = 3
"""References in whose replay a tool changes nothing before it is taken for a look-up."""
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

    Raises:
        InfrastructureError: the worker of a world failed.
    """
    world = next((worlds.of(rollout) for rollout in rollouts), None) if worlds is not None else None
    declared = {**(world.kinds if world else {}), **(kinds or {})}
    known = Toolbox(tools, declared)
    fields: dict[str, frozenset[str]] = {}
    shown: dict[str, str] = {**_kinds_in_log(rollouts, known, fields)}
    if worlds is not None and world is not None:
        shown |= _kinds_by_replay(rollouts, worlds, known.schemas.keys() - known.declared.keys())
    shown = {tool: kind for tool, kind in shown.items() if kind_of(tool) != "handover"} | {**known.declared}
    return Toolbox(tools, shown, _keys(rollouts, Toolbox(tools, shown, {}, fields)) or None, fields)


def _kinds_in_log(rollouts: Iterable[Rollout], toolbox: Toolbox, fields: dict[str, frozenset[str]]) -> dict[str, Kind]:
    """Look-ups that rollouts show: tools that answer with values that they were not told, not the same ones each time,
    and without which rollouts pass where their reference calls them. Nobody passes without a change. Into `fields` goes
    what tools have always returned."""
    passes, answers = Counter[str](), dict[str, set[str]]()
    for rollout in rollouts:
        acts = acts_of(rollout.messages, toolbox)
        for act in acts:
            results = answers.setdefault(act.tool, set())
            if not act.failed:
                names = frozenset(act.result if isinstance(act.result, dict) else ())
                fields[act.tool] = fields.get(act.tool, names) & names
            if not act.failed and len(results) < VARIED:
                results.add(" ".join(sorted({*leaves(act.result)} - {*leaves(act.arguments)})))
        if rollout.outcome == "passed" and acts:
            passes.update(_tools(rollout.reference) - _tools(rollout.messages))
    return {tool: "read" for tool, count in passes.items() if count >= PASSES and len(answers.get(tool, ())) >= VARIED}


def _tools(messages: Iterable[Message]) -> set[str]:
    return {tool for message in messages if message["role"] == "assistant" for tool, _ in calls_of(message)}


def _kinds_by_replay(rollouts: Iterable[Rollout], worlds: Worlds, unknown: Set[str]) -> dict[str, Kind]:
    """Kinds that replays of references show: what never changes anything looks up."""
    changes: dict[str, list[bool]] = {}
    played: set[str] = set()
    for rollout in rollouts:
        pending = {tool for tool in _tools(rollout.reference) & unknown if len(changes.get(tool, ())) < PLAYS}
        is_new = pending and rollout.task.id not in played and rollout.outcome != "error"
        if not is_new or (world := worlds.of(rollout)) is None:
            continue
        played.add(rollout.task.id)
        (outcome,) = world.play([Replay(world.reference, world.owed)])
        for call, changed in zip(world.reference, outcome.changed, strict=True):
            if outcome.passed and call.tool in pending:
                changes.setdefault(call.tool, []).append(changed)
    return {tool: "write" if any(seen) else "read" for tool, seen in changes.items() if any(seen) or len(seen) >= PLAYS}


Flow = tuple[str, str, str, bool]
"""The tool of a change, its argument, the argument of a look-up that was told the same, and whether that returns an
object: such a look-up opens a record, where one that returns a list or a bare value searches for it."""


def _keys(rollouts: Iterable[Rollout], toolbox: Toolbox) -> dict[str, str]:
    """Names of key arguments, of changes and of the look-ups that were told the same values, each with the one that all
    of its kind of record go by. What a search was told is no key where a change has one that opens a record."""
    expected, made = Counter[Flow](), Counter[Flow]()
    for rollout in rollouts:
        expected.update(_flows(acts_of(rollout.reference, toolbox), toolbox))
        made.update(_flows(acts_of(rollout.messages, toolbox), toolbox))
    shown = {tool for tool, *_ in expected}
    flows = expected + Counter({flow: count for flow, count in made.items() if flow[0] not in shown})
    keys: dict[str, str] = {}
    for tool in sorted({tool for tool, *_ in flows}):
        least = SHARE * flows[tool, "", "", False]
        steady = sorted(flow for flow, count in flows.items() if flow[0] == tool and flow[1] and count >= least)
        for _, name, source, _ in [flow for flow in steady if flow[3]] or steady:
            kind = next((keys[peer] for peer in (name, source) if peer in keys), name)
            keys |= {name: kind, source: kind}
    return keys


def _flows(acts: Sequence[Act], toolbox: Toolbox) -> Iterator[Flow]:
    """Flows into each change, and of each change after a look-up its tool alone. Only a text is recognized under
    another name."""
    told: dict[str, set[tuple[str, bool]]] = {}
    for act in acts:
        values = {name: value for name, value in act.arguments.items() if value and isinstance(value, str | int)}
        if act.kind == "read":
            for name, value in values.items():
                told.setdefault(str(value), set()).add((name, bool(toolbox.fields.get(act.tool))))
        elif act.kind == "write" and told:
            yield act.tool, "", "", False
            for name, value in values.items():
                for source, opens in told.get(str(value), ()):
                    if source == name or isinstance(value, str):
                        yield act.tool, name, source, opens
