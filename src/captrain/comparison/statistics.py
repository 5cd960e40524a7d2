"""Pass rates, intervals, tests and bounds on outcomes: the statistics of the evaluation, free of tables and files.

Outcomes of one method are an array (tasks, trials) of 1.0 passed, 0.0 failed, NaN error. An error says nothing about
the agent: it is left out of every rate. The unit of resampling is the task, because trials of one task are not
independent.

Sources: pass^k is tau-bench's unbiased estimator C(c, k) / C(n, k) (arXiv 2406.12045); intervals are percentiles of
a bootstrap over tasks (clusters); the paired test is the exact sign test over tasks, which is McNemar's exact test
where each task was played once. Many comparisons of one table are one family: Holm (1979) keeps the chance of any
false one at the level. The effect size is Cohen's h (1988) of two rates.

scipy is imported where it is called, because most readers of a table test nothing.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import asin, comb, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


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
    expectation this is never above what a perfect router reaches, and it may be below. It takes two trials or more.
    Undefined is pass^k: each trial is scored on the others' choice, so a task's outcomes are not independent
    given its policy.
    """
    stack = np.stack(arms)
    scored = np.full(stack.shape[1:], np.nan)
    for score in range(stack.shape[2]):
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
    z = NormalDist().inv_cdf(0.975)
    if not total:
        return 0.0, 1.0
    middle = (count + z**2 / 2) / (total + z**2)
    half = z * sqrt(count * (total - count) / total + z**2 / 4) / (total + z**2)
    return max(0.0, middle - half), min(1.0, middle + half)


def cohens_h(first: float, second: float) -> float:
    """Compute Cohen's h of two rates, arcsine-transformed so that one size means the same near 0 or 1 as at a half: .2
    is small, .5 medium, .8 large. Positive where the first is higher; NaN where a rate is."""
    return float(2 * asin(sqrt(first)) - 2 * asin(sqrt(second)))
