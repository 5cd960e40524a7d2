"""Which capabilities failures demand together: what pair environments and the recipe for compound tasks go by.

One adapter a task is enough where a task demands one capability; where failed tasks demand two at once, it is not. So
cached labels answer three questions, without a rollout: which capabilities each failed rollout lacks, which pairs are
lacking together most often, and which recipe the share of compound failures speaks for. With several labelling runs, a
verdict counts where more than half of the runs gave it that were asked.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

from captrain.errors import UserError
from captrain.records import RolloutLabels, Verdict

FEW = 0.25
"""Below this share of failures that demand two or more capabilities, specialists are recommended."""
Sets = Mapping[str, frozenset[str]]
"""A set of capabilities for each rollout, by its id."""


def needs(labels: Sequence[RolloutLabels], selected: Collection[str]) -> dict[str, frozenset[str]]:
    """The selected capabilities that each failed rollout lacks, the empty set included, in the order of the labels."""
    return _held(labels, selected, ("LACKING",))


def demands(labels: Sequence[RolloutLabels], selected: Collection[str]) -> dict[str, frozenset[str]]:
    """The selected capabilities that the task of each failed rollout demands: those it lacks, and those it shows."""
    return _held(labels, selected, ("LACKING", "PRESENT"))


def _held(
    labels: Sequence[RolloutLabels], selected: Collection[str], verdicts: Collection[Verdict]
) -> dict[str, frozenset[str]]:
    """The capabilities with one of the verdicts in more than half of the runs that labelled them."""
    found: dict[str, defaultdict[str, list[bool]]] = {}
    for row in labels:
        if row.outcome == "failed":
            runs = found.setdefault(row.rollout, defaultdict(list))
            for name, label in row.labels.items():
                if name in selected:
                    runs[name].append(label.verdict in verdicts)
    return {
        rollout: frozenset(name for name, said in runs.items() if 2 * sum(said) > len(said))
        for rollout, runs in found.items()
    }


def together(needs: Sets) -> Counter[tuple[str, str]]:
    """In how many rollouts each pair of capabilities occurs together; the names of a pair in their order."""
    return Counter(pair for held in needs.values() for pair in combinations(sorted(held), 2))


def pairs(needs: Sets, count: int) -> list[tuple[str, str]]:
    """At most `count` pairs of capabilities that failed rollouts lack together, most frequent first, ties by name."""
    found = together(needs)
    return sorted(found, key=lambda pair: (-found[pair], pair))[:count]


def recommended(labels: Sequence[RolloutLabels], selected: Collection[str]) -> dict[str, Any]:
    """Which recipe the labels speak for, and the numbers behind it.

    A rule of thumb from runs of the embedded desk: where fewer than a quarter of the failures demand two or more
    capabilities, an adapter for each and a router that composes them; otherwise one adapter on a ramp. What a task
    demands counts, not only what its rollout lacked: a capability shown alone may still be lost beside another.

    Returns:
        recommendation ("specialists" or "ramp"), rule, threshold, failed (rollouts), compound (those that demand two
        or more), share; `demanding` and `lacking`, number of capabilities -> failed rollouts; and `pairs`: pair ->
        how often it is demanded and lacking together.

    Raises:
        UserError: there are no labels of failed rollouts.
    """
    asked, lacking = demands(labels, selected), needs(labels, selected)
    if not asked:
        raise UserError("there are no labels of failed rollouts", "run `dvc repro labels` to make them again")
    compound = sum(len(held) > 1 for held in asked.values())
    share = compound / len(asked)
    both, missed = together(asked), together(lacking)
    return {
        "recommendation": "specialists" if share < FEW else "ramp",
        "rule": f"specialists where less than {FEW:.0%} of the failed rollouts demand two or more of the selected "
        "capabilities, otherwise ramp",
        "threshold": FEW,
        "failed": len(asked),
        "compound": compound,
        "share": round(share, 6),
        "demanding": _sizes(asked),
        "lacking": _sizes(lacking),
        "pairs": {
            "+".join(pair): {"demanded": both[pair], "lacking": missed[pair]}
            for pair in sorted(both, key=lambda pair: (-missed[pair], -both[pair], pair))
        },
    }  # fmt: skip


def said(advice: Mapping[str, Any]) -> str:
    """The recommendation in one sentence."""
    share, failed, recipe = advice["share"], advice["failed"], advice["recommendation"]
    return f"{share:.0%} of {failed} failures demand two capabilities or more: recommended is {recipe}"


def _sizes(sets: Sets) -> dict[str, int]:
    """Number of capabilities -> rollouts with so many."""
    return {str(size): count for size, count in sorted(Counter(len(held) for held in sets.values()).items())}
