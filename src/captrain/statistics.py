"""Statistics of outcomes: pass rates, intervals, tests, bounds, power of a comparison; no tables, no files.

Outcomes of one method are an array (tasks, trials) of 1.0 passed, 0.0 failed, NaN error. An error says nothing about
the agent: it is left out of every rate. The unit of resampling is the task, because trials of one task are not
independent.

Sources: pass^k is tau-bench's unbiased estimator C(c, k) / C(n, k) (arXiv 2406.12045); intervals are percentiles of
a bootstrap over tasks (clusters); the paired test is the exact sign test over tasks, which is McNemar's exact test
where each task was played once. Many comparisons of one table are one family: Holm (1979) keeps the chance of any
false one at the level. The effect size is Cohen's h (1988) of two rates.

Power is the closed form for paired proportions: two methods play the same tasks, each several times. `icc` is the share
of the variance of outcomes that lies between tasks, and `shared` correlates the two methods' chances, because a hard
task is hard for both. More trials remove only the noise within tasks; the difference between tasks stays. So on few
tasks a small difference is out of reach at any price.

scipy is imported where it is called, because most readers of a table test nothing.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import asin, ceil, comb, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from captrain.errors import UserError

Floats = NDArray[np.float64]
MAX_TASKS, MAX_TRIALS = 100_000, 64
"""Most tasks and trials of a planned comparison."""
STEP = 0.001
"""Resolution of detectable differences."""
NORMAL = NormalDist()


@dataclass(frozen=True)
class MethodOutcomes:
    """Outcomes of one method: `rates` (tasks,) is the pass rate over a task's trials, NaN where all were errors;
    `pass_k` (tasks,) estimates the chance that all k trials pass, NaN where fewer than k were without error;
    `one_policy` says that the outcomes of a task are one policy's, so that a sign test against another is exact."""

    rates: Floats
    pass_k: Floats
    trials: int
    errors: int
    one_policy: bool = True


def summarise(passes: Floats) -> MethodOutcomes:
    """Summarise outcomes (tasks, trials); k of pass^k is the number of trials."""
    valid = ~np.isnan(passes)
    k = passes.shape[1]
    pairs = zip(np.nansum(passes, axis=1), valid.sum(axis=1), strict=True)
    pass_k = np.array([comb(int(c), k) / comb(int(n), k) if n >= k else np.nan for c, n in pairs])
    return MethodOutcomes(task_means(passes), pass_k, int(valid.sum()), int((~valid).sum()))


def task_means(values: Floats) -> Floats:
    """Average each task's defined values, (tasks, trials) -> (tasks,); NaN where there is none.

    Of rewards or similarities, what `Bootstrap.interval` takes to give the interval of their mean over tasks.
    """
    count = (~np.isnan(values)).sum(axis=1)
    means = np.full(len(values), np.nan)
    np.divide(np.nansum(values, axis=1), count, out=means, where=count > 0)
    return means


def followed(arms: Mapping[str, Floats], choices: Sequence[str]) -> Floats:
    """Select the outcomes (tasks, trials) of the arm chosen for each task."""
    return np.stack([arms[arm][row] for row, arm in enumerate(choices)])


def oracle(arms: Sequence[Floats]) -> MethodOutcomes:
    """Choose the best arm a task on all trials but one and score it on that one, each in turn; the first arm wins ties.

    Choosing and scoring on the same trials would reward luck. The price is that the choice rests on few trials: in
    expectation this is never above what a perfect router reaches, and it may be below. With one trial it is undefined.
    So is pass^k: each trial is scored on the others' choice, so a task's outcomes are not independent
    given its policy.
    """
    stack = np.stack(arms)
    scored = np.full(stack.shape[1:], np.nan)
    for score in range(stack.shape[2]) if stack.shape[2] > 1 else ():
        remaining = np.delete(stack, score, axis=2)
        count = (~np.isnan(remaining)).sum(axis=2)
        rates = np.full(count.shape, -1.0)
        np.divide(np.nansum(remaining, axis=2), count, out=rates, where=count > 0)
        best = rates.argmax(axis=0)
        scored[:, score] = stack[best, np.arange(len(best))][:, score]
    return replace(summarise(scored), pass_k=np.full(len(scored), np.nan), one_policy=False)


