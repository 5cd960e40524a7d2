"""Alignment: pairs each write of a rollout with a write of its reference (a goal).

- A write without a goal is extra.
- A goal without a write is missing.
- A pair can differ in record, tool or content.
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
    """A write of the reference with the matching write of the rollout.

    Attributes:
        goal: the write of the reference.
        derived: key arguments of the goal whose value no user message states.
        lookups: the reference's reads of the record since its previous write; if there are none, all earlier reads.
        guards: key arguments that the goal shares with these look-ups.
        write: the matching write of the rollout; None if it is missing.
    """

    goal: Call
    derived: tuple[str, ...]
    lookups: tuple[Call, ...]
    guards: tuple[str, ...]
    write: Call | None = None


def goal_pairs(reference: Sequence[Call], user: str) -> list[Pair]:
    """Return the writes of a reference, each with the look-ups before it. `user` is the text of all user messages."""
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

    Identical calls are paired first. Then pairs are chosen by `_affinity`, by number of equal arguments, and by order.

    Returns:
        The pairs, and the extra writes.
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
    """Pair identical calls in order, without comparing all calls with each other."""
    places = defaultdict[object, deque[int]](deque)
    for j, write in enumerate(writes):
        places[write.tool, _hashable(write.arguments)].append(j)
    pairs: dict[int, int] = {}
    for i, pair in enumerate(goals):
        if pair.goal.record and (queue := places[pair.goal.tool, _hashable(pair.goal.arguments)]):
            pairs[i] = queue.popleft()
    return pairs


def _coarse(value: object) -> object:
    """Return a key that is the same for equivalent arguments. Different arguments may also share a key."""
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
    """Rank how well the write matches the goal: 0 is best, None is no match.

    A write on another record can substitute for the goal in two cases:

    - It is `elsewhere`: the reference does not write on its record.
    - The goal's record had to be derived.

    A second write on one record does not substitute for a record that the user named. That record is missing.
    """
    # Records with different key names are of different kinds.
    alike = write.record.keys() == pair.goal.record.keys()
    same_record, same_tool = alike and same(pair.goal.record, write.record), write.tool == pair.goal.tool
    substitute = alike and (elsewhere or bool(pair.derived))
    cases = (
        same_record and same_tool,
        same_record and bool(pair.guards),
        same_tool and substitute,
        # If the operation depends on the record, a wrong record may cause a wrong operation.
        substitute and bool(pair.guards),
        same_record and bool(write.record),
    )
    return next((rank for rank, holds in enumerate(cases) if holds), None)
