"""The selection rule, the one place where it is decided which candidates are selected.

Source: TRACE, capability selection: a candidate is retained in a labelling run when its gap and its coverage reach
their thresholds there, and selected when enough runs retain it. Two additions: a run that leaves the gap undefined has
no say; and the lower bound of the pooled gap must exceed a floor, which one that is undefined in most of its many
resamples does not have. So whether there is something to contrast is decided once, and not by chance of the few runs.

A weak agent passes only what asks for nothing hard, and then there is nothing to contrast. A proven need does not ask
for it: with a threshold `proof`, a candidate is selected as well if the share of the failures that, replayed, do not
pass without its repair has a lower bound that reaches it. Such candidates rank behind those that the contrast selects.

The rule works on the account of a selection (results/capabilities/selection.json) and on nothing else, that is on
numbers rounded as they are written there. So the selection itself, its replay under other thresholds, the table of
stability and the report's sliders (reporting/pages/static/report.js, held to `decide` by a test) cannot disagree.
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
    """Gap and coverage of a candidate in one labelling run, null where undefined. The coverage is undefined where the
    run did not propose the candidate or drew no failed rollout."""

    gap: float | None
    coverage: float | None


class Contrast(TypedDict):
    """Numbers of a candidate that the rule needs: pooled gap, its lower bound, pooled coverage, rates of each run; and,
    where proofs were asked for, the share of failures that need its repair, `proven`, with its interval."""

    id: str
    gap: float | None
    gap_low: float | None
    coverage: float | None
    per_run: list[RunRates]
    proven: NotRequired[float]
    proven_low: NotRequired[float]
    proven_high: NotRequired[float]


class CandidateAccount(Contrast):
    """A candidate in the account of a selection; `by_proof`, where proofs were asked for: the contrast alone would not
    select it."""

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
    """The settings that a selection was made by. `agreement`: of how many runs; `count`: selected at most; `ranking`:
    "product" where it is not named; `proof`: least share of failures that need the repair, where that selects."""

    delta: float
    coverage: float
    agreement: int
    confidence: float
    floor: float
    count: int
    ranking: NotRequired[Ranking]
    proof: NotRequired[float]


class SelectionAccount(TypedDict):
    """The account of a selection; candidates are in rank order, best first. `rollouts`: how many passed and failed."""

    thresholds: Limits
    rollouts: Mapping[str, int]
    candidates: list[CandidateAccount]


def read_selection(results: Path) -> SelectionAccount:
    """The account that the stage `capabilities` has left.

    Raises:
        UserError: it is missing, or not whole.
    """
    return read_json(results / "capabilities/selection.json", SelectionAccount, "run `dvc repro capabilities`")


@dataclass(frozen=True)
class Decision:
    """Verdict of the rule on one candidate: in how many runs it is retained and in how many it must be, whether the
    lower bound of its gap exceeds the floor, its rank among all candidates, from 1, whether it is selected, and whether
    that is by proof alone."""

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
        # The configured share of the runs that have a say. A run without a coverage speaks against the candidate; one
        # with a coverage and no gap has no say, as its resample has nothing to contrast, and where no run has one none
        # is enough.
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
    """The capabilities that would have been selected under other thresholds, in rank order: no labels, no bootstrap.

    Args:
        account: of a selection; its agreement, floor and count stay.
        delta: least gap.
        coverage: least coverage.
    """
    limits: Limits = {**account["thresholds"], "delta": delta, "coverage": coverage}
    return [decision.id for decision in decide(account["candidates"], limits) if decision.selected]


def undecided(account: SelectionAccount) -> list[str]:
    """The candidates that more rollouts may decide: their coverage reaches its threshold, and their gap is undefined,
    or enough runs retain them and the lower bound of the gap alone speaks against them."""
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
    """Tell if a run retains a candidate: its gap and its coverage are defined and reach their thresholds."""
    gap, coverage = run["gap"], run["coverage"]
    return gap is not None and coverage is not None and gap >= limits["delta"] and coverage >= limits["coverage"]


def mean_gap(candidate: Contrast) -> float | None:
    """The mean of the gaps of the runs that define one; None where none does. Gaps have six digits, so that sums of
    their millionths are exact, and the report's script finds the same mean."""
    gaps = [round(run["gap"] * 1e6) for run in candidate["per_run"] if run["gap"] is not None]
    return sum(gaps) / (1e6 * len(gaps)) if gaps else None


def stability_table(account: SelectionAccount) -> "pd.DataFrame":
    """Tabulate what each labelling run alone retains, the paper's figure of stability over runs: run (from 0),
    capability, gap, coverage (empty where undefined), and `kept`, whether the run retains it, by run and id.

    Args:
        account: of the selection; interval and agreement are of all runs together, and have no say here.
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
