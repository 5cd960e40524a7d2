"""Finds the smallest set of edits after which a failed rollout passes, by replay in the world of its task.

An edit removes one difference between a rollout and its reference. There are five kinds: insert a call of the
reference, replace the arguments of a call, drop a call, say a required value, or end the dialogue.

An edit is needed if the rollout does not pass without it. All other differences are harmless. Without a world, every
difference counts as an edit and nothing is proven.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice

from captrain.benchmarks import Replay, ReplayCall, Replayed, World, logged_replay
from captrain.capabilities.calls import Call, make_call
from captrain.capabilities.clauses import DiagnosisContext
from captrain.capabilities.text import is_prose, result_of, says, text_of
from captrain.capabilities.toolbox import CHANGES, EFFECTS
from captrain.capabilities.view import PAST_END, Edit, Repair, RolloutView
from captrain.records import Rollout, leaves

SMALL = 2
"""Maximum size of the sets of edits that are tried one by one."""
MOST = 60
"""Maximum number of sets that are tried per size."""


def view_repaired(rollout: Rollout, context: DiagnosisContext, world: World | None) -> RolloutView:
    """Parse a rollout and find its smallest repair.

    Args:
        rollout: passed or failed.
        context: of its environment.
        world: of its task; None if it cannot be opened.

    Raises:
        InfrastructureError: the world's worker failed.
    """
    view = RolloutView(rollout, context)
    if world is not None:
        return _Search(view, world, logged_replay(rollout)).view()
    if not rollout.reference:  # then nothing is missing and nothing is extra
        return view
    owed = [text_of(value) for message in rollout.reference for value in message.get("informs", [])]
    edits = tuple(edit for edit in _differences(view, owed, logged_replay(rollout)) if _may_cost_reward(edit, view))
    view.repair = Repair(edits, edits)
    return view


def _may_cost_reward(edit: Edit, view: RolloutView) -> bool:
    """Return whether a difference may have cost the reward. Used when there is no replay.

    An extra call counts only if the benchmark compares all changes. Changed arguments count unless all are prose.
    """
    if edit.kind == "drop":
        # A call with mostly values that neither a user nor a tool has named is a note or a step of a harness.
        call = edit.calls[0]
        values = [*leaves(call.arguments)]
        seen = [value for value in values if view.seen(value, PAST_END, "user", "tool", "system")]
        is_inward = 2 * len(seen) < len(values)
        return view.facts.compares_state and call.tool not in view.context.idle_tools and not is_inward
    if edit.kind == "replace" and edit.goal is not None:
        return not all(is_prose(edit.goal.arguments[name]) for name in edit.wrong)
    return True


def _played(calls: Sequence[Call], replayed: Replayed) -> Iterator[Call]:
    """Yield the calls with the outcomes of their replay. Keep results that the log has."""
    for call, text, failed, changed in zip(calls, replayed.results, replayed.failed, replayed.changed, strict=True):
        result = call.result if call.result not in (None, "") else result_of({"role": "tool", "content": text})
        yield replace(call, failed=failed, changed=changed, result=result)


class _Search:
    """The search for one rollout's repair in its world."""

    def __init__(self, view: RolloutView, world: World, replay: Replay) -> None:
        self._world, self._replay = world, replay
        logged, ideal = world.play([replay, Replay(world.reference, world.owed)])
        self._passes, self._is_sound = logged.passed, ideal.passed or not world.reference
        goals = _goals_of(view, world)
        steps = [*_played(view.calls, logged), *_played(goals, ideal)]
        changing = {step.tool for step in steps if step.changed}
        # A call that changes nothing and returns values that it was not given is a read.
        silent = [step for step in steps if step.kind in CHANGES and not step.failed and step.tool not in changing]
        lookups = [step.tool for step in silent if {*leaves(step.result)} - {*leaves(step.arguments)}]
        kinds = {**dict.fromkeys(lookups, "read"), **world.kinds}
        steps = [
            step if (kind := kinds.get(step.tool, step.kind)) == step.kind else replace(step, kind=kind)
            for step in steps
        ]
        number = len(view.calls)
        self._view = RolloutView(view.rollout, view.context, steps[:number], steps[number:])

    def view(self) -> RolloutView:
        """See `view_repaired`."""
        edits = _differences(self._view, self._world.owed, self._replay)
        smallest: Sequence[Edit] = ()
        if self._is_sound and not self._passes:
            smallest = next((self._smallest(pool) for pool in self._pools(edits) if self._passes_with(pool)), ())
        differences = (*edits, *(edit for edit in smallest if edit not in edits))
        proven = self._passes or not self._is_sound or bool(smallest)
        minimum = (*smallest,) if proven else differences
        self._view.repair = Repair(differences, minimum, proven, self._passes, not self._is_sound)
        return self._view

    def _pools(self, edits: list[Edit]) -> Iterable[list[Edit]]:
        """Yield sets of edits that may suffice, the smallest first:

        1. each edit at its place,
        2. the same with reads, which some checks require,
        3. all insertions moved to the end,
        4. the same with all writes of the reference repeated at the end,
        5. the reference's writes in place of every change of the rollout,
        6. the same with the reference's reads.
        """
        yield edits
        yield _differences(self._view, self._world.owed, self._replay, reads=True)
        late = [replace(edit, before=None) if edit.kind == "insert" else edit for edit in edits]
        yield late
        goals = [goal for goal in self._view.goals if goal.kind in EFFECTS]
        inserted = [edit.goal for edit in edits if edit.kind == "insert"]
        yield [*late, *(Edit("insert", goal) for goal in goals if goal not in inserted)]
        dialogue = [edit for edit in edits if edit.kind in ("say", "end")]
        dropped = [Edit("drop", calls=(call,)) for call in self._view.calls if call.changed]
        yield [*dialogue, *dropped, *(Edit("insert", goal) for goal in goals)]
        yield [*dialogue, *dropped, *(Edit("insert", goal) for goal in self._view.goals)]

    def _smallest(self, pool: list[Edit]) -> list[Edit]:
        """Return a smallest set: drop unneeded edits one by one, then try sets of fewer edits."""
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
        dropped = {call.place for edit in edits if edit.kind == "drop" for call in edit.calls}
        replaced = {edit.calls[0].place: edit.goal for edit in edits if edit.kind == "replace"}
        inserted = [edit for edit in edits if edit.kind == "insert"]
        calls: list[ReplayCall] = []
        for place, call in enumerate(self._replay.calls):
            calls += [self._step(edit.goal) for edit in inserted if edit.goal and edit.before == place]
            goal = replaced.get(place)
            calls += [self._step(goal) if goal else call] if place not in dropped else []
        end = len(self._replay.calls)
        calls += [self._step(edit.goal) for edit in inserted if edit.goal and edit.before == end]
        calls += [self._step(edit.goal) for edit in inserted if edit.goal and edit.before is None]
        texts = (*self._replay.texts, *(edit.text for edit in edits if edit.kind == "say"))
        is_ended = self._replay.ended or any(edit.kind == "end" for edit in edits)
        return self._world.passes(Replay(tuple(calls), texts, is_ended))

    def _step(self, goal: Call) -> ReplayCall:
        """Return the call of the world's reference that a goal stands for."""
        return self._world.reference[goal.place]


