"""Alignment of a rollout's writes with those of its reference: which call stands for which.

Every mismatch has one place. A write that stands for nothing is extra. A goal for which nothing stands is missing. A
pair that differs differs in record, tool or content.
"""

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import merge
from itertools import combinations, product
from math import comb

from captrain.capabilities.calls import Call
from captrain.capabilities.text import are_plain, number_of, same, says
from captrain.capabilities.toolbox import CHANGES
from captrain.records import JsonObject

RANKS = 5
"""Degrees of `_affinity`."""


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
    elsewhere = [_hashable(write.record) not in records for write in writes]
    assigned, matched = dict[int, int](), set[int]()

    @cache
    def match(i: int, j: int) -> tuple[int | None, int]:
        return _affinity(goals[i], writes[j], elsewhere=elsewhere[j]), _agreeing(goals[i].goal, writes[j])

    levels = range(max((len(pair.goal.arguments) for pair in goals), default=0), -1, -1)
    for rank in range(RANKS):
        candidates = _Candidates(rank, [(j, writes[j], elsewhere[j]) for j in range(len(writes)) if j not in matched])
        for level, (i, pair) in product(levels, enumerate(goals)):
            if i in assigned:
                continue
            for j in candidates.of(pair, level, matched):
                affinity, agreeing = match(i, j)
                if affinity == rank and agreeing >= level:
                    assigned[i] = j
                    matched.add(j)
                    break
    pairs = [replace(pair, write=writes[assigned[i]] if i in assigned else None) for i, pair in enumerate(goals)]
    return pairs, [write for j, write in enumerate(writes) if j not in matched]


class _Candidates:
    """Writes that may stand for a goal with one affinity, indexed by tool, record and arguments.

    Most pairs are never compared, so the time does not grow with the square of the number of writes.
    """

    def __init__(self, rank: int, writes: Iterable[tuple[int, Call, bool]]) -> None:
        self.rank = rank
        self.buckets: dict[tuple[object, tuple[str, ...]], dict[tuple[object, ...], deque[int]]] = {}
        self.groups = defaultdict[object, list[tuple[int, JsonObject]]](list)
        for j, write, elsewhere in writes:
            self.groups[self.group(write, elsewhere)].append((j, _coarse_items(write.arguments)))

    def group(self, act: Call, elsewhere: bool) -> object:
        substitute = self.rank in (2, 3)
        record = (elsewhere, *sorted(act.record)) if substitute else frozenset(_coarse_items(act.record).items())
        return act.tool if self.rank in (0, 2) else None, record

    def of(self, pair: Pair, level: int, matched: Collection[int]) -> Iterator[int]:
        """Unmatched writes that may share so many arguments with the goal, in their order."""
        names = [name for name in pair.goal.arguments if pair.goal.compared is None or name in pair.goal.compared]
        least = level - len(pair.goal.arguments) + len(names)
        queues: list[deque[int]] = []
        if 0 <= least <= len(names) and (self.rank not in (1, 3) or pair.guards):
            values = _coarse_items(pair.goal.arguments)
            for group in {self.group(pair.goal, elsewhere) for elsewhere in (True, not pair.derived)}:
                is_few = comb(len(names), least) <= len(self.groups.get(group, ()))
                choices = [*combinations(names, least)] if is_few else [()]
                for shared in choices:
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
