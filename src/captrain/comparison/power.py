"""Power of a comparison: the difference that it can detect, and what a wanted one takes, before anything is spent.

Two methods play the same tasks, each several times, as in the evaluation. A task's chance to be passed is drawn from a
beta distribution with the method's rate as mean and `icc` as the share of the variance of outcomes that lies between
tasks; the two methods' chances on one task are tied by a normal copula of correlation `shared`, because a hard task is
hard for both. The test is the two-sided paired t on the tasks' differences, at a level: on some dozens of tasks or more
it agrees with the interval of the bootstrap over tasks that the evaluation calls `distinguishable`, and it costs
nothing to repeat. Power is the share of simulated worlds in which it finds a difference.

More trials remove the noise within tasks alone; what the methods differ by from task to task stays, so that on few
tasks a small difference is out of reach at any price. What differs between training seeds is not part of this: a
comparison of two trained adapters says nothing of the next two.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.table import Table

from captrain.comparison.rows import BASE, TRACE
from captrain.comparison.tables import evaluation_metrics, evaluation_table
from captrain.errors import UserError
from captrain.records import JsonObject

Floats = NDArray[np.float64]
MAX_TASKS, MAX_TRIALS = 100_000, 64
GRID = 512
"""Equal shares that the distribution of tasks is cut into, by difficulty."""
RATES = ("method", "pass_rate", "low", "high", "tasks", "trials")
DIFFERENCES = ("first", "second", "low", "high")
"""Columns that are read of an evaluation."""
STEP = 0.001
"""Differences are found to this."""


@dataclass(frozen=True)
class Design:
    """A comparison as it is planned: the second method's rate, tasks, trials of each task and method, what is known of
    the tasks' difficulty, the test's level, the power that is wanted, and how it is simulated.

    Difficulty is `icc` in [0, 1), the share of the variance of outcomes that lies between tasks, and `shared` in [0,
    1], how far two methods find the same tasks hard.
    """

    base: float
    tasks: int
    trials: int
    icc: float
    shared: float
    level: float = 0.05
    power: float = 0.8
    worlds: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for name in ("base", "level", "power"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise UserError(f"{name} must lie in (0, 1), got {getattr(self, name)}", f"give another {name}")
        if not 0.0 <= self.icc < 1.0 or not 0.0 <= self.shared <= 1.0:
            raise UserError(
                f"icc must lie in [0, 1) and shared in [0, 1], got {self.icc} and {self.shared}",
                "give others by --icc and --shared",
            )
        if not 2 <= self.tasks <= MAX_TASKS or not 1 <= self.trials <= MAX_TRIALS:
            raise UserError(
                f"tasks must be 2 to {MAX_TASKS} and trials 1 to {MAX_TRIALS}, got {self.tasks} and {self.trials}",
                "plan with others by --tasks and --trials",
            )


@lru_cache(maxsize=4096)
def simulated_power(design: Design, difference: float) -> float:
    """Simulate the chance that the test finds the difference.

    Args:
        design: of the comparison.
        difference: the first method's rate less the second's, which is `design.base`.

    Raises:
        UserError: the first method's rate would not be in (0, 1).
    """
    from scipy.special import stdtrit

    if not 0.0 < design.base + difference < 1.0:
        raise UserError(
            f"base + difference must lie in (0, 1), got {design.base + difference:.3g}", "give a smaller --difference"
        )
    # Tasks are alike before they are drawn, so a world is how many of them come to each difference.
    random = np.random.default_rng(design.seed)
    worlds = random.multinomial(design.tasks, _differences(design, difference), size=design.worlds)
    passed = np.arange(-design.trials, design.trials + 1)
    total, square = worlds @ passed, worlds @ passed**2
    # Of whole trials, so that a spread of 0 is exactly 0.
    spread = np.sqrt((design.tasks * square - total**2) / (design.tasks - 1))
    bound = stdtrit(design.tasks - 1, 1 - design.level / 2)
    return float((np.abs(total) > bound * spread).mean())


def detectable(design: Design) -> float | None:
    """Find the least gain over the base, to .001, that is found with the power wanted; None where none is."""
    steps = int((1.0 - design.base) / STEP - 1e-9)
    least = _first(steps, lambda step: simulated_power(design, step * STEP) >= design.power)
    return None if least is None else round(least * STEP, 3)


def trials_needed(design: Design, difference: float) -> int | None:
    """Find the least trials of each task with which the difference is found on the design's tasks; None beyond
    `MAX_TRIALS`, where as a rule no number will do: the methods differ too much from task to task."""
    return _first(
        MAX_TRIALS, lambda trials: simulated_power(replace(design, trials=trials), difference) >= design.power
    )


def tasks_needed(design: Design, difference: float) -> int | None:
    """Find the least tasks with which the difference is found with the design's trials; None beyond `MAX_TASKS`."""
    return _first(
        MAX_TASKS, lambda tasks: tasks > 1 and simulated_power(replace(design, tasks=tasks), difference) >= design.power
    )


