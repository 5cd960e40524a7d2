"""Reliability of labels: agreement between labelling runs, and with the programmatic analyst.

An analyst that samples may label the same rollout differently in another run. Raters are the runs, units the (rollout,
capability) pairs, categories the three verdicts. Fleiss' kappa and Krippendorff's alpha correct for chance agreement;
if only one verdict occurs, both are undefined (null), never 1. The share of unanimous pairs is given too: it is easy to
picture, and kappa falls where one verdict is rare.

Where reference solutions exist, the programmatic analyst labels the same rollouts. Its causes are not the analyst's
candidates, so each candidate is compared with every cause, and the nearest is named.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from captrain.capabilities.analyst import Analyst, LabelRequest
from captrain.capabilities.programmatic import ProgrammaticAnalyst
from captrain.capabilities.selection import number_or_none
from captrain.capabilities.verdicts import labels_of_rollouts, majority_verdicts
from captrain.records import JsonObject, Rollout, RolloutLabels, Verdict

VERDICTS: tuple[Verdict, ...] = ("NA", "PRESENT", "LACKING")

Counts = NDArray[np.int64]
"""How often each unit was given each category: (units, categories)."""


def measure_agreement(
    analyst: Analyst, labels: Sequence[RolloutLabels], rollouts: Sequence[Rollout], tools: list[JsonObject]
) -> JsonObject:
    """Measure how reliable an analyst's labels are.

    Returns:
        `deterministic` and `runs`. For an analyst that samples also `overall` and `capabilities` (by id): (rollout,
        capability) `pairs` labelled in several runs, the share `unanimous`, Fleiss' `kappa` and Krippendorff's `alpha`,
        null if undefined; and `programmatic`, see `against_programmatic`. Runs of a deterministic analyst are equal.
    """
    account: JsonObject = {"deterministic": analyst.deterministic, "runs": len({row.run for row in labels})}
    if analyst.deterministic:
        return account
    units: dict[str, list[list[int]]] = {}
    for capabilities in labels_of_rollouts(labels).values():
        for slug, runs in capabilities.items():
            verdicts = Counter(label.verdict for label in runs)
            units.setdefault(slug, []).append([verdicts[verdict] for verdict in VERDICTS])
    counts = {slug: np.array(units[slug]) for slug in sorted(units)}
    account["overall"] = _between_runs(np.concatenate([*counts.values()]) if counts else np.zeros((0, 3), np.int64))
    account["capabilities"] = {slug: _between_runs(units) for slug, units in counts.items()}
    account["programmatic"] = against_programmatic(labels, rollouts, tools)
    return account


def _between_runs(counts: Counts) -> dict[str, float | None]:
    compared = counts[counts.sum(axis=1) > 1]
    unanimous = float((compared.max(axis=1) == compared.sum(axis=1)).mean()) if len(compared) else math.nan
    return {
        "pairs": len(compared),
        "unanimous": number_or_none(unanimous),
        "kappa": number_or_none(fleiss_kappa(counts)),
        "alpha": number_or_none(krippendorff_alpha(counts)),
    }


def fleiss_kappa(counts: Counts) -> float:
    """Fleiss' kappa over the units that all raters judged; NaN if there are none, one rater, or one category.

    Source: J. L. Fleiss, Measuring nominal scale agreement among many raters, 1971; as statsmodels computes it.
    """
    from statsmodels.stats.inter_rater import fleiss_kappa as computed

    raters = counts.sum(axis=1)
    whole = counts[raters == raters.max(initial=0)]
    if raters.max(initial=0) < 2 or np.count_nonzero(whole.sum(axis=0)) < 2:
        return math.nan
    return float(computed(whole))


def krippendorff_alpha(counts: Counts) -> float:
    """Krippendorff's alpha for nominal data with missing judgements; NaN if no unit was judged twice, or all judgements
    agree in one category.

    Source: K. Krippendorff, Computing Krippendorff's alpha-reliability, 2011, section C; as krippendorff computes it.
    """
    import krippendorff

    pairable = counts[counts.sum(axis=1) > 1]
    if np.count_nonzero(pairable.sum(axis=0)) < 2:
        return math.nan
    return float(krippendorff.alpha(value_counts=pairable, level_of_measurement="nominal"))


def against_programmatic(
    labels: Sequence[RolloutLabels], rollouts: Sequence[Rollout], tools: list[JsonObject]
) -> JsonObject:
    """Compare an analyst's majority verdicts with the programmatic analyst, on labelled rollouts with a reference.

    Returns:
        The number of compared `rollouts`, and for each of the `candidates` Cohen's kappa with each of the `causes` that
        some rollout lacks, the `best` of them, its `kappa`, and its `counts` of rollouts that lack both, the candidate
        alone, the cause alone, or neither. Undefined kappas are null, and so is `best` if all are.

    Source: J. Cohen, A coefficient of agreement for nominal scales, 1960; as scikit-learn computes it.
    """
    from sklearn.metrics import cohen_kappa_score

    lacking = majority_verdicts(labels, ("LACKING",))
    compared = [rollout for rollout in rollouts if rollout.reference and rollout.id in lacking]
    analyst = ProgrammaticAnalyst()
    (causes,) = analyst.propose([compared], tools)
    labels_of = analyst.label([LabelRequest(0, rollout, causes) for rollout in compared], tools)
    lacks = {cause.id: [labels[cause.id].verdict == "LACKING" for labels in labels_of] for cause in causes}
    candidates: JsonObject = {}
    for slug in sorted({slug for row in labels for slug in row.labels}):
        flags = [slug in lacking[rollout.id] for rollout in compared]
        # If both give one verdict throughout, kappa is undefined.
        kappas = {
            cause: float(cohen_kappa_score(flags, lacked))
            for cause, lacked in lacks.items()
            if len({*flags, *lacked}) > 1
        }
        best = max(kappas, key=lambda cause: kappas[cause], default=None)
        pairs = Counter(zip(flags, lacks[best], strict=True)) if best else Counter[tuple[bool, bool]]()
        cases = {"both": (True, True), "candidate": (True, False), "cause": (False, True), "neither": (False, False)}
        candidates[slug] = {
            "best": best,
            "kappa": number_or_none(kappas[best]) if best else None,
            "counts": {name: pairs[case] for name, case in cases.items()} if best else None,
            "causes": {cause: number_or_none(kappas.get(cause, math.nan)) for cause in lacks},
        }
    return {"rollouts": len(compared), "candidates": candidates}
