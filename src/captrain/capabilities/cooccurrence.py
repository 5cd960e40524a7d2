"""Co-occurrence of capabilities in failures, by which the pairs are chosen that get an environment of both.

One adapter a task is enough where a task demands one capability; where failed tasks demand two at once, it is not. So
cached labels answer two questions, without a rollout: which capabilities each failed rollout lacks, and which pairs are
lacking together most often. Of several labelling runs the majority counts (`captrain.capabilities.verdicts`).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

from captrain.capabilities.verdicts import majority_verdicts
from captrain.records import RolloutLabels, Verdict

Sets = Mapping[str, frozenset[str]]
"""A set of capabilities for each rollout, by its id."""


def needs(labels: Sequence[RolloutLabels], selected: Collection[str]) -> dict[str, frozenset[str]]:
    """The selected capabilities that each failed rollout lacks, the empty set included, in the order of the labels."""
    return _of_failed(labels, selected, ("LACKING",))


def demands(labels: Sequence[RolloutLabels], selected: Collection[str]) -> dict[str, frozenset[str]]:
    """The selected capabilities that the task of each failed rollout demands: those it lacks, and those it shows."""
    return _of_failed(labels, selected, ("LACKING", "PRESENT"))


def _of_failed(
    labels: Sequence[RolloutLabels], selected: Collection[str], verdicts: Collection[Verdict]
) -> dict[str, frozenset[str]]:
    """By failed rollout: the selected capabilities that most runs gave one of the verdicts."""
    sets = majority_verdicts((row for row in labels if row.outcome == "failed"), verdicts)
    return {rollout: capabilities.intersection(selected) for rollout, capabilities in sets.items()}


def count_pairs(sets: Sets) -> Counter[tuple[str, str]]:
    """In how many rollouts each pair of capabilities occurs together; the names of a pair in their order."""
    return Counter(pair for capabilities in sets.values() for pair in combinations(sorted(capabilities), 2))


def frequent_pairs(needs: Sets, count: int) -> list[tuple[str, str]]:
    """At most `count` pairs of capabilities that failed rollouts lack together, most frequent first, ties by name."""
    counts = count_pairs(needs)
    return sorted(counts, key=lambda pair: (-counts[pair], pair))[:count]
