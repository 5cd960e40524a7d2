"""Differences between methods, within one run and over several seeds.

Everything depends on the seed, including the base model. So statistics over seeds use the seed as the unit, and
differences are paired by seed. Tables are lists of rows as read from CSV. An empty cell is NaN.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from captrain.comparison.baselines.registry import baselines
from captrain.comparison.rows import GRPO, ORACLE, RANDOM, compared_pairs, supervision
from captrain.comparison.tables import interpret_difference
from captrain.statistics import holm

CONFIDENCE = 0.95
"""Level of intervals over seeds."""
ComparisonRow = Mapping[Any, Any]
"""Row of a table as pandas returns it; pandas types neither keys nor cells."""


class Difference(NamedTuple):
    """Mean difference to another method, its interval, and its reading in words ("" without an interval)."""

    mean: float
    low: float
    high: float
    reading: str


def versus(differences: Iterable[ComparisonRow], against: str) -> dict[str, Difference]:
    """Return method -> its difference to `against`. The order in which the pair was compared does not matter.

    Args:
        differences: rows of first, second, difference, low, high, distinguishable and p_holm.
        against: the method to subtract.
    """
    by_method = {}
    for row in differences:
        mean, low, high = row["difference"], row["low"], row["high"]
        reading = "" if np.isnan(low) else interpret_difference(row)
        if np.isnan(mean):
            continue
        if row["second"] == against:
            by_method[row["first"]] = Difference(mean, low, high, reading)
        elif row["first"] == against:
            by_method[row["second"]] = Difference(-mean, -high, -low, reading)
    return by_method


def compared(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs to compare over seeds: the pairs of the table, and every baseline with GRPO on the target."""
    table = [pair for pair in compared_pairs(names) if {*pair} <= {*names}]
    further = [(name, GRPO) for name in baselines() if name != GRPO and {name, GRPO} <= {*names}]
    return [*table, *(pair for pair in further if pair not in table)]


def grouped(rows: Iterable[ComparisonRow], by: str) -> dict[Any, list[ComparisonRow]]:
    """Group rows by the value of a column, in order of first occurrence."""
    groups: dict[Any, list[ComparisonRow]] = {}
    for row in rows:
        groups.setdefault(row[by], []).append(row)
    return groups


def rates_over_seeds(points: Iterable[ComparisonRow], by: str = "experiment") -> list[ComparisonRow]:
    """Average the pass rate of each method over seeds, with a t interval, in each group.

    Args:
        points: rows of seed, method, label, pass_rate, rollouts_spent and `by`.
        by: the column that names a group.

    Returns:
        Rows of `by`, method, label, learns_from, seeds, pass_rate, low, high (NaN with one seed), mean rollouts_spent.
    """
    table: list[ComparisonRow] = []
    for group, group_rows in grouped(points, by).items():
        for method, rows in grouped(group_rows, "method").items():
            valid = [row for row in rows if not np.isnan(row["pass_rate"])]
            if not valid:
                continue
            rate, low, high, _ = _interval([row["pass_rate"] for row in valid])
            rollouts = float(np.mean([row["rollouts_spent"] for row in valid]))
            numbers = {"seeds": len(valid), "pass_rate": rate, "low": low, "high": high, "rollouts_spent": rollouts}
            words = {"label": valid[0]["label"], "learns_from": supervision(method) or ""}
            table.append({by: group, "method": method, **words, **numbers})
    return table


def differences_over_seeds(points: Iterable[ComparisonRow], by: str = "experiment") -> list[ComparisonRow]:
    """Average the difference of every compared pair over seeds, paired by seed, in each group.

    Args:
        points: as for `rates_over_seeds`.
        by: the column that names a group.

    Returns:
        Rows of `by`, first, second, seeds, difference, low, high (t interval, NaN with one seed), p (paired t test; NaN
        for bounds), distinguishable (the interval excludes zero), p_holm (corrected within the group), reading.
    """
    table: list[ComparisonRow] = []
    for group, group_rows in grouped(points, by).items():
        rates = {
            str(method): {row["seed"]: row["pass_rate"] for row in rows if not np.isnan(row["pass_rate"])}
            for method, rows in grouped(group_rows, "method").items()
        }
        rows = []
        for first, second in compared(list(rates)):
            seeds = [seed for seed in rates[first] if seed in rates[second]]
            if not seeds:
                continue
            mean, low, high, p = _interval([rates[first][seed] - rates[second][seed] for seed in seeds])
            numbers = {by: group, "first": first, "second": second, "seeds": len(seeds), "difference": mean}
            numbers |= {"low": low, "high": high, "p": np.nan if {first, second} & {ORACLE, RANDOM} else p}
            rows.append({**numbers, "distinguishable": bool(low > 0 or high < 0)})
        for row, corrected in zip(rows, holm([row["p"] for row in rows]), strict=True):
            row["p_holm"] = corrected
            row["reading"] = "" if np.isnan(row["low"]) else interpret_difference(row)
        table += rows
    return table


def _interval(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Return mean, t interval, and p of the t test that the mean is zero."""
    from scipy.stats import ttest_1samp  # slow to import, and rarely needed

    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, np.nan, np.nan, np.nan
    if np.ptp(values) == 0:
        # If all seeds have equal values, for example because two routers always agree, the interval is a point.
        return mean, mean, mean, float(mean == 0)
    test: Any = ttest_1samp(values, popmean=0.0)
    interval = test.confidence_interval(CONFIDENCE)
    return mean, float(interval.low), float(interval.high), float(test.pvalue)
