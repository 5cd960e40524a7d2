"""Needs of rollouts without a reference: features that nearly all passed rollouts have and many failed ones lack.

A need is a feature of calls whose absence correlates with failure beyond chance (Fisher's exact test, Holm's correction
over all features of an environment). At most the share `LUCKY` of the passed rollouts lack it, so a feature that only
one kind of task has is no need. Of the rollouts that lack it, at most the share `LUCKY` passes: among thousands of
rollouts, the tools of a harder kind of task also correlate with failure. A change or transfer that was made
or left out counts only in tasks that other rollouts pass the other way. Elsewhere, the task may ask for what was done,
and be a hard one; unless the user's words name the change. `captrain.capabilities.rules.FEATURES` names
the cause for each absent feature. For example, a change without the look-up that nearly all passed rollouts make first
has the cause `missing_lookup`. A missing need is not a proof: the rollout may have failed for another reason.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from captrain.capabilities.association import LEVEL, Association, Key, Tally, Traits
from captrain.capabilities.calls import Call, calls_in, order_traits, place_of, sourced
from captrain.capabilities.occasions import Occasion
from captrain.capabilities.rules import CAUSES, EXCESSES, FEATURES
from captrain.capabilities.text import says, text_of
from captrain.capabilities.toolbox import CHANGES, Toolbox
from captrain.records import Rollout, leaves
from captrain.statistics import fisher

WORD = re.compile("[a-z]{3,}")
LUCKY = 0.2
"""Largest share of the passed rollouts that may lack a need, and largest share of passes among the rollouts that lack
it. It is not 0, because an agent may guess right."""
LEAST = 5
"""Minimum number of failed and of passed rollouts with the base of a feature."""
FEWEST = 10
"""Minimum number of rollouts without a reference for learning needs."""
SIGNS = 4096
"""Features of which it is remembered whether they are a sign of a cause: nearly all rollouts share theirs."""


def learn_needs(rollouts: Iterable[Rollout], toolbox: Toolbox) -> "Needs | None":
    """Learn the needs of rollouts. Return None if fewer than `FEWEST` have no reference."""
    unreferenced = (rollout for rollout in rollouts if rollout.outcome != "error" and not has_solution(rollout))
    return Needs(rollouts, toolbox) if sum(1 for _ in islice(unreferenced, FEWEST)) == FEWEST else None


def has_solution(rollout: Rollout) -> bool:
    """Return whether a rollout has a reference, calls that its simulated user was supposed to make, or milestones."""
    if rollout.reference or rollout.task.facts.user_calls:
        return True
    return rollout.score is not None and any(name.startswith("milestone") for name in rollout.score.parts)


@dataclass(frozen=True)
class Need:
    """A need. `kind` is the cause of a rollout that lacks it."""

    kind: str
    association: Association

    @property
    def evidence(self) -> str:
        """The missing feature in words, with counts."""
        (failed, of_failed), (passed, of_passed) = self.association.failed, self.association.passed
        counts = f"{failed} of {of_failed} failed rollouts and {passed} of {of_passed} passed ones"
        otherwise = f"; passed rollouts of this task {'make no such' if self.association.holds else 'make this'} call"
        return f"{self.association.name}, as in {counts}{otherwise if self.step else ''} (not proven, by contrast)"

    @property
    def step(self) -> str:
        """The tool that must be called, or must not be, whatever the task; "" if the need is another one."""
        return self.association.key[-1] if self.association.key[0] in ("called", "followed") else ""


@dataclass(frozen=True)
class Lack:
    """A need that a rollout lacks, and the index of the message that shows it."""

    need: Need
    message: int


def _mostly_fails(failed: tuple[int, int], passed: tuple[int, int]) -> bool:
    """Return whether rollouts that lack a need fail more often, few of them pass, and few passed rollouts lack it.

    failed, passed: (rollouts that lack it, all that could lack it).
    """
    lack = failed[0] + passed[0]
    return failed[0] * passed[1] > passed[0] * failed[1] and passed[0] <= LUCKY * min(passed[1], lack)


class Needs:
    """The needs of the rollouts of each environment.

    Args:
        rollouts: passed and failed, with and without a reference.
        toolbox: their tools.
    """

    def __init__(self, rollouts: Iterable[Rollout], toolbox: Toolbox) -> None:
        self._toolbox, tallies = toolbox, dict[str, Tally]()
        self._is_sign = lru_cache(SIGNS)(lambda key: any(self._kind(key, holds) for holds in (False, True)))
        for rollout in rollouts:
            if rollout.outcome != "error":
                calls = calls_in(rollout.messages, toolbox)
                traits = self._traits(rollout, calls, sourced(calls, rollout.messages))
                tallies.setdefault(rollout.environment, Tally()).add(traits, rollout.outcome == "failed")
        self._needs = {name: [*self._of(tally)] for name, tally in tallies.items()}
        self._passed = self._steps_of_passes(rollouts)

    def _steps_of_passes(self, rollouts: Iterable[Rollout]) -> dict[tuple[str, str], tuple[set[str], set[str]]]:
        """Return, for each passed task, the steps of needs that any of its passed rollouts makes, and that all make."""
        steps = {name: {need.step for need in needs} - {""} for name, needs in self._needs.items()}
        passed = dict[tuple[str, str], tuple[set[str], set[str]]]()
        if any(steps.values()):
            for rollout in (rollout for rollout in rollouts if rollout.outcome == "passed"):
                made = {call.step for call in calls_in(rollout.messages, self._toolbox)} & steps[rollout.environment]
                some, every = passed.setdefault((rollout.environment, rollout.task.id), (set(), {*made}))
                some |= made
                every &= made
        return passed

    def _known(self, rollout: Rollout) -> list[Need]:
        """Return the needs of a rollout's task. Whether it needs a step is only known from its passed rollouts."""
        needs, passed = (
            self._needs.get(rollout.environment, []),
            self._passed.get((rollout.environment, rollout.task.id)),
        )
        if passed is None:
            return [need for need in needs if not need.step]
        some, every = passed
        return [n for n in needs if not n.step or (n.step not in some if n.association.holds else n.step in every)]

    def _of(self, tally: Tally) -> Iterator[Need]:
        for row in tally.associations():
            is_sure = row.p_holm <= LEVEL and _mostly_fails(row.failed, row.passed)
            kind = self._kind(row.key, row.holds)
            if is_sure and kind and min(row.failed[1], row.passed[1]) >= LEAST:
                rows = self._of_changes(tally, row) if row.key[0] == "before" else [row]
                yield from (Need(kind, row) for row in rows)

    def _of_changes(self, tally: Tally, row: Association) -> Iterator[Association]:
        """Split the need of a look-up before the first change: yield it for each change that needs it by itself."""
        for key, (base, cell) in tally.features.items():
            if key[0] == "after" and key[2] == row.key[1]:
                whole = tally.bases[base]
                failed, passed = (whole.failed - cell.failed, whole.failed), (whole.passed - cell.passed, whole.passed)
                part = row._replace(key=key, base=base, failed=failed, passed=passed, p=fisher(failed, passed)[0])
                if part.p <= LEVEL and _mostly_fails(failed, passed):
                    yield part

    def _kind(self, key: Key, holds: bool) -> str:
        """Return the cause that a feature (`holds`) or its absence indicates; "" if there is none."""
        kinds = [self._toolbox.kind(name) for name in key[1:3]]
        words = key[0], *(kinds[-1:] if key[0] in ("asked", "followed") else kinds)
        matches, causes = [words[:length] for length in range(len(words), 0, -1)], EXCESSES if holds else FEATURES
        return next((causes[words] for words in matches if words in causes), "")

    def _traits(self, rollout: Rollout, results: Sequence[Call], calls: list[Call]) -> Traits:
        """Return features of a rollout's calls, of the user's first message, and of records that the user describes.

        `results` are the calls as logged, `calls` the same as `sourced` gives them.
        """
        traits = order_traits(calls)
        changes = [place for place, call in enumerate(calls) if call.kind in CHANGES]
        traits.bases |= {("change",)} if changes else set()
        for call in calls[: changes[0] if changes else 0]:
            traits.hold(("before", call.step), ("change",))
        users = (text_of(m.get("content") or "") for m in rollout.messages if m["role"] == "user")
        for word in {*WORD.findall(next(users, "").lower())}:
            # Only words of the tool's name ask for the tool. Other words name the task or greet.
            for call in [call for call in calls if any(word.startswith(part) for part in WORD.findall(call.tool))]:
                traits.hold(("asked", word, call.step), ("says", word))
            traits.bases.add(("says", word))
        for name, misses in _described(rollout, results).items():
            traits.bases.add(("listed", name))
            if not misses:
                traits.hold(("described", name), ("listed", name))
        return Traits(traits.bases, {key: value for key, value in traits.holding.items() if self._is_sign(key)})

    def of(self, rollout: Rollout, results: Sequence[Call], calls: list[Call]) -> tuple[list[Lack], set[str]]:
        """Return the needs that a rollout lacks, one per cause and step, and the causes that it could show.

        Args:
            rollout: with or without a reference.
            results: its calls as logged.
            calls: the same as `captrain.capabilities.sourced` gives them.
        """
        traits = self._traits(rollout, results, calls)
        last = max((place for place, m in enumerate(rollout.messages) if m["role"] == "assistant"), default=0)
        needs = self._known(rollout)
        occasions = {need.kind for need in needs if need.association.base in traits.bases}
        lacks: dict[tuple[str, ...], Lack] = {}
        for need in [need for need in needs if traits.shows(need.association)]:
            key, message = need.association.key, last
            if key[0] == "described":
                message = _described(rollout, results)[key[1]][0]
            elif need.kind not in ("missing_write", "missing_escalation"):
                message = place_of(key, calls).message
            lacks.setdefault((need.kind, *_subject(key)), Lack(need, message))
        kinds = {lack.need.kind for lack in lacks.values()}
        # A value that was not looked up had to be invented, so the missing look-up explains it.
        sound = [c for c in lacks.values() if not (c.need.kind == "fabricated_fact" and "missing_lookup" in kinds)]
        return sorted(sound, key=lambda lack: [*CAUSES].index(lack.need.kind)), occasions

    def found(self, rollout: Rollout) -> dict[str, Occasion]:
        """Return cause -> surest occasion, for causes that a rollout without a reference could show, roots first."""
        lacks, occasions = list[Lack](), set[str]()
        if not has_solution(rollout):
            calls = calls_in(rollout.messages, self._toolbox)
            lacks, occasions = self.of(rollout, calls, sourced(calls, rollout.messages))
        found: dict[str, Occasion] = {}
        for lack in lacks:
            key = lack.need.association.key
            tools = tuple(name for name in key[1:] if name in self._toolbox.schemas)
            arguments = key[-1:] if key[0] in ("described", "sourced", "same") else ()
            found.setdefault(lack.need.kind, Occasion(True, lack.need.evidence, lack.message, tools, arguments))
        present = Occasion(False, "nothing that most passed rollouts have is lacking", 0)
        return found | {kind: present for kind in sorted(occasions - found.keys())}


