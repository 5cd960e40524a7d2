"""Compares failed with passed rollouts by their labels, and selects capabilities.

Source: TRACE, capability selection. Per run, ER-(c) = LACKING / (LACKING + PRESENT) among failed rollouts, ER+(c) the
same among passed ones, gap = ER- - ER+, coverage = LACKING among failed / all failed. We add two things. A rate without
a denominator is undefined, never 0. A bootstrap over tasks gives the interval of the gap, because a gap of few rollouts
may be chance, and trials of one task are much alike. `selection_rule.py` decides on these numbers. Nothing is labelled
or played here, so other thresholds can be tried in seconds.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from captrain.capabilities.selection_rule import (
    CandidateAccount,
    Contrast,
    Decision,
    Limits,
    RunRates,
    SelectionAccount,
    decide,
    mean_gap,
)
from captrain.errors import UserError
from captrain.records import Capability, RolloutLabels, Verdict
from captrain.run import spec

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Counts = NDArray[np.unsignedinteger]
Codes = NDArray[np.uint8]
Places = NDArray[np.intp]
PRESENT, LACKING = 1, 2
"""Codes of verdicts; 0 is NA or not labelled."""
CHUNK = 1 << 19
"""Most weights of resamples in memory at once."""


@dataclass(frozen=True)
class SelectionResult:
    """The selected capabilities, best first, and the account of the selection."""

    report: SelectionAccount
    capabilities: list[Capability]


@dataclass(frozen=True)
class Verdicts:
    """Labels as arrays.

    codes: verdicts (candidates, label sets, rollouts); one label set for each run, or a single one if all runs agree.
    counts: how often a run's resample drew a rollout (runs, rollouts). is_candidate: whether a run proposed a candidate
    (candidates, runs). failed: (rollouts,). tasks: number of each rollout's task, from 0 without gaps (rollouts,).
    could_lack: whether a rollout could lack a candidate, so that it counts in the coverage (candidates, rollouts);
    None: all could. proven: whether a failed rollout passes only with the repair of a candidate (candidates, rollouts);
    None: not tested.
    """

    codes: Codes
    counts: Counts
    is_candidate: Flags
    failed: Flags
    tasks: Places
    could_lack: Flags | None = None
    proven: Flags | None = None

    def runs_saying(self, row: int, code: int) -> Floats:
        """Return, for each rollout, the number of a candidate's runs that gave it this verdict: (rollouts,)."""
        runs_of_set = self.is_candidate[row].reshape(self.codes.shape[1], -1).sum(axis=1)
        return runs_of_set.astype(float) @ (self.codes[row] == code).astype(float)

    def count(self, row: int, code: int, failed: bool) -> int:
        """Count failed or passed rollouts with this verdict in the last label set."""
        return int(np.count_nonzero((self.codes[row, -1] == code) & (self.failed == failed)))


@dataclass(frozen=True)
class Estimate:
    """Estimates for one candidate.

    contrast: input of the rule. gap_high, er_failed, er_passed: upper bound of the gap, and error rates. low: lower
    bound, unrounded, NaN if the gap is undefined in most resamples. undefined: number of these. shortfalls: the
    conditions that its runs miss, with counts. proven: share of proven failures with its interval; None if not tested.
    """

    contrast: Contrast
    gap_high: float | None
    er_failed: float | None
    er_passed: float | None
    low: float
    undefined: int
    shortfalls: str
    proven: tuple[float, float, float] | None


def select(
    labels: Sequence[RolloutLabels],
    candidates: Sequence[Capability],
    selection: spec.SelectionSettings,
    count: int,
    seed: int,
    needs: Mapping[str, Collection[str]] | None = None,
) -> SelectionResult:
    """Select at most `count` candidates by the rule in `selection_rule.py`; the report lists all, in rank
    order.

    Args:
        labels: of all runs.
        candidates: the capabilities in the labels.
        selection: thresholds.
        count: most capabilities selected.
        seed: of the resamples.
        needs: by rollout id, the causes whose repair it needs, proven by replay; None: not tested.

    Raises:
        UserError: there are no labels.
    """
    if not labels:
        raise UserError("there are no labels", "run `dvc repro labels` to make them again")
    return select_by_verdicts(_arrays(labels, candidates, needs), candidates, selection, count, seed)


