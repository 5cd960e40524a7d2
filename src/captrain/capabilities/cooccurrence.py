"""Which capabilities failures demand together: what pair environments and the recipe for compound tasks go by.

One adapter a task is enough where a task demands one capability; where failed tasks demand two at once, it is not. So
cached labels answer three questions, without a rollout: which capabilities each failed rollout lacks, which pairs are
lacking together most often, and which recipe the share of compound failures speaks for. Of several labelling runs the
majority counts (`captrain.capabilities.verdicts`).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import TypedDict

from captrain.capabilities.verdicts import majority_verdicts
from captrain.errors import UserError
from captrain.records import RolloutLabels, Verdict

FEW = 0.25
"""Below this share of failures that demand two or more capabilities, specialists are recommended."""
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


class PairCounts(TypedDict):
    """In how many failed rollouts two capabilities are demanded, and lacking, together."""

    demanded: int
    lacking: int


class Recommendation(TypedDict):
    """results/capabilities/recommendation.json: which recipe the labels speak for, and the numbers behind it.

    `failed`: failed rollouts, `compound`: those of them that demand two capabilities or more, and their share;
    `demanding` and `lacking`: number of capabilities -> failed rollouts.
    """

    recommendation: str
    rule: str
    threshold: float
    failed: int
    compound: int
    share: float
    demanding: dict[str, int]
    lacking: dict[str, int]
    pairs: dict[str, PairCounts]


def recommend_recipe(labels: Sequence[RolloutLabels], selected: Collection[str]) -> Recommendation:
    """Which recipe the labels speak for: "specialists" or "curriculum".

    A rule of thumb from runs of the embedded desk: where fewer than a quarter of the failures demand two or more
    capabilities, an adapter for each and a router that composes them; otherwise one adapter on a curriculum. What a
    task demands counts, not only what its rollout lacked: a capability shown alone may still be lost beside another.

    Raises:
        UserError: there are no labels of failed rollouts.
    """
    demanded, lacking = demands(labels, selected), needs(labels, selected)
    if not demanded:
        raise UserError("there are no labels of failed rollouts", "run `dvc repro labels` to make them again")
    compound = sum(len(capabilities) > 1 for capabilities in demanded.values())
    share = compound / len(demanded)
    pairs_demanded, pairs_lacking = count_pairs(demanded), count_pairs(lacking)
    order = sorted(pairs_demanded, key=lambda pair: (-pairs_lacking[pair], -pairs_demanded[pair], pair))
    return Recommendation(
        recommendation="specialists" if share < FEW else "curriculum",
        rule=f"specialists where less than {FEW:.0%} of the failed rollouts demand two or more of the selected "
        "capabilities, otherwise curriculum",
        threshold=FEW,
        failed=len(demanded),
        compound=compound,
        share=round(share, 6),
        demanding=_sizes(demanded),
        lacking=_sizes(lacking),
        pairs={
            "+".join(pair): PairCounts(demanded=pairs_demanded[pair], lacking=pairs_lacking[pair]) for pair in order
        },
    )


def recommendation_sentence(advice: Recommendation) -> str:
    """The recommendation in one sentence."""
    share, failed, recipe = advice["share"], advice["failed"], advice["recommendation"]
    return f"{share:.0%} of {failed} failures demand two capabilities or more: recommended is {recipe}"


def _sizes(sets: Sets) -> dict[str, int]:
    """Number of capabilities -> rollouts with so many."""
    sizes = Counter(len(capabilities) for capabilities in sets.values())
    return {str(size): count for size, count in sorted(sizes.items())}