def random_choice(arms: Sequence[Floats]) -> MethodOutcomes:
    """Compute the exact expectation of a uniformly random arm a task: the mean over arms, nothing is sampled.

    Undefined for a task where one arm is: leaving that arm out would favour the others. Trials and errors are those of
    all arms.
    """
    summaries = [summarise(array) for array in arms]
    return MethodOutcomes(
        rates=np.stack([arm.rates for arm in summaries]).mean(axis=0),
        pass_k=np.stack([arm.pass_k for arm in summaries]).mean(axis=0),
        trials=sum(arm.trials for arm in summaries),
        errors=sum(arm.errors for arm in summaries),
        one_policy=False,
    )


def best_single(adapters: Mapping[str, Floats], tasks: Sequence[str]) -> MethodOutcomes:
    """Choose the one adapter that is best on average, for every task, on half of the tasks; score it on the other half,
    and swap. Halves alternate in the order of the task ids' hashes, so that they do not follow task kinds. Undefined
    without adapters or with one task."""
    if not adapters or len(tasks) < 2:
        undefined = np.full(len(tasks), np.nan)
        return MethodOutcomes(undefined, undefined, 0, 0)
    order = sorted(range(len(tasks)), key=lambda row: hashlib.sha256(tasks[row].encode()).hexdigest())
    halves = (np.array(order[0::2]), np.array(order[1::2]))
    choices = [""] * len(tasks)
    for choose, score in (halves, halves[::-1]):
        best = max(adapters, key=lambda arm: mean(summarise(adapters[arm][choose]).rates, undefined=-1.0))
        for row in score:
            choices[row] = best
    return summarise(followed(adapters, choices))


