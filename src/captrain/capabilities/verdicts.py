"""Majority verdicts over several labelling runs, and which capabilities failed rollouts lack or demand together.

Runs of an analyst that samples may disagree on a rollout. A verdict counts if more than half of the runs that labelled
the rollout agree. Pairs, the agreement with the programmatic analyst, and the report use these verdicts. One adapter is
enough for a task that demands one capability. For tasks that demand two, the most frequent pairs get an environment of
both.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

from captrain.records import Label, RolloutLabels, Verdict


def is_majority(votes: Collection[bool]) -> bool:
    """Return whether more than half of the votes are yes."""
    return 2 * sum(votes) > len(votes)


def labels_of_rollouts(labels: Iterable[RolloutLabels]) -> dict[str, dict[str, list[Label]]]:
    """Return rollout -> capability -> its labels, one per run that labelled it, in the order of the rows."""
    rollouts: dict[str, dict[str, list[Label]]] = {}
    for row in labels:
        capabilities = rollouts.setdefault(row.rollout, {})
        for slug, label in row.labels.items():
            capabilities.setdefault(slug, []).append(label)
    return rollouts


def majority_verdicts(labels: Iterable[RolloutLabels], verdicts: Collection[Verdict]) -> dict[str, frozenset[str]]:
    """Return, for each rollout, the capabilities to which most runs gave one of these verdicts."""
    return {
        rollout: frozenset(
            slug for slug, runs in capabilities.items() if is_majority([label.verdict in verdicts for label in runs])
        )
        for rollout, capabilities in labels_of_rollouts(labels).items()
    }


def needs(labels: Sequence[RolloutLabels], selected: Collection[str]) -> dict[str, frozenset[str]]:
    """Return, for each failed rollout, the selected capabilities that it lacks, in the order of the labels."""
    sets = majority_verdicts((row for row in labels if row.outcome == "failed"), ("LACKING",))
    return {rollout: capabilities.intersection(selected) for rollout, capabilities in sets.items()}


def demands(labels: Sequence[RolloutLabels], selected: Collection[str]) -> dict[str, frozenset[str]]:
    """Return, for each failed rollout, the selected capabilities that its task demands: it lacks or shows them."""
    sets = majority_verdicts((row for row in labels if row.outcome == "failed"), ("LACKING", "PRESENT"))
    return {rollout: capabilities.intersection(selected) for rollout, capabilities in sets.items()}


def count_pairs(sets: Mapping[str, frozenset[str]]) -> dict[tuple[str, str], int]:
    """Count the rollouts in which each pair of capabilities occurs: the most frequent first, ties by name."""
    counts = Counter(pair for capabilities in sets.values() for pair in combinations(sorted(capabilities), 2))
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