def _first(most: int, enough: Callable[[int], bool]) -> int | None:
    """Find the least of 1..most that is enough, by doubling and halving."""
    low, high = 0, 1
    while not enough(min(high, most)):
        if high >= most:
            return None
        low, high = high, 2 * high
    high = min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _differences(design: Design, difference: float) -> Floats:
    """Compute the distribution of one task's difference in passed trials, at -trials, ..., trials."""
    trials = design.trials
    first = _outcomes(design.base + difference, design.icc, trials)
    second = _outcomes(design.base, design.icc, trials)
    joint = first.T @ _joint_shares(design.shared) @ second / GRID
    passed = np.arange(trials + 1)
    shares = np.bincount((passed[:, None] - passed + trials).ravel(), weights=joint.ravel())
    return shares / shares.sum()


@lru_cache(maxsize=64)
def _outcomes(rate: float, icc: float, trials: int) -> Floats:
    """Compute the chance of 0, ..., trials passed on a task, in each of GRID equal shares of tasks, hardest first."""
    from scipy.special import betaincinv, comb

    chance = np.full(GRID, rate)
    if icc > 0.0:
        size = 1 / icc - 1
        chance = betaincinv(rate * size, (1 - rate) * size, (np.arange(GRID) + 0.5) / GRID)
    passed = np.arange(trials + 1)
    sequence = np.float_power(chance[:, None], passed) * np.float_power(1 - chance[:, None], trials - passed)
    return np.asarray(comb(trials, passed) * sequence, dtype=float)


@lru_cache(maxsize=8)
def _joint_shares(shared: float) -> Floats:
    """Compute the chance that a task of each share of the first method's tasks is of each share of the second's."""
    from scipy.special import ndtr, ndtri

    if shared == 1.0:
        return np.eye(GRID)
    middles, edges = ndtri((np.arange(GRID) + 0.5) / GRID), ndtri(np.arange(GRID + 1) / GRID)
    return np.diff(ndtr((edges - shared * middles[:, None]) / np.sqrt(1 - shared**2)), axis=1)


