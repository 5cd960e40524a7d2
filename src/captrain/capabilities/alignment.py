"""Alignment of a rollout's writes with those of its reference: which call stands for which.

Every mismatch has one place. A write that stands for nothing is extra. A goal for which nothing stands is missing. A
pair that differs differs in record, tool or content.
"""

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from captrain.capabilities.calls import Call
from captrain.capabilities.text import are_plain, number_of, same, says
from captrain.capabilities.toolbox import CHANGES
from captrain.records import JsonObject


@dataclass(frozen=True)
class Pair:
    """One write of the reference and the write of the rollout that stands for it.

    Attributes:
        goal: the write of the reference.
        derived: its key arguments whose value no user message states.
        lookups: what the reference reads of the record since its write before, or else earlier.
        guards: its key arguments by which it does so.
        write: the write of the rollout; None: missing.
    """

    goal: Call
    derived: tuple[str, ...]
    lookups: tuple[Call, ...]
    guards: tuple[str, ...]
    write: Call | None = None


def goal_pairs(reference: Sequence[Call], user: str) -> list[Pair]:
    """The writes of a reference, each with the look-ups before it."""
    writes = [act for act in reference if act.kind in CHANGES]
    names, messages = {name for act in writes for name in act.record}, [act.message for act in writes]
    reads = defaultdict[tuple[str, object], list[int]](list)
    for k, act in enumerate(reference):
        if act.kind == "read":
            for name in names:
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


def _shared_keys(lookup: Call, act: Call) -> list[str]:
    return [name for name, value in act.record.items() if same(lookup.record.get(name), value)]


def align(goals: Sequence[Pair], writes: Sequence[Call]) -> tuple[list[Pair], list[Call]]:
    """Pair each write of the rollout with at most one of the reference.

    The surest pairs (`_affinity`) come first, then those with more equal arguments, then the order of both. Returns the
    pairs, and the writes that stand for nothing.
    """
    records = {_hashable(pair.goal.record) for pair in goals}
    assigned, matched = _equal_pairs(goals, writes), set[int]()
    matched.update(assigned.values())
    ranked = list[tuple[int, int, int, int]]()
    for i, pair in enumerate(goals):
        for j, write in enumerate(writes if i not in assigned else []):
            if j not in matched:
                rank = _affinity(pair, write, elsewhere=_hashable(write.record) not in records)
                ranked += [(rank, -_agreeing(pair.goal, write), i, j)] if rank is not None else []
    for _, _, i, j in sorted(ranked):
        if i not in assigned and j not in matched:
            assigned[i] = j
            matched.add(j)
    pairs = [replace(pair, write=writes[assigned[i]] if i in assigned else None) for i, pair in enumerate(goals)]
    return pairs, [write for j, write in enumerate(writes) if j not in matched]


def _equal_pairs(goals: Sequence[Pair], writes: Sequence[Call]) -> dict[int, int]:
    """Pairs of the very same call, in order: they need no comparison with all others."""
    places = defaultdict[object, deque[int]](deque)
    for j, write in enumerate(writes):
        places[write.tool, _hashable(write.arguments)].append(j)
    pairs: dict[int, int] = {}
    for i, pair in enumerate(goals):
        if pair.goal.record and (queue := places[pair.goal.tool, _hashable(pair.goal.arguments)]):
            pairs[i] = queue.popleft()
    return pairs


def _coarse(value: object) -> object:
    """Return equal values for arguments that come to the same, and sometimes for others."""
    if isinstance(value, list):
        plain = are_plain(value)
        return frozenset(Counter(map(number_of, value)).items()) if plain else tuple(map(_coarse, value))
    return Mapping if isinstance(value, Mapping) else number_of(value)


def _coarse_items(values: JsonObject) -> dict[str, object]:
    return {name: _coarse(value) for name, value in values.items()}


def _hashable(value: object) -> object:
    if isinstance(value, Mapping):
        return frozenset((name, _hashable(inner)) for name, inner in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _agreeing(goal: Call, write: Call) -> int:
    return len(goal.arguments) - len(write.differing(goal))


def _affinity(pair: Pair, write: Call, *, elsewhere: bool) -> int | None:
    """Rank how surely the write stands for the goal: 0 is surest, None is not at all.

    A write `elsewhere` is a substitute: it is on a record that the reference does not treat, or in place of a record
    that had to be derived. To treat a record twice is no substitute for one that the user named: that one was left out.
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
