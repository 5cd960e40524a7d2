"""Which candidates are selected: contrast between failed and passed rollouts, from cached labels alone.

Source: TRACE, capability selection. Per run, ER-(c) = LACKING / (LACKING + PRESENT) among failed rollouts, ER+(c) the
same among passed ones, gap = ER- - ER+, coverage = LACKING among failed / all failed; a candidate is retained when
gap and coverage reach their thresholds in enough runs. We add: a rate without a denominator is undefined, never 0, and
a run whose gap is undefined neither retains nor rejects (unless half of the runs are such); and the lower bound of a
bootstrap interval of the gap over rollouts must exceed a floor, because a gap of few rollouts may be luck. Pure
arithmetic on labels: thresholds replay in seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from captrain.config import spec
from captrain.errors import UserError
from captrain.records import Capability, RolloutLabels

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Selection:
    """What was selected (in rank order, best first) and the account of it, JSON through and through."""

    report: dict[str, Any]
    capabilities: list[Capability]


@dataclass(frozen=True)
class Rates:
    """Error rates, gap and coverage of one candidate under several weightings of the rollouts (weightings,), NaN
    where undefined."""

    er_failed: Floats
    er_passed: Floats
    coverage: Floats

    @property
    def gap(self) -> Floats:
        """ER- minus ER+, NaN where either is undefined."""
        return self.er_failed - self.er_passed


@dataclass(frozen=True)
class Verdicts:
    """Labels as arrays: `lacking` and `present` (candidates, runs, rollouts) are 1.0 where a label says so, `counts`
    (runs, rollouts) how often the resample drew the rollout, `proposed` (candidates, runs), `failed` (rollouts,)."""

    lacking: Floats
    present: Floats
    counts: Floats
    proposed: NDArray[np.bool_]
    failed: Floats


@dataclass(frozen=True)
class Estimate:
    """One candidate: rates per run and pooled over all rollouts, interval of the gap, and what it falls short in."""

    runs: Rates
    pooled: Rates
    low: float
    high: float
    undefined: int
    retained: int
    shortfalls: list[str]

    @property
    def score(self) -> float:
        """What candidates are ranked by: coverage x gap, the share of failures that the contrast explains."""
        score = float(self.pooled.coverage[0] * self.pooled.gap[0])
        return -np.inf if np.isnan(score) else score


def select(
    labels: Sequence[RolloutLabels], candidates: Sequence[Capability], selection: spec.Selection, count: int, seed: int
) -> Selection:
    """Select at most `count` of the candidates.

    A candidate is retained when gap >= delta and coverage >= coverage in at least `agreement` runs (in the same share
    of the runs whose gap is defined, as long as that is more than half of them), and the lower
    bound of the pooled gap exceeds `floor`. Retained candidates are ranked by pooled coverage x gap, ties by id; the
    report lists them first, then the others in the same order.

    Raises:
        UserError: there are no labels.
    """
    if not labels:
        raise UserError("there are no labels", "run `dvc repro labels` to make them again")
    verdicts = _arrays(labels, candidates)
    # The same resamples serve every candidate, so that a candidate's interval does not depend on what stands beside it.
    rollouts = len(verdicts.failed)
    weights = np.random.default_rng(seed).multinomial(rollouts, [1 / rollouts] * rollouts, size=selection.resamples)
    estimates = {
        candidate.id: _estimate(verdicts, row, weights.astype(float), selection)
        for row, candidate in enumerate(candidates)
    }
    order = {slug: (bool(one.shortfalls), -one.score, slug) for slug, one in estimates.items()}
    ranked = sorted(candidates, key=lambda candidate: order[candidate.id])
    retained = [candidate for candidate in ranked if not estimates[candidate.id].shortfalls]
    failed = int(verdicts.failed.sum())
    report = {
        "thresholds": {**selection.model_dump(exclude={"resamples"}), "count": count},
        "rollouts": {"passed": rollouts - failed, "failed": failed},
        "candidates": [
            _account(candidate, estimates[candidate.id], selection, rank, count)
            for rank, candidate in enumerate(ranked, start=1)
        ],
    }
    return Selection(report, retained[:count])


def _arrays(labels: Sequence[RolloutLabels], candidates: Sequence[Capability]) -> Verdicts:
    rollouts = {name: at for at, name in enumerate(dict.fromkeys(row.rollout for row in labels))}
    runs = {run: at for at, run in enumerate(sorted({row.run for row in labels}))}
    slugs = {candidate.id: at for at, candidate in enumerate(candidates)}
    shape = len(slugs), len(runs), len(rollouts)
    lacking, present, counts = np.zeros(shape), np.zeros(shape), np.zeros(shape[1:])
    proposed, failed = np.zeros(shape[:2], bool), np.zeros(shape[2])
    for row in labels:
        run, rollout = runs[row.run], rollouts[row.rollout]
        counts[run, rollout] = row.count
        failed[rollout] = row.outcome == "failed"
        for slug, label in row.labels.items():
            lacking[slugs[slug], run, rollout] = label.verdict == "LACKING"
            present[slugs[slug], run, rollout] = label.verdict == "PRESENT"
            proposed[slugs[slug], run] = True
    return Verdicts(lacking, present, counts, proposed, failed)


def _rates(lacking: Floats, present: Floats, failed: Floats, weights: Floats) -> Rates:
    """Rates under weights (weightings, rollouts); labels are (rollouts,), or one row for each weighting."""

    def total(values: Floats) -> Floats:
        return (weights * values).sum(axis=1) if values.ndim == 2 else weights @ values

    lacks, shows = total(lacking * failed), total(present * failed)
    passed_lacks, passed_shows = total(lacking * (1 - failed)), total(present * (1 - failed))
    return Rates(
        er_failed=_share(lacks, lacks + shows),
        er_passed=_share(passed_lacks, passed_lacks + passed_shows),
        coverage=_share(lacks, total(failed)),
    )


def _share(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)


def _estimate(verdicts: Verdicts, row: int, weights: Floats, selection: spec.Selection) -> Estimate:
    lacking, present, proposed = verdicts.lacking[row], verdicts.present[row], verdicts.proposed[row]
    runs = _rates(lacking, present, verdicts.failed, verdicts.counts * proposed[:, None])
    # Where runs disagree on a rollout it counts in parts, one rollout in all.
    share = proposed / max(1, proposed.sum())
    lacking, present = share @ lacking, share @ present
    pooled = _rates(lacking, present, verdicts.failed, np.ones((1, len(verdicts.failed))))
    gaps = _rates(lacking, present, verdicts.failed, weights).gap
    defined = gaps[~np.isnan(gaps)]
    low = high = np.nan
    if 2 * len(defined) >= len(gaps):
        low, high = np.percentile(defined, [50 * (1 - selection.confidence), 50 * (1 + selection.confidence)])
    # Rounded before comparison, so that 0.5 - 0.3 reaches a threshold of 0.2.
    wide, broad = runs.gap.round(9) >= selection.delta, runs.coverage.round(9) >= selection.coverage
    retained = int((wide & broad).sum())
    shortfalls = []
    speaking = int((~np.isnan(runs.gap) | ~proposed).sum())
    # A run whose resample left the gap undefined has no say; when half of the runs have none, all are asked for.
    needed = selection.agreement
    if 2 * speaking > len(wide):
        needed = math.ceil(selection.agreement * speaking / len(wide))
    if retained < needed:
        why = _why_not(runs, proposed, wide, broad, selection)
        shortfalls.append(f"retained in {retained} of {len(wide)} runs, {needed} needed ({why})")
    if np.isnan(low):
        shortfalls.append(f"gap undefined in {len(gaps) - len(defined)} of {len(gaps)} resamples")
    elif low <= selection.floor:
        shortfalls.append(f"lower bound of the gap {low:.3f} is not above {selection.floor:g}")
    return Estimate(runs, pooled, float(low), float(high), len(gaps) - len(defined), retained, shortfalls)


def _why_not(
    runs: Rates, proposed: NDArray[np.bool_], wide: NDArray[np.bool_], broad: NDArray[np.bool_], limits: spec.Selection
) -> str:
    """In how many runs each condition failed; conditions overlap."""
    cases = {
        "not proposed": ~proposed,
        "undefined: no failed rollout exercised it": proposed & np.isnan(runs.er_failed),
        "undefined: no passed rollout exercised it": proposed & np.isnan(runs.er_passed),
        f"gap below {limits.delta:g}": ~np.isnan(runs.gap) & ~wide,
        f"coverage below {limits.coverage:g}": ~np.isnan(runs.coverage) & ~broad,
    }
    return ", ".join(f"{case} in {int(where.sum())}" for case, where in cases.items() if where.any())


def _account(candidate: Capability, one: Estimate, selection: spec.Selection, rank: int, count: int) -> dict[str, Any]:
    selected = not one.shortfalls and rank <= count
    if selected:
        reason = f"retained in {one.retained} of {len(one.runs.gap)} runs, lower bound of the gap {one.low:.3f}"
    else:
        reason = "; ".join(one.shortfalls) or f"retained, but it ranks {rank} and {count} are kept"
    return {
        "id": candidate.id,
        "name": candidate.name,
        "description": candidate.description,
        "gap": _number(one.pooled.gap[0]),
        "gap_low": _number(one.low),
        "gap_high": _number(one.high),
        "resamples_undefined": one.undefined,
        "coverage": _number(one.pooled.coverage[0]),
        "er_failed": _number(one.pooled.er_failed[0]),
        "er_passed": _number(one.pooled.er_passed[0]),
        "runs_retained": one.retained,
        "runs": len(one.runs.gap),
        "per_run": [
            {"gap": _number(gap), "coverage": _number(coverage)}
            for gap, coverage in zip(one.runs.gap, one.runs.coverage, strict=True)
        ],
        "selected": selected,
        "reason": reason,
    }


def _number(value: float) -> float | None:
    return None if np.isnan(value) else round(float(value), 6)


def table(report: dict[str, Any]) -> Table:
    """The account as a table, undefined numbers as a dash."""
    counts = report["rollouts"]
    rows = Table(title=f"Candidates on {counts['passed']} passed and {counts['failed']} failed rollouts")
    for name in ("capability", "gap", "interval", "coverage", "runs", "verdict"):
        rows.add_column(name)
    for row in report["candidates"]:
        gap, low, high, coverage = (_shown(row[name]) for name in ("gap", "gap_low", "gap_high", "coverage"))
        verdict = "selected" if row["selected"] else row["reason"]
        rows.add_row(row["id"], gap, f"{low} to {high}", coverage, f"{row['runs_retained']}/{row['runs']}", verdict)
    if not any(row["selected"] for row in report["candidates"]):
        rows.caption = "no capability was selected"
    return rows


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
