"""Statistics of outcomes: pass rates, intervals, tests, bounds and the power of a comparison.

Outcomes of one method are an array (tasks, trials): 1.0 passed, 0.0 failed, NaN error. An error says nothing about the
agent, so it is left out of every rate. Resampling is by task, because trials of one task are not independent.

- pass^k is tau-bench's unbiased estimator C(c, k) / C(n, k) (arXiv 2406.12045).
- Intervals are percentiles of a bootstrap over tasks.
- The paired test is the exact sign test over tasks. With one trial per task it is McNemar's exact test.
- All tests of one table are corrected by Holm (1979).
- The effect size is Cohen's h (1988) of two rates.

Power is the closed form for paired proportions: two methods play the same tasks, each several times. `icc` is the share
of the variance of outcomes that lies between tasks, and `shared` correlates the two methods' chances, because a hard
task is hard for both. More trials remove only the noise within tasks; the difference between tasks stays. So on few
tasks a small difference is out of reach at any price.

scipy is imported inside functions, because most callers run no test.
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
"""Limits of a planned comparison."""
STEP = 0.001
"""Resolution of detectable differences."""
NORMAL = NormalDist()


@dataclass(frozen=True)
class MethodOutcomes:
    """Outcomes of one method.

    Args:
        rates: (tasks,) pass rate over a task's trials; NaN if all are errors.
        pass_k: (tasks,) estimated chance that k trials all pass; NaN with fewer than k scored trials.
        trials: scored ones.
        errors: trials without a score.
        one_policy: one policy played all trials of a task, so the sign test is exact.
    """

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
    """Average each task's defined values, (tasks, trials) -> (tasks,); NaN if there is none."""
    count = (~np.isnan(values)).sum(axis=1)
    means = np.full(len(values), np.nan)
    np.divide(np.nansum(values, axis=1), count, out=means, where=count > 0)
    return means


def followed(arms: Mapping[str, Floats], choices: Sequence[str]) -> Floats:
    """Select the outcomes (tasks, trials) of the arm chosen for each task."""
    return np.stack([arms[arm][row] for row, arm in enumerate(choices)])


def oracle(arms: Sequence[Floats]) -> MethodOutcomes:
    """Choose the best arm per task on all trials but one, and score it on that one, each in turn.

    The first arm wins ties. Choosing and scoring on the same trials would reward luck. The choice rests on few trials,
    so the expectation is at most that of a perfect router. Undefined with one trial. pass^k is undefined, too, because
    a task's trials are not independent.
    """
    stack = np.stack(arms)
    scored = np.full(stack.shape[1:], np.nan)
    trials = stack.shape[2] if stack.shape[2] > 1 else 0
    for score in range(trials):
        remaining = np.delete(stack, score, axis=2)
        count = (~np.isnan(remaining)).sum(axis=2)
        rates = np.full(count.shape, -1.0)
        np.divide(np.nansum(remaining, axis=2), count, out=rates, where=count > 0)
        best = rates.argmax(axis=0)
        scored[:, score] = stack[best, np.arange(len(best))][:, score]
    return replace(summarise(scored), pass_k=np.full(len(scored), np.nan), one_policy=False)


def random_choice(arms: Sequence[Floats]) -> MethodOutcomes:
    """Return the exact expectation of a uniformly random arm per task: the mean over arms.

    A task is undefined if one arm is. Trials and errors are summed over arms.
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
    """Choose the best adapter on half of the tasks, score it on the other half, and swap.

    The halves alternate in the order of the hashes of task ids, so they do not follow task kinds. Undefined without
    adapters or with one task.
    """
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
    """Average the defined values; return `undefined` if there is none."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else undefined


@dataclass(frozen=True)
class Ratio:
    """A quotient of two sums over tasks, given by the summands of each task, (tasks,)."""

    numerators: Floats
    denominators: Floats

    @property
    def value(self) -> float:
        """The quotient; NaN if the denominator is 0."""
        total = float(self.denominators.sum())
        return float(self.numerators.sum()) / total if total > 0 else np.nan


CHUNK = 1 << 20
"""Most counts of resamples in memory at once."""