def _goals_of(view: RolloutView, world: World) -> list[Call]:
    """Return the reference of a world as goals. Goals of the log are kept if they are calls of the same tools."""
    if [(goal.tool, goal.by) for goal in view.goals] == [(step.tool, step.by) for step in world.reference]:
        steps = zip(view.goals, world.reference, strict=True)
        return [replace(goal, arguments={**step.arguments}) for goal, step in steps]
    goals = list[Call]()
    for step in world.reference:
        goal = make_call(view.toolbox, step.tool, step.arguments, step.by, len(goals))
        goals.append(replace(goal, message=goal.place))
    return goals


def _differences(view: RolloutView, owed: Iterable[str], replay: Replay, *, reads: bool = False) -> list[Edit]:
    """Return the edits that turn a rollout into its reference: changes, words and, with `reads`, look-ups."""
    calls, goals = view.calls, view.goals
    targets = [goal for goal in goals if goal.kind in EFFECTS or (reads and goal.kind != "think")]
    refusals = [
        call for call in calls if call.failed and any(call.equals(goal) and not goal.failed for goal in targets)
    ]
    attempts = [call for call in calls if (reads or call.kind in EFFECTS) and call not in refusals]
    pairs = _matched(targets, attempts)
    edits: list[Edit] = []
    for number, goal in enumerate(targets):
        if number not in pairs:
            before = [pairs[neighbour].place + 1 for neighbour in range(number) if neighbour in pairs]
            after = [pairs[neighbour].place for neighbour in range(number + 1, len(targets)) if neighbour in pairs]
            edits.append(Edit("insert", goal, before=before[-1] if before else after[0] if after else None))
        elif goal.kind in CHANGES and not pairs[number].equals(goal):
            edits.append(Edit("replace", goal, (pairs[number],)))
    repeats: dict[str, list[Call]] = {}
    for call in attempts:
        if call not in pairs.values() and call.changed:
            repeats.setdefault(json.dumps([call.by, call.tool, call.arguments], sort_keys=True), []).append(call)
    edits += [Edit("drop", calls=tuple(peers)) for peers in repeats.values()]
    speech = "\n".join(replay.texts).lower().replace(",", "")
    for word in owed:
        # A short word occurs inside many others, so it must be a whole word.
        text = word.lower().replace(",", "")
        if not (text in speech if len(text) > 2 else says(speech, text)):
            edits.append(Edit("say", text=word))
    return edits if replay.ended else [*edits, Edit("end")]


def _matched(goals: Sequence[Call], calls: Sequence[Call]) -> dict[int, Call]:
    """Return goal index -> the call that matches it. The most similar pairs are matched first."""
    ranked = []
    for number, goal in enumerate(goals):
        for order, call in enumerate(calls):
            if (goal.by, goal.tool) == (call.by, call.tool):
                names = {**goal.arguments, **call.arguments}
                wrong = call.differing(goal)
                record = next((name for name, value in goal.arguments.items() if isinstance(value, str)), None)
                alike = (len(names) - len(wrong)) / max(1, len(names)) + 2 * (record not in wrong)
                alike += 0.3 * call.changed + 0.5 * (not wrong)
                ranked.append((alike - 0.1 * abs(number / len(goals) - order / len(calls)), -number, -order))
    pairs: dict[int, Call] = {}
    for _, number, order in sorted(ranked, reverse=True):
        if -number not in pairs and calls[-order] not in pairs.values():
            pairs[-number] = calls[-order]
    return pairs
