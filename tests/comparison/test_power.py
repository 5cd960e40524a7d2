"""Power against simulated evaluations: outcomes drawn task by task, tested by the evaluation's own bootstrap."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy.stats import beta, norm
from scipy.stats import t as student

from captrain.comparison.power import complete_design, design_tables, read_difficulty
from captrain.errors import UserError
from captrain.statistics import (
    MAX_TRIALS,
    Bootstrap,
    Design,
    detectable,
    power_of,
    summarise,
    tasks_needed,
    trials_needed,
)

DESIGN = Design(base=0.4, tasks=120, trials=4, icc=0.6, shared=0.7)


COPULA = 0.7
"""Correlation of the normal variables behind the chances."""


def chances(design: Design, difference: float, random: np.random.Generator, tasks: int) -> list[np.ndarray]:
    """Chances of both methods on each task: beta distributed, tied by a normal copula."""
    hard = norm.cdf(random.multivariate_normal([0.0, 0.0], [[1.0, COPULA], [COPULA, 1.0]], size=tasks))
    size = 1 / design.icc - 1
    rates = (design.base + difference, design.base)
    return [beta.ppf(hard[:, column], rate * size, (1 - rate) * size) for column, rate in enumerate(rates)]


def drawn(design: Design, difference: float, seed: int) -> list[np.ndarray]:
    """Outcomes (tasks, trials) of both methods."""
    random = np.random.default_rng(seed)
    return [
        (random.random((design.tasks, design.trials)) < chance[:, None]).astype(float)
        for chance in chances(design, difference, random, design.tasks)
    ]


def test_power_is_how_often_the_bootstrap_and_the_t_test_detect_the_difference() -> None:
    worlds, difference = 300, 0.1
    by_interval = by_t = 0
    intervals, bound = Bootstrap(DESIGN.tasks, 500, 0.95, 0), student.ppf(0.975, DESIGN.tasks - 1)
    for seed in range(worlds):
        first, second = drawn(DESIGN, difference, seed)
        gap = summarise(first).rates - summarise(second).rates
        low, high = intervals.interval(gap)
        by_interval += low > 0 or high < 0
        by_t += abs(gap.mean()) > bound * gap.std(ddof=1) / np.sqrt(len(gap))
    shared = np.corrcoef(chances(DESIGN, difference, np.random.default_rng(0), 100_000))[0, 1]
    said = power_of(replace(DESIGN, shared=float(shared)), difference)
    assert 0.3 < said < 0.9
    spread = 4 * np.sqrt(said * (1 - said) / worlds)
    assert abs(by_t / worlds - said) < spread
    assert abs(by_interval / worlds - said) < spread + 0.02


def test_without_a_difference_power_is_the_level() -> None:
    assert power_of(DESIGN, 0.0) == pytest.approx(DESIGN.level)


def test_the_detectable_gain_has_the_wanted_power_and_less_has_not() -> None:
    least = detectable(DESIGN)
    assert least is not None
    assert power_of(DESIGN, least) >= DESIGN.power > power_of(DESIGN, least - 0.01)


def test_more_tasks_more_trials_and_shared_difficulty_each_detect_less() -> None:
    changed = ({"tasks": 480}, {"trials": 16}, {"shared": 0.95})
    least = detectable(DESIGN)
    for change in changed:
        better = detectable(replace(DESIGN, **change))
        assert least is not None and better is not None and better < least


def test_tasks_and_trials_needed_are_the_least() -> None:
    tasks = tasks_needed(DESIGN, 0.08)
    assert tasks is not None and tasks > DESIGN.tasks
    again = replace(DESIGN, tasks=tasks)
    assert power_of(again, 0.08) >= DESIGN.power > power_of(replace(DESIGN, tasks=tasks - 10), 0.08)
    once = Design(base=0.4, tasks=120, trials=1, icc=0.3, shared=0.9)
    trials = trials_needed(once, 0.1)
    assert trials is not None and 1 < trials < MAX_TRIALS


def test_no_number_of_trials_finds_a_small_difference_on_few_tasks() -> None:
    assert trials_needed(Design(base=0.4, tasks=30, trials=1, icc=0.6, shared=0.5), 0.05) is None


def test_a_base_near_one_makes_nothing_detectable_on_few_tasks() -> None:
    assert detectable(Design(base=0.97, tasks=20, trials=1, icc=0.5, shared=0.5)) is None


@pytest.mark.parametrize("wrong", [{"base": 0.0}, {"icc": 1.0}, {"shared": -0.1}, {"tasks": 1}, {"trials": 0}])
def test_designs_out_of_range_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match="remedy"):
        replace(DESIGN, **wrong)


def test_a_rate_above_one_is_rejected() -> None:
    with pytest.raises(UserError, match="must lie in"):
        power_of(DESIGN, 0.7)


def evaluated(folder: Path, design: Design, difference: float, trials: int) -> Path:
    """An evaluation's tables of outcomes drawn from a known difficulty."""
    first, second = drawn(design, difference, seed=5)
    intervals = Bootstrap(design.tasks, 2000, 0.95, 0)
    rates = {"base": summarise(second[:, :trials]).rates, "trace": summarise(first[:, :trials]).rates}
    main = [
        {"method": name, "pass_rate": rate.mean(), "tasks": len(rate), "trials": trials * len(rate)}
        | dict(zip(("low", "high"), intervals.interval(rate), strict=True))
        for name, rate in rates.items()
    ]
    gap = rates["trace"] - rates["base"]
    low, high = intervals.interval(gap)
    folder.mkdir()
    pd.DataFrame(main).to_csv(folder / "main.csv")
    row = {"first": "trace", "second": "base", "difference": gap.mean(), "low": low, "high": high}
    pd.DataFrame([row]).to_csv(folder / "differences.csv")
    (folder / "metrics.json").write_text(json.dumps({"confidence": 0.95}))
    return folder


