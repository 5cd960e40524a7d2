"""The smallest set of edits after which a failed rollout passes, found by replay in the world of its task.

Edits are the differences between the changes of a rollout and those of its reference: insert a call of the reference,
replace the arguments of a call, drop a call, say what was owed, end the dialogue. A needed edit is one without which
the others do not suffice; all other differences are harmless. Where no world can be opened every difference stands for
an edit, and nothing is proven.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Literal

from captrain.benchmarks import Replay, ReplayCall, Replayed, World, logged_replay
from captrain.capabilities import Call, Toolbox, calls_in, is_prose, leaves, result_of, says, text_of
from captrain.records import Rollout

SMALL = 2
"""Sets of so few edits are tried one by one."""
MOST = 60
"""So many sets of one size are tried."""


@dataclass(frozen=True)
class Edit:
    """A difference. `goal`: the reference's call; `places`: of the rollout's calls; `place`: of the call before
    which a goal is inserted, None at the end; `text`: the words owed."""

    kind: Literal["insert", "replace", "drop", "end", "say"]
    goal: Call | None = None
    places: tuple[int, ...] = ()
    place: int | None = None
    text: str = ""


@dataclass(frozen=True)
class Repair:
    """Smallest change after which a rollout passes.

    calls: of the rollout. goals: calls of the reference. differences: all edits that come into question. edits: those
    of the smallest set. proven: by replay. passes: the logged calls pass as they are. is_unsound: the reference fails
    its own check.
    """

    calls: tuple[Call, ...]
    goals: tuple[Call, ...]
    differences: tuple[Edit, ...]
    edits: tuple[Edit, ...]
    proven: bool = False
    passes: bool = False
    is_unsound: bool = False


def find_repair(rollout: Rollout, toolbox: Toolbox, world: World | None, idle: Collection[str] = ()) -> Repair:
    """Find the smallest repair of a rollout.

    Args:
        rollout: passed or failed.
        toolbox: of its environment.
        world: of its task; None where none can be opened.
        idle: tools that rollouts which passed call, and no reference does: what they do is of no account.

    Raises:
        InfrastructureError: the world's worker failed.
    """
    calls, replay = calls_in(rollout.messages, toolbox), logged_replay(rollout)
    if world is not None:
        return _Search(world, replay, calls, toolbox).repair()
    goals = calls_in(rollout.reference, toolbox)
    steps = rollout.task.facts.user_calls
    goals += [Call(step.name, step.arguments, "user", kind=toolbox.kind(step.name)) for step in steps]
    informs = [text_of(value) for message in rollout.reference for value in message.get("informs", [])]
    # Without a reference nothing is missing and nothing is extra.
    edits = _differences(calls, goals, informs, replay) if rollout.reference else []
    edits = [edit for edit in edits if _counts(edit, rollout, calls, idle)]
    return Repair((*calls,), (*goals,), (*edits,), (*edits,))


def _counts(edit: Edit, rollout: Rollout, calls: Sequence[Call], idle: Collection[str]) -> bool:
    """Tell whether a difference may have cost the reward, where no replay can say: a change too many does where all
    changes are compared, and words do where they are values."""
    if edit.kind == "drop":
        # A call mostly of what neither a user nor a result ever named is a note or a step of the agent's harness.
        call, texts = calls[edit.places[0]], [text_of(m.get("content") or "") for m in rollout.messages]
        texts = [text for text, m in zip(texts, rollout.messages, strict=True) if m["role"] != "assistant"]
        values = [*leaves(call.arguments)]
        is_inward = 2 * sum(any(says(text, value) for text in texts) for value in values) < len(values)
        return rollout.task.facts.compares_state and call.tool not in idle and not is_inward
    if edit.kind == "replace" and edit.goal is not None:
        return not all(is_prose(edit.goal.arguments[name]) for name in calls[edit.places[0]].differing(edit.goal))
    return True


def _played(calls: Sequence[Call], replayed: Replayed) -> Iterator[Call]:
    """Calls with what their replay led to; those of a rollout keep the result that the log has."""
    for call, result, failed, changed in zip(calls, replayed.results, replayed.failed, replayed.changed, strict=True):
        yield replace(call, failed=failed, changed=changed, result=call.result or result)


class _Search:
    """The search of one rollout's repair in its world."""

    def __init__(self, world: World, replay: Replay, calls: Sequence[Call], toolbox: Toolbox) -> None:
        self._world, self._replay = world, replay
        gold = Replay(world.reference, world.owed)
        logged, ideal = world.play([replay, gold])
        self._passes, self._is_sound = logged.passed, ideal.passed or not world.reference
        goals = [Call(step.tool, step.arguments, step.by, kind=toolbox.kind(step.tool)) for step in world.reference]
        steps = [*_played(calls, logged), *_played(goals, ideal)]
        changing = {step.tool for step in steps if step.changed}
        # Calls that change nothing and return values that they were not given are look-ups.
        silent = [step for step in steps if step.kind == "write" and not step.failed and step.tool not in changing]
        returns = [({*leaves(result_of({"role": "tool", "content": step.result}))}, step) for step in silent]
        lookups = [step.tool for values, step in returns if values - {*leaves(step.arguments)}]
        kinds = {**dict.fromkeys(lookups, "read"), **world.kinds}
        steps = [replace(step, kind=kinds.get(step.tool, step.kind)) for step in steps]
        self._calls, self._goals = steps[: len(calls)], steps[len(calls) :]

    def repair(self) -> Repair:
        """See `find_repair`."""
        edits = _differences(self._calls, self._goals, self._world.owed, self._replay)
        smallest: Sequence[Edit] = ()
        if self._is_sound and not self._passes:
            smallest = next((self._smallest(pool) for pool in self._pools(edits) if self._passes_with(pool)), ())
        differences = (*edits, *(edit for edit in smallest if edit not in edits))
        proven = self._passes or not self._is_sound or bool(smallest)
        minimum = (*smallest,) if proven else differences
        return Repair((*self._calls,), (*self._goals,), differences, minimum, proven, self._passes, not self._is_sound)

    def _pools(self, edits: list[Edit]) -> Iterable[list[Edit]]:
        """Sets of edits that may suffice, the least first: each at its place; with look-ups, which some checks ask for;
        all that is inserted at the end; with steps made again there; the reference in place of every change."""
        yield edits
        yield _differences(self._calls, self._goals, self._world.owed, self._replay, reads=True)
        late = [replace(edit, place=None) if edit.kind == "insert" else edit for edit in edits]
        yield late
        goals = [goal for goal in self._goals if goal.kind != "read"]
        inserted = [edit.goal for edit in edits if edit.kind == "insert"]
        yield [*late, *(Edit("insert", goal) for goal in goals if goal not in inserted)]
        dialogue = [edit for edit in edits if edit.kind in ("say", "end")]
        dropped = [Edit("drop", places=(place,)) for place, call in enumerate(self._calls) if call.changed]
        yield [*dialogue, *dropped, *(Edit("insert", goal) for goal in goals)]
        yield [*dialogue, *dropped, *(Edit("insert", goal) for goal in self._goals)]

    def _smallest(self, pool: list[Edit]) -> list[Edit]:
        """A smallest set: one by one is left out what is not needed, then few are tried that may do the same."""
        remainder = list(pool)
        while True:
            trials = ([peer for peer in remainder if peer is not edit] for edit in remainder)
            smaller = next(filter(self._passes_with, trials), None)
            if smaller is None:
                break
            remainder = smaller
        for size in range(1, min(SMALL + 1, len(remainder))):
            trials = map(list, islice(combinations(pool, size), MOST))
            if (fewer := next(filter(self._passes_with, trials), None)) is not None:
                return fewer
        return remainder

    def _passes_with(self, edits: Sequence[Edit]) -> bool:
        """Play the rollout with these edits."""
        dropped = {place for edit in edits if edit.kind == "drop" for place in edit.places}
        replaced = {edit.places[0]: edit.goal for edit in edits if edit.kind == "replace"}
        inserted = [edit for edit in edits if edit.kind == "insert"]
        calls: list[Call] = []
        for place, call in enumerate(self._calls):
            calls += [edit.goal for edit in inserted if edit.goal and edit.place == place]
            calls += [replaced.get(place) or call] if place not in dropped else []
        calls += [edit.goal for edit in inserted if edit.goal and edit.place == len(self._calls)]
        calls += [edit.goal for edit in inserted if edit.goal and edit.place is None]
        texts = (*self._replay.texts, *(edit.text for edit in edits if edit.kind == "say"))
        is_ended = self._replay.ended or any(edit.kind == "end" for edit in edits)
        steps = tuple(ReplayCall(call.tool, call.arguments, call.by) for call in calls)
        return self._world.play([Replay(steps, texts, is_ended)])[0].passed