def read_difficulty(folder: Path) -> tuple[JsonObject, str]:
    """Estimate the difficulty of an evaluation's tasks from its tables alone.

    The interval of a pass rate holds the variance of task rates, which is p (1 - p) (icc + (1 - icc) / trials); the
    interval of the difference between TRACE and the base holds, with those of both, what they share.

    Args:
        folder: with main.csv, differences.csv and metrics.json.

    Returns:
        The fields of `Design` base, tasks, trials, icc and shared; and where they come from.

    Raises:
        UserError: a table is missing, or each task was played once, which tells nothing of icc.
    """
    from scipy.special import ndtri

    main = {row["method"]: row for row in evaluation_table(folder, "main", RATES).to_dict("records")}
    pairs = evaluation_table(folder, "differences", DIFFERENCES).to_dict("records")
    differences = [row for row in pairs if (row["first"], row["second"]) == (TRACE, BASE)]
    if not {TRACE, BASE} <= {*main} or not differences:
        remedy = "give --base, --tasks, --trials, --icc and --shared, or run `dvc repro evaluation`"
        raise UserError(f"{folder} does not compare TRACE with the base", remedy)
    z = float(ndtri((1 + evaluation_metrics(folder).confidence) / 2))
    tasks = int(main[BASE]["tasks"])
    trials = round(main[BASE]["trials"] / tasks)
    if trials < 2:
        raise UserError(f"{folder} played each task once", "give --icc and --shared, or play 2 trials or more")
    # The variance of a task's contribution to a mean, from the mean's interval.
    rows = [main[TRACE], main[BASE], differences[0]]
    trace, base, gap = (tasks * ((row["high"] - row["low"]) / (2 * z)) ** 2 for row in rows)
    outcomes = [row["pass_rate"] * (1 - row["pass_rate"]) for row in rows[:2]]
    icc = [
        (trials * rates / whole - 1) / (trials - 1) if whole else 0.0
        for rates, whole in zip((trace, base), outcomes, strict=True)
    ]
    between = [max(0.0, share) * whole for share, whole in zip(icc, outcomes, strict=True)]
    product = float(np.sqrt(between[0] * between[1]))
    shared = min(max((trace + base - gap) / 2 / product, 0.0), 1.0) if product > 0 else 0.0
    numbers = {"base": float(main[BASE]["pass_rate"]), "tasks": tasks, "trials": trials}
    numbers |= {"icc": round(min(max(float(np.mean(icc)), 0.0), 0.99), 3), "shared": round(shared, 3)}
    return numbers, f"{folder}: TRACE and the base on {tasks} tasks x {trials} trials"


def complete_design(
    fields: Mapping[str, float | int | None], folder: Path, *, level: float, power: float
) -> tuple[Design, str]:
    """Complete a design by numbers as they were in an evaluation; and say where icc and shared come from.

    Args:
        fields: base, tasks, trials, icc and shared, as far as they are known.
        folder: of the evaluation; it is read only where something is None.
        level: see `Design`.
        power: likewise.

    Raises:
        UserError: something is None and the evaluation does not tell it, or the numbers are no design.
    """
    numbers, source = read_difficulty(folder) if None in fields.values() else (JsonObject(), "as given")
    if None not in (fields["icc"], fields["shared"]):
        source = "as given"
    numbers |= {name: value for name, value in fields.items() if value is not None}
    return Design(**numbers, level=level, power=power), source


def design_tables(design: Design, difference: float | None, source: str) -> list[RenderableType]:
    """Render a design: what is detectable with other numbers of trials and tasks, and what `difference` takes."""
    table = Table()
    counts = [number for number in (design.tasks // 2, design.tasks, 2 * design.tasks) if 2 <= number <= MAX_TASKS]
    table.add_column("trials")
    for tasks in counts:
        table.add_column(f"{tasks} tasks", justify="right", style="bold" if tasks == design.tasks else None)
    for trials in sorted({1, 2, 4, design.trials}):
        gains = [detectable(replace(design, tasks=tasks, trials=trials)) for tasks in counts]
        cells = ["none" if gain is None else f"{gain:.3f}" for gain in gains]
        table.add_row(str(trials), *cells, style="bold" if trials == design.trials else None)
    title = f"Least gain over {design.base:.3f} found with power {design.power:g} at level {design.level:g}"
    parts: list[RenderableType] = [title, table]
    if difference is not None:
        trials, tasks = trials_needed(design, difference), tasks_needed(design, difference)
        times = "once" if design.trials == 1 else f"{design.trials} times"
        chance, tasks_each = simulated_power(design, difference), f"tasks, each played {times}"
        parts.append(
            f"A difference of {difference:.3f} is found with power {chance:.2f} on "
            f"{design.tasks} {tasks_each}.\nIt takes {trials or f'more than {MAX_TRIALS}'} trials on these tasks, or "
            f"{tasks or f'more than {MAX_TASKS:,}'} {tasks_each}."
        )
    icc, shared = f"{design.icc:g} of the variance of outcomes lies between tasks", f"{design.shared:g} of it shared"
    return [*parts, f"Assumed: {icc}, {shared} ({source})."]
