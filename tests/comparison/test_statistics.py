"""Tests, corrections, effect sizes and intervals against exact sums, libraries, and simulations with a known answer."""

from itertools import product
from math import comb

import numpy as np
import pytest
from scipy.stats import binomtest, fisher_exact
from statsmodels.stats.proportion import proportion_confint, proportion_effectsize

from captrain.statistics import (
    Bootstrap,
    cohens_h,
    fisher,
    holm,
    sign_test,
    summarise,
    task_means,
    wilson,
)

NAN = float("nan")


def test_the_sign_test_equals_the_exact_sum_over_the_binomial_tail() -> None:
    for better, worse in product(range(0, 40, 3), range(0, 40, 3)):
        pairs = better + worse
        tail = sum(comb(pairs, count) for count in range(min(better, worse) + 1))
        assert sign_test(better, worse) == pytest.approx(min(1.0, 2 * tail / 2**pairs), rel=1e-12)


def test_holm_multiplies_the_least_p_by_all_and_the_next_by_one_less() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.9]) == pytest.approx([1.0, 1.0])


def test_an_undefined_p_does_not_count_as_a_test() -> None:
    adjusted = holm([NAN, 0.02, NAN, 0.04])
    assert adjusted[1::2] == pytest.approx([0.04, 0.04])
    assert np.isnan(adjusted[0]) and np.isnan(adjusted[2])
    assert np.isnan(holm([NAN])).all() and holm([]) == []


def test_holm_rejects_what_its_step_down_rule_rejects() -> None:
    random = np.random.default_rng(1)
    for _ in range(20):
        p = (random.random(6) ** 3).tolist()
        rejected = set()
        for step, row in enumerate(sorted(range(6), key=p.__getitem__)):
            if p[row] > 0.05 / (6 - step):
                break
            rejected.add(row)
        assert {row for row, adjusted in enumerate(holm(p)) if adjusted <= 0.05} == rejected


def p_of_library(table: list[list[int]]) -> float:
    return float(np.asarray(fisher_exact(table))[1])


def test_fishers_test_equals_scipys_and_gives_the_least_p() -> None:
    for a, b in product((1, 8, 10, 40), repeat=2):
        for x, y in product(range(0, a + 1, max(3, a // 5)), range(0, b + 1, max(3, b // 5))):
            p, least = fisher((x, a), (y, b))
            assert p == pytest.approx(p_of_library([[x, a - x], [y, b - y]]))
            tables = [[[k, a - k], [x + y - k, b - x - y + k]] for k in range(max(0, x + y - b), min(a, x + y) + 1)]
            assert least == pytest.approx(min(map(p_of_library, tables)))
    assert fisher((20000, 50000), (20000, 50000))[0] == pytest.approx(1.0)


def test_wilsons_interval_equals_the_librarys() -> None:
    for count, total in ((0, 8), (8, 8), (3, 20), (50, 100)):
        assert wilson(count, total) == pytest.approx(proportion_confint(count, total, method="wilson"), abs=1e-12)
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("first", "second"), [(0.5, 0.4), (0.05, 0.15), (1.0, 0.0), (0.3, 0.3)])
def test_cohens_h_equals_the_librarys(first: float, second: float) -> None:
    assert cohens_h(first, second) == pytest.approx(proportion_effectsize(first, second))
    assert cohens_h(second, first) == -cohens_h(first, second)


def test_cohens_h_of_an_undefined_rate_is_undefined() -> None:
    assert np.isnan(cohens_h(NAN, 0.5)) and np.isnan(cohens_h(0.5, NAN))


def test_task_means_leave_errors_out_and_are_the_rates_of_a_summary() -> None:
    values = np.array([[0.25, 0.75, NAN], [NAN, NAN, NAN], [1.0, 0.0, 0.0]])
    assert task_means(values) == pytest.approx([0.5, NAN, 1 / 3], nan_ok=True)
    assert summarise(values.round()).rates == pytest.approx(task_means(values.round()), nan_ok=True)


def test_intervals_of_mean_similarity_have_their_nominal_coverage() -> None:
    held, worlds = 0, 120
    for seed in range(worlds):
        random = np.random.default_rng(seed)
        difficulty = random.beta(1.0, 2.0, size=(129, 1))
        similarity = np.clip(difficulty + random.normal(0.0, 0.01, size=(129, 3)), 0.0, 1.0)
        low, high = Bootstrap(129, 400, 0.9, seed).interval(task_means(similarity))
        held += low <= 1 / 3 <= high
    assert binomtest(held, worlds, 0.9).pvalue > 0.01
