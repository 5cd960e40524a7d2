"""Majority of several labelling runs, and by it which capabilities failed rollouts lack or demand together.

Runs of an analyst that samples may disagree on a rollout: a verdict counts where more than half of the runs that
labelled say so. Whatever asks for one answer (pairs, agreement with the programmatic analyst, the report) takes it from
here. One adapter a task is enough where a task demands one capability; where failed tasks demand two at once, it is
not: so the pairs that are lacking together most often get an environment of both.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

from captrain.records import Label, RolloutLabels, Verdict


def is_majority(votes: Collection[bool]) -> bool:
    """Tell if more than half of the votes are yes."""
    return 2 * sum(votes) > len(votes)


def labels_of_rollouts(labels: Iterable[RolloutLabels]) -> dict[str, dict[str, list[Label]]]:
    """By rollout and capability: one label for each run that labelled the pair, in the order of the rows."""
    rollouts: dict[str, dict[str, list[Label]]] = {}
    for row in labels:
        capabilities = rollouts.setdefault(row.rollout, {})
        for slug, label in row.labels.items():
            capabilities.setdefault(slug, []).append(label)
    return rollouts


def majority_verdicts(labels: Iterable[RolloutLabels], verdicts: Collection[Verdict]) -> dict[str, frozenset[str]]:
    """By rollout, in the order of the rows: the capabilities that most runs gave one of these verdicts, if any."""
    return {
        rollout: frozenset(
            slug for slug, runs in capabilities.items() if is_majority([label.verdict in verdicts for label in runs])
        )
        for rollout, capabilities in labels_of_rollouts(labels).items()
    }


def needs(labels: Sequence[RolloutLabels], selected: Collection[str]) -> dict[str, frozenset[str]]:
    """The selected capabilities that each failed rollout lacks, the empty set included, in the order of the labels."""
    sets = majority_verdicts((row for row in labels if row.outcome == "failed"), ("LACKING",))
    return {rollout: capabilities.intersection(selected) for rollout, capabilities in sets.items()}


def demands(labels: Sequence[RolloutLabels], selected: Collection[str]) -> dict[str, frozenset[str]]:
    """The selected capabilities that the task of each failed rollout demands: those it lacks, and those it shows."""
    sets = majority_verdicts((row for row in labels if row.outcome == "failed"), ("LACKING", "PRESENT"))
    return {rollout: capabilities.intersection(selected) for rollout, capabilities in sets.items()}


def count_pairs(sets: Mapping[str, frozenset[str]]) -> dict[tuple[str, str], int]:
    """In how many rollouts each pair of capabilities occurs together, the most frequent first, ties by name; the names
    of a pair in their order."""
    counts = Counter(pair for capabilities in sets.values() for pair in combinations(sorted(capabilities), 2))
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
