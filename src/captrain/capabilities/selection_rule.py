"""The selection rule: which candidates are selected.

Source: TRACE, capability selection. A labelling run retains a candidate if its gap and coverage reach their thresholds
there; a candidate is selected if enough runs retain it. There are two additions. A run with an undefined gap has no
vote. And the lower bound of the pooled gap must exceed a floor; a gap that is undefined in most resamples has no bound.
So the many resamples decide whether there is a contrast, and not a few runs by chance.

A weak agent passes only easy tasks, so its failed and passed rollouts cannot be compared. Proofs work without a
comparison. With a threshold `proof`, a candidate is also selected if its share of the failures that need its repair (by
replay) has a lower bound that reaches `proof`. Such candidates rank behind those that the contrast selects.

The rule uses only the account of a selection (results/capabilities/selection.json), with its rounded numbers. So the
selection, its replay under other thresholds, the stability table and the report's sliders
(reporting/pages/static/report.js, compared with `decide` by a test) cannot disagree.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired

from typing_extensions import TypedDict  # pydantic reads no other on Python 3.11

from captrain.records import read_json
from captrain.run import Ranking

if TYPE_CHECKING:
    import pandas as pd


class RunRates(TypedDict):
    """Gap and coverage of a candidate in one labelling run, null where undefined.

    The coverage is undefined if the run did not propose the candidate or drew no failed rollout.
    """

    gap: float | None
    coverage: float | None


class Contrast(TypedDict):
    """The numbers of a candidate that the rule needs: pooled gap, its lower bound, pooled coverage, rates of each run.

    With proofs also `proven`, the share of failures that need its repair, and its interval.
    """

    id: str
    gap: float | None
    gap_low: float | None
    coverage: float | None
    per_run: list[RunRates]
    proven: NotRequired[float]
    proven_low: NotRequired[float]
    proven_high: NotRequired[float]


class CandidateAccount(Contrast):
    """A candidate in the account of a selection.

    With proofs, `by_proof` says that the contrast alone would not select it.
    """

    name: str
    description: str
    gap_high: float | None
    resamples_undefined: int
    er_failed: float | None
    er_passed: float | None
    runs_retained: int
    runs: int
    selected: bool
    reason: str
    by_proof: NotRequired[bool]


class Limits(TypedDict):
    """The settings of a selection.

    `agreement`: runs that must retain a candidate. `count`: selected at most. `ranking`: "product" if missing. `proof`:
    least share of failures that need the repair, if that selects.
    """

    delta: float
    coverage: float
    agreement: int
    confidence: float
    floor: float
    count: int
    ranking: NotRequired[Ranking]
    proof: NotRequired[float]


class SelectionAccount(TypedDict):
    """The account of a selection: candidates in rank order, best first, and how many rollouts passed and failed."""

    thresholds: Limits
    rollouts: Mapping[str, int]
    candidates: list[CandidateAccount]


def read_selection(results: Path) -> SelectionAccount:
    """Read the account that the stage `capabilities` wrote.

    Raises:
        UserError: it is missing or damaged.
    """
    return read_json(results / "capabilities/selection.json", SelectionAccount, "run `dvc repro capabilities`")


@dataclass(frozen=True)
class Decision:
    """The rule's decision on one candidate.

    retained: number of runs that retain it. required: number of runs that must. bounded: whether the lower bound of its
    gap exceeds the floor. rank: from 1. by_proof: whether it is selected by proof alone.
    """

    id: str
    retained: int
    required: int
    bounded: bool
    rank: int
    selected: bool
    by_proof: bool


def decide(candidates: Sequence[Contrast], limits: Limits) -> list[Decision]:
    """Decide on all candidates.

    Returns:
        Decisions in rank order: candidates that meet the rule first, then by what `ranking` names (the product, pooled
        coverage x gap, is the share of failures that the contrast explains; the paper ranks by the mean of the runs'
        gaps), ties by id; then those that are proven alone, by their shares. Of all these the first `count` are
        selected.
    """
    drafts: list[tuple[tuple[bool, bool, float, str], Decision]] = []
    for candidate in candidates:
        gap, coverage, runs = candidate["gap"], candidate["coverage"], candidate["per_run"]
        retained = sum(is_retained(run, limits) for run in runs)
        # The required number is the configured share of the runs that have a vote. A run without a coverage votes
        # against the candidate. A run with a coverage and without a gap has no vote. If no run has a vote, the
        # candidate cannot reach the required number.
        voting = sum(run["gap"] is not None or run["coverage"] is None for run in runs)
        required = math.ceil(limits["agreement"] * voting / len(runs)) or limits["agreement"]
        bounded = candidate["gap_low"] is not None and candidate["gap_low"] > limits["floor"]
        is_met = retained >= required and bounded
        is_proven = not is_met and "proof" in limits and candidate.get("proven_low", -1.0) >= limits["proof"]
        product = None if gap is None or coverage is None else coverage * gap
        scores = {"product": product, "gap": gap, "mean_gap": mean_gap(candidate), "coverage": coverage}
        score = candidate.get("proven", 0.0) if is_proven else scores[limits.get("ranking", "product")]
        order = (not is_met, not is_proven, math.inf if score is None else -score, candidate["id"])
        drafts.append(
            (order, Decision(candidate["id"], retained, required, bounded, 0, is_met or is_proven, is_proven))
        )
    return [
        replace(decision, rank=rank, selected=decision.selected and rank <= limits["count"])
        for rank, (_, decision) in enumerate(sorted(drafts, key=lambda draft: draft[0]), start=1)
    ]


def replay(account: SelectionAccount, delta: float, coverage: float) -> list[str]:
    """Return the capabilities that other thresholds would select, in rank order. This needs no new labels or resamples.

    Args:
        account: account of a selection, whose agreement, floor and count are kept.
        delta: least gap.
        coverage: least coverage.
    """
    limits: Limits = {**account["thresholds"], "delta": delta, "coverage": coverage}
    return [decision.id for decision in decide(account["candidates"], limits) if decision.selected]


def undecided(account: SelectionAccount) -> list[str]:
    """Return the candidates that more rollouts may decide.

    Their coverage is high enough, and either their gap is undefined, or only its lower bound is too low.
    """
    limits = account["thresholds"]
    decisions = {decision.id: decision for decision in decide(account["candidates"], limits)}
    names = []
    for candidate in account["candidates"]:
        decision = decisions[candidate["id"]]
        is_unsure = decision.retained >= decision.required and not decision.bounded
        is_covered = (candidate["coverage"] or 0.0) >= limits["coverage"]
        if is_covered and not candidate["selected"] and (candidate["gap"] is None or is_unsure):
            names.append(candidate["id"])
    return names


def is_retained(run: RunRates, limits: Limits) -> bool:
    """Return whether a run retains a candidate: its gap and coverage are defined and reach their thresholds."""
    gap, coverage = run["gap"], run["coverage"]
    return gap is not None and coverage is not None and gap >= limits["delta"] and coverage >= limits["coverage"]


def mean_gap(candidate: Contrast) -> float | None:
    """Return the mean of the defined gaps over runs; None if no gap is defined.

    Gaps have six decimals and are summed as whole millionths, so the report's script computes the same mean.
    """
    gaps = [round(run["gap"] * 1e6) for run in candidate["per_run"] if run["gap"] is not None]
    return sum(gaps) / (1e6 * len(gaps)) if gaps else None


def stability_table(account: SelectionAccount) -> "pd.DataFrame":
    """Tabulate which candidates each labelling run retains by itself, as in the paper's figure of stability over runs.

    Args:
        account: account of the selection. Interval and agreement concern all runs together and are not used.

    Returns:
        A row for each run and candidate, in the order of runs and ids: run (from 0), capability, gap, coverage (empty
        if undefined), and `kept`, whether the run retains it.
    """
    import pandas as pd

    candidates = sorted(account["candidates"], key=lambda candidate: candidate["id"])
    rows = [
        (number, candidate["id"], run["gap"], run["coverage"], is_retained(run, account["thresholds"]))
        for number in range(max((candidate["runs"] for candidate in candidates), default=0))
        for candidate in candidates
        for run in [candidate["per_run"][number]]
    ]
    table = pd.DataFrame(rows, columns=["run", "capability", "gap", "coverage", "kept"])
    return table.astype({"gap": float, "coverage": float})