def _described(rollout: Rollout, calls: Iterable[Call]) -> Mapping[str, list[int]]:
    """Return, for each argument, the messages of changes in which it names a wrong record.

    These are arguments of changes that name one of several listed records, if the user's words describe one of the
    records best. The record is wrong if it is not that one. The list of messages is empty if all changes are right.
    """
    acts = [call for call in calls if call.by == "assistant"]
    arguments: dict[str, list[int]] = {}
    changes = [act for act in acts if act.kind in CHANGES and not act.failed]
    if not changes:
        return arguments
    listings = [(peer.message, [{*leaves(record)} for record in _listed(peer.result)]) for peer in acts]
    listings = [(place, records) for place, records in listings if records]
    if not listings:
        return arguments
    for act in changes:
        texts = [text_of(m.get("content") or "") for m in rollout.messages[: act.message] if m["role"] == "user"]
        words = "\n".join(texts)
        for name, value in act.arguments.items():
            for records in (records for place, records in listings if place < act.message):
                hits = [record for record in records if text_of(value) in record]
                if len(hits) == 1 and not says(words, value):
                    scores = [sum(says(words, leaf) for leaf in record) for record in records]
                    best, score = max(scores), scores[records.index(hits[0])]
                    if scores.count(best) == 1:
                        arguments.setdefault(name, []).extend([act.message] if score < best else [])
    return arguments


def _subject(key: Key) -> Key:
    """Return the part of the key that names the step that a need is about."""
    return key[2:3] if key[0] in ("after", "same", "asked", "followed") else key[1:]


def _listed(result: object) -> list[object]:
    """Return the records in a result that lists at least two; [] otherwise."""
    values = [result, *(result.values() if isinstance(result, dict) else ())]
    lists = [value for value in values if isinstance(value, list) and len(value) > 1]
    return next((rows for rows in lists if all(isinstance(row, dict) for row in rows)), [])