def _differences(
    calls: Sequence[Call], goals: Sequence[Call], owed: Iterable[str], replay: Replay, *, reads: bool = False
) -> list[Edit]:
    """The edits that make a rollout its reference in what is changed, said, and how it ends, and what it looks up."""
    targets = [goal for goal in goals if reads or goal.kind != "read"]
    refusals = [
        call for call in calls if call.failed and any(call.equals(goal) and not goal.failed for goal in targets)
    ]
    attempts = [place for place, call in enumerate(calls) if (reads or call.kind != "read") and call not in refusals]
    pairs = _aligned(targets, attempts, calls)
    edits = []
    for number, goal in enumerate(targets):
        if number not in pairs:
            before = [pairs[neighbour] + 1 for neighbour in range(number) if neighbour in pairs]
            after = [pairs[neighbour] for neighbour in range(number + 1, len(targets)) if neighbour in pairs]
            edits.append(Edit("insert", goal, place=before[-1] if before else after[0] if after else None))
        elif goal.kind == "write" and not calls[pairs[number]].equals(goal):
            edits.append(Edit("replace", goal, (pairs[number],)))
    repeats: dict[str, list[int]] = {}
    for place in attempts:
        call = calls[place]
        if place not in pairs.values() and call.changed:
            repeats.setdefault(json.dumps([call.by, call.tool, call.arguments], sort_keys=True), []).append(place)
    edits += [Edit("drop", places=tuple(places)) for places in repeats.values()]
    speech = "\n".join(replay.texts).lower().replace(",", "")
    for word in owed:
        # Short words are part of many others.
        text = word.lower().replace(",", "")
        if not (text in speech if len(text) > 2 else says(speech, text)):
            edits.append(Edit("say", text=word))
    return edits if replay.ended else [*edits, Edit("end")]


def _aligned(goals: Sequence[Call], places: Sequence[int], calls: Sequence[Call]) -> dict[int, int]:
    """Places of the calls that stand for goals, by the goals' numbers: the most alike first."""
    ranked = []
    for number, goal in enumerate(goals):
        for order, place in enumerate(places):
            call = calls[place]
            if (goal.by, goal.tool) == (call.by, call.tool):
                names = {**goal.arguments, **call.arguments}
                wrong = call.differing(goal)
                record = next((name for name, value in goal.arguments.items() if isinstance(value, str)), None)
                alike = (len(names) - len(wrong)) / max(1, len(names)) + 2 * (record not in wrong)
                alike += 0.3 * call.changed + 0.5 * (not wrong)
                ranked.append((alike - 0.1 * abs(number / len(goals) - order / len(places)), -number, -place))
    pairs: dict[int, int] = {}
    for _, number, place in sorted(ranked, reverse=True):
        if -number not in pairs and -place not in pairs.values():
            pairs[-number] = -place
    return pairs