def select_by_verdicts(
    verdicts: Verdicts, candidates: Sequence[Capability], selection: spec.SelectionSettings, count: int, seed: int
) -> SelectionResult:
    """Select as `select` does, from labels as arrays. Row i of `verdicts` belongs to candidate i."""
    gaps, shares = _resampled(verdicts, selection.resamples, seed)
    limits = Limits(
        delta=selection.delta,
        coverage=selection.coverage,
        agreement=selection.agreement,
        confidence=selection.confidence,
        floor=selection.floor,
        count=count,
    )
    if selection.ranking != "product":
        limits["ranking"] = selection.ranking
    if selection.proof is not None:
        limits["proof"] = selection.proof
    capabilities = {candidate.id: candidate for candidate in candidates}
    estimates = {
        slug: _estimate(verdicts, row, slug, gaps[row], shares[row], limits) for row, slug in enumerate(capabilities)
    }
    decisions = decide([estimate.contrast for estimate in estimates.values()], limits)
    failed = int(verdicts.failed.sum())
    report = SelectionAccount(
        thresholds=limits,
        rollouts={"passed": len(verdicts.failed) - failed, "failed": failed},
        candidates=[
            _account(capabilities[decision.id], estimates[decision.id], decision, limits, selection.resamples)
            for decision in decisions
        ],
    )
    return SelectionResult(report, [capabilities[decision.id] for decision in decisions if decision.selected])


def _arrays(
    labels: Sequence[RolloutLabels], candidates: Sequence[Capability], needs: Mapping[str, Collection[str]] | None
) -> Verdicts:
    rollouts = {name: index for index, name in enumerate(dict.fromkeys(row.rollout for row in labels))}
    runs = {run: index for index, run in enumerate(sorted({row.run for row in labels}))}
    slugs = {candidate.id: index for index, candidate in enumerate(candidates)}
    names = {row.rollout: (row.task != "", row.task or row.rollout) for row in labels}
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names.values()))}
    tasks = np.array([numbers[names[rollout]] for rollout in rollouts], np.intp)
    shape = len(slugs), len(runs), len(rollouts)
    codes, counts = np.zeros(shape, np.uint8), np.zeros(shape[1:], np.uint32)
    is_candidate, failed = np.zeros(shape[:2], bool), np.zeros(shape[2], bool)
    for row in labels:
        run, rollout = runs[row.run], rollouts[row.rollout]
        counts[run, rollout] = row.count
        failed[rollout] = row.outcome == "failed"
        for slug, label in row.labels.items():
            codes[slugs[slug], run, rollout] = code_of(label.verdict)
            is_candidate[slugs[slug], run] = True
    proven = None
    if needs is not None:
        proven = np.array([[slug in needs.get(rollout, ()) for rollout in rollouts] for slug in slugs], bool) & failed
    return Verdicts(codes, counts, is_candidate, failed, tasks, proven=proven)


def code_of(verdict: Verdict) -> int:
    """Return the code of a verdict (see `PRESENT`)."""
    return {"NA": 0, "PRESENT": PRESENT, "LACKING": LACKING}[verdict]


def _terms(verdicts: Verdicts, row: int, lacking: Floats, present: Floats) -> Floats:
    """Return what each rollout adds to the sums of a candidate's rates: (5, rollouts). Labels are (rollouts,).

    The terms are whole numbers, so their sums are exact in any order.
    """
    failed = verdicts.failed
    reach = failed if verdicts.could_lack is None else failed & verdicts.could_lack[row]
    return np.array([lacking * failed, present * failed, lacking * ~failed, present * ~failed, reach], float)


def _rates(sums: Floats, runs: int = 1) -> Floats:
    """Return a candidate's error rates on failed and on passed rollouts, gap and coverage, (4, weightings) or NaN.

    `sums` are weighted sums of `_terms`, (5, weightings), with labels summed over `runs`.
    """
    lacks, shows, passed_lacks, passed_shows, reach = sums
    er_failed, er_passed = _share(lacks, lacks + shows), _share(passed_lacks, passed_lacks + passed_shows)
    return np.array([er_failed, er_passed, er_failed - er_passed, _share(lacks, runs * reach)])


