"""Tests of two shares, and their correction for how many of them were made."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def holm(p: Sequence[float]) -> list[float]:
    """Adjust the p-values of one family by Holm's method, in the order given; NaN stays NaN and is no member of the
    family."""
    values = np.array(p, dtype=float)
    order = np.argsort(values)[: np.count_nonzero(~np.isnan(values))]
    values[order] = np.minimum(1, np.maximum.accumulate(values[order] * np.arange(len(order), 0, -1)))
    return values.tolist()


def fisher(first: tuple[int, int], second: tuple[int, int]) -> tuple[float, float]:
    """Compute Fisher's exact test of two shares, two-sided, as `scipy.stats.fisher_exact` has it, without scipy.

    Args:
        first: how many of a sample show something, and how many there are.
        second: the same of the other sample.

    Returns:
        p, and the least p of any table with these margins: where that is high, nothing could have been found.
    """
    successes, total = first[0] + second[0], first[1] + second[1]
    support = np.arange(max(0, successes - second[1]), min(successes, first[1]) + 1)
    logs = _log_binomials(first[1], support) + _log_binomials(second[1], successes - support)
    chances = np.exp(logs - _log_binomials(total, np.array(successes)))
    # Tables of equal chance come out a rounding apart.
    p, least = (
        float(chances[chances <= chance * (1 + 1e-7)].sum())
        for chance in (chances[first[0] - support[0]], chances.min())
    )
    return min(1.0, p), min(1.0, least)


def _log_binomials(count: int, sizes: NDArray[np.intp]) -> Floats:
    table = _log_factorials(count.bit_length())
    return table[count] - table[sizes] - table[count - sizes]


@cache
def _log_factorials(bits: int) -> Floats:
    return np.concatenate([[0.0], np.log(np.arange(1, 1 << bits)).cumsum()])
