"""Majority of several labelling runs: a verdict counts where more than half of the runs that labelled say so.

Runs of an analyst that samples may disagree on a rollout. Whatever asks for one answer (co-occurrence, agreement with
the programmatic analyst, the report) takes it from here.
"""

from collections.abc import Collection, Iterable

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