def _resampled(verdicts: Verdicts, resamples: int, seed: int) -> tuple[Floats, Floats]:
    """Return each candidate's pooled gap and share of proven failures in each resample: two arrays (candidates,
    resamples).

    Tasks are drawn, each with all of its rollouts. All candidates share the resamples, so the interval of one does not
    depend on the others. The weights are drawn in chunks to bound memory.
    """
    rows, tasks, generator = len(verdicts.codes), int(verdicts.tasks.max()) + 1, np.random.default_rng(seed)
    chances = np.full(tasks, 1 / tasks)
    gaps, shares = np.empty((rows, resamples)), np.full((rows, resamples), np.nan)

    def by_task(values: Floats | Flags) -> Floats:
        return np.bincount(verdicts.tasks, values, tasks).astype(float)

    # A resample weighs whole tasks, so sum over the rollouts of each task once, before resampling.
    terms = np.empty((rows, 5, tasks))
    for row in range(rows):
        lacking, present = verdicts.runs_saying(row, LACKING), verdicts.runs_saying(row, PRESENT)
        terms[row] = [by_task(term) for term in _terms(verdicts, row, lacking, present)]
    failed = by_task(verdicts.failed)
    proven = None if verdicts.proven is None else [by_task(row) for row in verdicts.proven]
    size = max(1, CHUNK // tasks)
    for start in range(0, resamples, size):
        part = slice(start, min(start + size, resamples))
        weights = generator.multinomial(tasks, chances, size=part.stop - start).astype(float)
        sums = terms.reshape(-1, tasks) @ weights.T
        for row in range(rows):
            gaps[row, part] = _rates(sums[5 * row : 5 * row + 5])[2]
            if proven is not None:
                shares[row, part] = _share(weights @ proven[row], weights @ failed)
    return gaps, shares


def _share(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)


def _estimate(verdicts: Verdicts, row: int, slug: str, gaps: Floats, shares: Floats, limits: Limits) -> Estimate:
    """Estimate one candidate in each run and over all rollouts."""
    is_candidate, sets = verdicts.is_candidate[row], verdicts.codes.shape[1]
    rates = np.empty((4, len(is_candidate)))
    for run, has_say in enumerate(is_candidate):
        codes = verdicts.codes[row, run % sets]
        weights = (verdicts.counts[run] * has_say).astype(float)[:, None]
        terms = _terms(verdicts, row, (codes == LACKING) * 1.0, (codes == PRESENT) * 1.0)
        rates[:, run] = _rates(terms @ weights)[:, 0]
    # If runs disagree on a rollout, its weight is divided among the verdicts.
    lacking, present = verdicts.runs_saying(row, LACKING), verdicts.runs_saying(row, PRESENT)
    sums, runs = _terms(verdicts, row, lacking, present).sum(axis=1, keepdims=True), max(1, int(is_candidate.sum()))
    er_failed, er_passed, gap, coverage = map(number_or_none, _rates(sums, runs)[:, 0])
    defined, low, high = gaps[~np.isnan(gaps)], np.nan, np.nan
    ends = [50 * (1 - limits["confidence"]), 50 * (1 + limits["confidence"])]
    if 2 * len(defined) >= len(gaps):
        low, high = np.percentile(defined, ends)
    # Rounded, so that 0.5 - 0.3 reaches a threshold of 0.2.
    per_run = [
        RunRates(gap=number_or_none(rates[2, run]), coverage=number_or_none(rates[3, run]))
        for run in range(len(is_candidate))
    ]
    contrast = Contrast(id=slug, gap=gap, gap_low=number_or_none(low), coverage=coverage, per_run=per_run)
    proven = None
    if verdicts.proven is not None:
        share = verdicts.proven[row].sum() / max(1, verdicts.failed.sum())
        least, most = np.nanpercentile(shares, ends)
        proven = round(float(share), 6), round(float(least), 6), round(float(most), 6)
        contrast["proven"], contrast["proven_low"], contrast["proven_high"] = proven
    # The number of runs that failed each condition; conditions overlap.
    few, rare = limits["delta"], limits["coverage"]
    cases = {
        "not proposed": ~is_candidate,
        "undefined: no failed rollout exercised it": is_candidate & np.isnan(rates[0]),
        "undefined: no passed rollout exercised it": is_candidate & np.isnan(rates[1]),
        f"gap below {few:g}": [run["gap"] is not None and run["gap"] < few for run in per_run],
        f"coverage below {rare:g}": [run["coverage"] is not None and run["coverage"] < rare for run in per_run],
    }
    shortfalls = ", ".join(f"{case} in {sum(map(int, runs))}" for case, runs in cases.items() if any(runs))
    undefined = len(gaps) - len(defined)
    return Estimate(contrast, number_or_none(high), er_failed, er_passed, float(low), undefined, shortfalls, proven)


def _account(
    candidate: Capability, estimate: Estimate, decision: Decision, limits: Limits, resamples: int
) -> CandidateAccount:
    """Return the candidate's entry in the account, with the reason why it is selected or which conditions it misses."""
    contrast = estimate.contrast
    retained = f"retained in {decision.retained} of {len(contrast['per_run'])} runs"
    rank = f"it ranks {decision.rank} and {limits['count']} are kept"
    if decision.by_proof and estimate.proven is not None:
        share, low, high = estimate.proven
        reason = f"by proof: {share:.3f} of the failures ({low:.3f} to {high:.3f}) do not pass without its repair"
        reason += "" if decision.selected else f", but {rank}"
    elif decision.selected:
        reason = f"{retained}, lower bound of the gap {estimate.low:.3f}"
    else:
        shortfalls = []
        if estimate.proven is not None and "proof" in limits:
            shortfalls.append(f"lower bound of proven failures {estimate.proven[1]:.3f} is below {limits['proof']:g}")
        if decision.retained < decision.required:
            shortfalls.append(f"{retained}, {decision.required} needed ({estimate.shortfalls})")
        if np.isnan(estimate.low):
            shortfalls.append(f"gap undefined in {estimate.undefined} of {resamples} resamples")
        elif not decision.bounded:
            shortfalls.append(f"lower bound of the gap {estimate.low:.3f} is not above {limits['floor']:g}")
        reason = "; ".join(shortfalls) or f"retained, but {rank}"
    account = CandidateAccount(
        id=candidate.id,
        name=candidate.name,
        description=candidate.description,
        gap=contrast["gap"],
        gap_low=contrast["gap_low"],
        gap_high=estimate.gap_high,
        resamples_undefined=estimate.undefined,
        coverage=contrast["coverage"],
        er_failed=estimate.er_failed,
        er_passed=estimate.er_passed,
        runs_retained=decision.retained,
        runs=len(contrast["per_run"]),
        per_run=contrast["per_run"],
        selected=decision.selected,
        reason=reason,
    )
    if estimate.proven is not None:
        account["proven"], account["proven_low"], account["proven_high"] = estimate.proven
        account["by_proof"] = decision.by_proof
    return account


def number_or_none(value: float) -> float | None:
    """Round a number to six decimals; return None for NaN."""
    return None if np.isnan(value) else round(float(value), 6)


def selection_table(report: SelectionAccount) -> Table:
    """Tabulate the account, with the reasons why candidates were not selected. The table is at most 80 columns wide."""
    counts, reasons = report["rollouts"], list[str]()
    title = f"Candidates on {counts['passed']} passed and {counts['failed']} failed rollouts"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, caption_justify="left")
    for name in ("capability", "gap", "interval", "mean", "coverage", "runs", "selected"):
        table.add_column(name, no_wrap=True)
    for row in report["candidates"]:
        numbers = (row["gap"], row["gap_low"], row["gap_high"], mean_gap(row), row["coverage"])
        gap, low, high, mean, coverage = ("-" if number is None else f"{number:.2f}" for number in numbers)
        by_proof, runs = row.get("by_proof", False), f"{row['runs_retained']}/{row['runs']}"
        verdict = "by proof" if by_proof else "yes"
        table.add_row(row["id"], gap, f"{low} to {high}", mean, coverage, runs, verdict if row["selected"] else "no")
        if by_proof or not row["selected"]:
            reasons.append(f"{row['id']}: {row['reason']}")
    if not any(row["selected"] for row in report["candidates"]):
        reasons.insert(0, "no capability was selected")
    table.caption = "\n".join(reasons) or None
    return table
