"""How far labels can be relied on: agreement between labelling runs, and with the programmatic analyst.

An analyst that samples may judge the same rollout otherwise in another run. Raters are the runs, units the (rollout,
capability) pairs, categories the three verdicts. Fleiss' kappa and Krippendorff's alpha correct for agreement by
chance; where only one verdict was ever given, chance agreement is total, and both are undefined (null), never 1. The
share of pairs on which all runs agree is told beside them, because it is what a reader pictures and because kappa
falls where one verdict is rare.

Where reference solutions exist, the programmatic analyst labels the same rollouts. Its families are not an analyst's
candidates: so each candidate is held against every family, and the nearest is named.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from captrain.capabilities.analyst import Analyst, Asked
from captrain.capabilities.programmatic import ProgrammaticAnalyst
from captrain.records import Rollout, RolloutLabels, Verdict

VERDICTS: tuple[Verdict, ...] = ("NA", "PRESENT", "LACKING")

Counts = NDArray[np.int64]
"""How often each unit was given each category (units, categories)."""


def agreement(
    analyst: Analyst, labels: Sequence[RolloutLabels], rollouts: Sequence[Rollout], tools: list[dict[str, Any]]
) -> dict[str, Any]:
    """The account of an analyst's labels, JSON through and through.

    Returns:
        `deterministic` and `runs`. For an analyst that samples also `overall` and `capabilities` (by id): `pairs`
        labelled in several runs, the share of these that is `unanimous`, Fleiss' `kappa`, Krippendorff's `alpha`; and
        `programmatic` (see `against_programmatic`). A deterministic analyst's runs are equal by construction: there
        is nothing to measure.
    """
    account: dict[str, Any] = {
        "deterministic": analyst.deterministic,
        "runs": len({row.run for row in labels}),
    }
    if analyst.deterministic:
        return account
    counts = _counts(labels)
    account["overall"] = _between_runs(np.concatenate([*counts.values()]) if counts else np.zeros((0, 3), np.int64))
    account["capabilities"] = {slug: _between_runs(some) for slug, some in counts.items()}
    account["programmatic"] = against_programmatic(labels, rollouts, tools)
    return account


def _counts(labels: Sequence[RolloutLabels]) -> dict[str, Counts]:
    """Verdicts of all runs on each rollout, by capability."""
    found: dict[str, dict[str, Counter[Verdict]]] = {}
    for row in labels:
        for slug, label in row.labels.items():
            found.setdefault(slug, {}).setdefault(row.rollout, Counter())[label.verdict] += 1
    return {
        slug: np.array([[verdicts[verdict] for verdict in VERDICTS] for verdicts in found[slug].values()])
        for slug in sorted(found)
    }


def _between_runs(counts: Counts) -> dict[str, Any]:
    compared = counts[counts.sum(axis=1) > 1]
    unanimous = float((compared.max(axis=1) == compared.sum(axis=1)).mean()) if len(compared) else math.nan
    return {
        "pairs": len(compared),
        "unanimous": _number(unanimous),
        "kappa": _number(fleiss_kappa(counts)),
        "alpha": _number(krippendorff_alpha(counts)),
    }


def fleiss_kappa(counts: Counts) -> float:
    """Fleiss' kappa over the units that all raters judged; NaN where they are none, where a single rater judged, or
    where all gave one category.

    Source: J. L. Fleiss, Measuring nominal scale agreement among many raters, 1971; as statsmodels computes it.
    """
    from statsmodels.stats.inter_rater import fleiss_kappa as computed

    raters = counts.sum(axis=1)
    whole = counts[raters == raters.max(initial=0)]
    if raters.max(initial=0) < 2 or np.count_nonzero(whole.sum(axis=0)) < 2:
        return math.nan
    return float(computed(whole))


def krippendorff_alpha(counts: Counts) -> float:
    """Krippendorff's alpha for nominal data, with units that not all raters judged; NaN where no unit was judged
    twice, or where all judgements are of one category.

    With n_uc the judgements of unit u as c, m_u those of u (of units with two or more), n_c those as c, and n all:
    alpha = 1 - (n - 1) * sum_u (m_u^2 - sum_c n_uc^2) / (m_u - 1) / (n^2 - sum_c n_c^2).

    Source: K. Krippendorff, Computing Krippendorff's alpha-reliability, 2011, section C.
    """
    pairable = counts[counts.sum(axis=1) > 1].astype(float)
    judged, categories = pairable.sum(axis=1), pairable.sum(axis=0)
    total = judged.sum()
    expected = total**2 - (categories**2).sum()
    if not expected:
        return math.nan
    observed = ((judged**2 - (pairable**2).sum(axis=1)) / (judged - 1)).sum()
    return float(1 - (total - 1) * observed / expected)


def against_programmatic(
    labels: Sequence[RolloutLabels], rollouts: Sequence[Rollout], tools: list[dict[str, Any]]
) -> dict[str, Any]:
    """What an analyst finds lacking beside what the programmatic analyst does, on the rollouts with a reference.

    A rollout counts as lacking a candidate where more than half of the runs that labelled it say so.

    Returns:
        `rollouts` compared, and `candidates` by id: Cohen's `kappa` of LACKING with each of the `families` that some
        rollout lacks, the `best` family, its kappa, and its counts of rollouts that lack `both`, the `candidate`
        alone, the `family` alone, or `neither`. Undefined kappas are null, and so is a best where all are.
    """
    labelled = {row.rollout for row in labels}
    compared = [rollout for rollout in rollouts if rollout.reference and rollout.id in labelled]
    families = _lacking_families(compared, tools)
    candidates = sorted({slug for row in labels for slug in row.labels})
    lacking = _lacking(labels)
    order = [rollout.id for rollout in compared]
    return {
        "rollouts": len(order),
        "candidates": {
            slug: _nearest([lacking[slug].get(name, False) for name in order], families) for slug in candidates
        },
    }


def _lacking_families(rollouts: Sequence[Rollout], tools: list[dict[str, Any]]) -> dict[str, list[bool]]:
    """Of each family that some rollout lacks: which rollouts do."""
    analyst = ProgrammaticAnalyst()
    (families,) = analyst.propose([rollouts], tools)
    given = analyst.label([Asked(0, rollout, families) for rollout in rollouts], tools)
    return {family.id: [labels[family.id].verdict == "LACKING" for labels in given] for family in families}


def _lacking(labels: Sequence[RolloutLabels]) -> dict[str, dict[str, bool]]:
    """By capability and rollout: whether most runs found it lacking."""
    found: dict[str, dict[str, list[bool]]] = {}
    for row in labels:
        for slug, label in row.labels.items():
            found.setdefault(slug, {}).setdefault(row.rollout, []).append(label.verdict == "LACKING")
    return {
        slug: {rollout: 2 * sum(runs) > len(runs) for rollout, runs in some.items()} for slug, some in found.items()
    }


def _nearest(candidate: Sequence[bool], families: Mapping[str, Sequence[bool]]) -> dict[str, Any]:
    kappas = {slug: cohen_kappa(candidate, family) for slug, family in families.items()}
    defined = {slug: kappa for slug, kappa in kappas.items() if not math.isnan(kappa)}
    best = max(defined, key=lambda slug: defined[slug], default=None)
    return {
        "best": best,
        "kappa": None if best is None else _number(defined[best]),
        "counts": None if best is None else _together(candidate, families[best]),
        "families": {slug: _number(kappa) for slug, kappa in kappas.items()},
    }


def _together(candidate: Sequence[bool], family: Sequence[bool]) -> dict[str, int]:
    pairs = Counter(zip(candidate, family, strict=True))
    cases = {"both": (True, True), "candidate": (True, False), "family": (False, True), "neither": (False, False)}
    return {name: pairs[case] for name, case in cases.items()}


def cohen_kappa(first: Sequence[bool], second: Sequence[bool]) -> float:
    """Cohen's kappa of two raters; NaN where both said one and the same throughout.

    Source: J. Cohen, A coefficient of agreement for nominal scales, 1960; as scikit-learn computes it.
    """
    from sklearn.metrics import cohen_kappa_score

    return float(cohen_kappa_score(first, second)) if len({*first, *second}) > 1 else math.nan


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)