def test_difficulty_is_estimated_from_an_evaluation(tmp_path: Path) -> None:
    design = Design(base=0.4, tasks=2000, trials=4, icc=0.6, shared=0.7)
    found = read_difficulty(evaluated(tmp_path / "evaluation", design, 0.1, trials=4))
    assert (found.tasks, found.trials) == (2000, 4)
    assert found.base == pytest.approx(0.4, abs=0.04)
    assert found.icc == pytest.approx(0.6, abs=0.08)
    assert found.shared == pytest.approx(0.7, abs=0.12)


def test_one_trial_gives_no_difficulty(tmp_path: Path) -> None:
    design = Design(base=0.4, tasks=100, trials=1, icc=0.6, shared=0.7)
    with pytest.raises(UserError, match="--icc"):
        read_difficulty(evaluated(tmp_path / "evaluation", design, 0.1, trials=1))


def test_missing_numbers_come_from_the_evaluation(tmp_path: Path) -> None:
    folder = evaluated(tmp_path / "evaluation", DESIGN, 0.1, trials=4)
    design, source = complete_design(
        {**dict.fromkeys(("base", "tasks", "icc", "shared")), "trials": 2}, folder, level=0.01, power=0.9
    )
    found = read_difficulty(folder)
    assert (design.tasks, design.trials, design.icc, design.level) == (120, 2, found.icc, 0.01)
    assert str(folder) in source
    whole, nowhere = {"base": 0.4, "tasks": 120, "trials": 4, "icc": 0.6, "shared": 0.7}, tmp_path / "nowhere"
    assert complete_design(whole, nowhere, level=0.05, power=0.8) == (DESIGN, "as given")
    with pytest.raises(UserError, match="main.csv is missing"):
        complete_design({**whole, "icc": None}, nowhere, level=0.05, power=0.8)


def test_the_plan_names_trials_tasks_and_assumptions() -> None:
    console = Console(width=140, record=True, file=StringIO())
    for part in design_tables(DESIGN, 0.1, "a guess"):
        console.print(part)
    text = console.export_text()
    assert f"{detectable(DESIGN):.3f}" in text and f"{tasks_needed(DESIGN, 0.1)} tasks" in text
    assert "0.6 of the variance" in text and "a guess" in text