class Bootstrap:
    """Percentile intervals of means over tasks. All methods share the resamples, so differences are paired.

    Args:
        tasks: number of tasks.
        resamples: number of draws of that many tasks with replacement.
        confidence: of the intervals.
        seed: of the draws.
    """

    def __init__(self, tasks: int, resamples: int, confidence: float, seed: int) -> None:
        self.tasks, self.resamples, self.seed = tasks, resamples, seed
        self.bounds = (50 * (1 - confidence), 50 * (1 + confidence))
        self._whole = [*self._draws()] if resamples * tasks <= CHUNK else []

    def _draws(self) -> Iterator[Floats]:
        """Yield how often each task is drawn, (resamples, tasks), in chunks."""
        generator, size = np.random.default_rng(self.seed), max(1, CHUNK // self.tasks)
        for start in range(0, self.resamples, size):
            rows = min(size, self.resamples - start)
            draws = generator.integers(self.tasks, size=(rows, self.tasks))
            flat = (draws + np.arange(rows)[:, None] * self.tasks).ravel()
            yield np.bincount(flat, minlength=rows * self.tasks).reshape(rows, self.tasks).astype(float)

    def interval(self, values: Floats) -> tuple[float, float]:
        """Bootstrap the interval of the mean of the defined `values` (tasks,)."""
        return self.intervals([values])[0]

    def intervals(self, rows: Sequence[Floats]) -> list[tuple[float, float]]:
        """Bootstrap the intervals of several means with one set of resamples."""
        defined = [(~np.isnan(values)).astype(float) for values in rows]
        ratios = [Ratio(np.where(weights, values, 0.0), weights) for values, weights in zip(rows, defined, strict=True)]
        return [self.percentiles(values) for values in self.resampled(ratios)]

    def resampled(self, ratios: Sequence["Ratio"]) -> list[Floats]:
        """Compute each ratio in each resample, (resamples,); NaN if its denominator is 0.

        All ratios have the same resamples, so differences between them are paired.
        """
        chunks: list[list[Floats]] = [[] for _ in ratios]
        for counts in self._whole or self._draws():
            for ratio, values in zip(ratios, chunks, strict=True):
                weight, total = counts @ ratio.denominators, counts @ ratio.numerators
                values.append(np.divide(total, weight, out=np.full(len(counts), np.nan), where=weight > 0))
        return [np.concatenate(values) for values in chunks]

    def percentiles(self, values: Floats) -> tuple[float, float]:
        """Return the interval of the defined values over resamples."""
        defined = values[~np.isnan(values)]
        if not len(defined):
            return np.nan, np.nan
        low, high = np.percentile(defined, self.bounds)
        return float(low), float(high)


def sign_test(better: int, worse: int) -> float:
    """Return p of the exact two-sided sign test; 1.0 without discordant tasks.

    Args:
        better: tasks where the first method is ahead.
        worse: tasks where the second method is ahead.
    """
    from scipy.stats import binomtest

    return float(binomtest(min(better, worse), better + worse).pvalue) if better + worse else 1.0


def wilson(count: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share; (0, 1) if `total` is 0."""
    z = NORMAL.inv_cdf(0.975)
    if not total:
        return 0.0, 1.0
    middle = (count + z**2 / 2) / (total + z**2)
    half = z * sqrt(count * (total - count) / total + z**2 / 4) / (total + z**2)
    return max(0.0, middle - half), min(1.0, middle + half)


def cohens_h(first: float, second: float) -> float:
    """Return Cohen's h of two rates: .2 is small, .5 medium, .8 large; NaN if a rate is NaN."""
    return float(2 * asin(sqrt(first)) - 2 * asin(sqrt(second)))


def holm(p: Sequence[float]) -> list[float]:
    """Adjust the p-values of one family by Holm's method. NaN stays NaN and does not count as a test."""
    values = np.array(p, dtype=float)
    order = np.argsort(values)[: np.count_nonzero(~np.isnan(values))]
    values[order] = np.minimum(1, np.maximum.accumulate(values[order] * np.arange(len(order), 0, -1)))
    return values.tolist()


def fisher(first: tuple[int, int], second: tuple[int, int]) -> tuple[float, float]:
    """Compute Fisher's exact two-sided test of two shares, like `scipy.stats.fisher_exact` but without scipy.

    Args:
        first: count and total of a sample.
        second: count and total of the other sample.

    Returns:
        p, and the least p of any table with these margins. If the latter is high, no table is significant.
    """
    successes, total = first[0] + second[0], first[1] + second[1]
    support = np.arange(max(0, successes - second[1]), min(successes, first[1]) + 1)
    logs = _log_binomials(first[1], support) + _log_binomials(second[1], successes - support)
    chances = np.exp(logs - _log_binomials(total, np.array(successes)))
    # Allow for rounding between tables of equal chance.
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