def mean(values: Floats, undefined: float = np.nan) -> float:
    """Average the defined values, or return `undefined` where there is none."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else undefined


@dataclass(frozen=True)
class Ratio:
    """A quotient of two sums over tasks: `numerators` and `denominators` are what each task adds, (tasks,)."""

    numerators: Floats
    denominators: Floats

    @property
    def value(self) -> float:
        """NaN where the denominator is 0."""
        total = float(self.denominators.sum())
        return float(self.numerators.sum()) / total if total > 0 else np.nan


CHUNK = 1 << 20
"""Counts of resamples that are in memory at once: many tasks are resampled a few times at a time."""


class Bootstrap:
    """Percentile intervals of means over tasks; all methods share the same resamples, so differences are paired.

    Args:
        tasks: how many.
        resamples: how often to draw that many tasks with replacement.
        confidence: of the intervals.
        seed: of the draws.
    """

    def __init__(self, tasks: int, resamples: int, confidence: float, seed: int) -> None:
        self.tasks, self.resamples, self.seed = tasks, resamples, seed
        self.bounds = (50 * (1 - confidence), 50 * (1 + confidence))
        self._whole = [*self._draws()] if resamples * tasks <= CHUNK else []

    def _draws(self) -> Iterator[Floats]:
        """Yield counts of each task's draws, (some resamples, tasks), until all resamples are there."""
        generator, size = np.random.default_rng(self.seed), max(1, CHUNK // self.tasks)
        for start in range(0, self.resamples, size):
            rows = min(size, self.resamples - start)
            draws = generator.integers(self.tasks, size=(rows, self.tasks))
            flat = (draws + np.arange(rows)[:, None] * self.tasks).ravel()
            yield np.bincount(flat, minlength=rows * self.tasks).reshape(rows, self.tasks).astype(float)

    def interval(self, values: Floats) -> tuple[float, float]:
        """Bootstrap the interval of the mean of `values` (tasks,) over the tasks where it is defined."""
        return self.intervals([values])[0]

    def intervals(self, rows: Sequence[Floats]) -> list[tuple[float, float]]:
        """Bootstrap the intervals of several means at the price of one series of resamples."""
        defined = [(~np.isnan(values)).astype(float) for values in rows]
        ratios = [Ratio(np.where(weights, values, 0.0), weights) for values, weights in zip(rows, defined, strict=True)]
        return [self.percentiles(values) for values in self.resampled(ratios)]

    def resampled(self, ratios: Sequence["Ratio"]) -> list[Floats]:
        """Compute each ratio in each resample of the tasks, (resamples,), NaN where its denominator is 0.

        All have the same resamples, so that what is computed of several, as a difference, is paired.
        """
        chunks: list[list[Floats]] = [[] for _ in ratios]
        for counts in self._whole or self._draws():
            for ratio, values in zip(ratios, chunks, strict=True):
                weight, total = counts @ ratio.denominators, counts @ ratio.numerators
                values.append(np.divide(total, weight, out=np.full(len(counts), np.nan), where=weight > 0))
        return [np.concatenate(values) for values in chunks]

    def percentiles(self, values: Floats) -> tuple[float, float]:
        """Take the interval of values over the resamples where they are defined."""
        defined = values[~np.isnan(values)]
        if not len(defined):
            return np.nan, np.nan
        low, high = np.percentile(defined, self.bounds)
        return float(low), float(high)


def sign_test(better: int, worse: int) -> float:
    """Compute the exact two-sided sign test; 1.0 where nothing is discordant.

    Args:
        better: tasks on which the first is ahead.
        worse: tasks on which the second is; ties are left out.
    """
    from scipy.stats import binomtest

    return float(binomtest(min(better, worse), better + worse).pvalue) if better + worse else 1.0


def wilson(count: int, total: int) -> tuple[float, float]:
    """Compute Wilson's 95% interval of a share of so many; 0 to 1 of none."""
    z = NORMAL.inv_cdf(0.975)
    if not total:
        return 0.0, 1.0
    middle = (count + z**2 / 2) / (total + z**2)
    half = z * sqrt(count * (total - count) / total + z**2 / 4) / (total + z**2)
    return max(0.0, middle - half), min(1.0, middle + half)


def cohens_h(first: float, second: float) -> float:
    """Compute Cohen's h of two rates, arcsine-transformed so that one size means the same near 0 or 1 as at a half: .2
    is small, .5 medium, .8 large. Positive where the first is higher; NaN where a rate is."""
    return float(2 * asin(sqrt(first)) - 2 * asin(sqrt(second)))


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


@dataclass(frozen=True)
class Design:
    """Plan of a paired comparison of two methods on the same tasks.

    Args:
        base: pass rate of the second method.
        tasks: that both methods play.
        trials: of each task and method.
        icc: share of the variance of outcomes that lies between tasks, in [0, 1).
        shared: correlation between the two methods' chances on one task, in [0, 1].
        level: of the two-sided test.
        power: chance to detect the difference.
    """

    base: float
    tasks: int
    trials: int
    icc: float
    shared: float
    level: float = 0.05
    power: float = 0.8

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

    @property
    def sigmas(self) -> float:
        """Standard errors that a difference must span to be detected with the wanted power."""
        return NORMAL.inv_cdf(1 - self.level / 2) + NORMAL.inv_cdf(self.power)

    def variances(self, difference: float) -> tuple[float, float]:
        """Return the variance of a task's difference between tasks, and within a task for one trial.

        Raises:
            UserError: the first method's rate would not lie in (0, 1).
        """
        rate = self.base + difference
        if not 0.0 < rate < 1.0:
            raise UserError(f"base + difference must lie in (0, 1), got {rate:.3g}", "give a smaller --difference")
        first, second = rate * (1 - rate), self.base * (1 - self.base)
        between = self.icc * (first + second - 2 * self.shared * sqrt(first * second))
        return between, (1 - self.icc) * (first + second)


def power_of(design: Design, difference: float) -> float:
    """Return the chance to detect a difference (first rate minus `design.base`), by the normal approximation.

    Raises:
        UserError: the first method's rate would not lie in (0, 1).
    """
    between, within = design.variances(difference)
    distance = abs(difference) / sqrt((between + within / design.trials) / design.tasks)
    bound = NORMAL.inv_cdf(1 - design.level / 2)
    return NORMAL.cdf(distance - bound) + NORMAL.cdf(-distance - bound)


def detectable(design: Design) -> float | None:
    """Return the least gain over the base, to .001, that is detected with the wanted power; None if there is none."""
    gains = (step * STEP for step in range(1, int((1.0 - design.base) / STEP - 1e-9) + 1))
    return next((round(gain, 3) for gain in gains if power_of(design, gain) >= design.power), None)


def trials_needed(design: Design, difference: float) -> int | None:
    """Return the least trials of each task that detect the difference on the design's tasks.

    None above `MAX_TRIALS`: trials remove only the noise within tasks, so no number of them may be enough.
    """
    between, within = design.variances(difference)
    allowed = design.tasks * (difference / design.sigmas) ** 2 - between
    return _at_most(MAX_TRIALS, within / allowed) if allowed > 0 else None


def tasks_needed(design: Design, difference: float) -> int | None:
    """Return the least tasks that detect the difference with the design's trials; None above `MAX_TASKS`."""
    between, within = design.variances(difference)
    return _at_most(MAX_TASKS, max(2.0, (between + within / design.trials) * (design.sigmas / difference) ** 2))


def _at_most(most: int, number: float) -> int | None:
    return ceil(number) if number <= most else None
