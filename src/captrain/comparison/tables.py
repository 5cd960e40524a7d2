"""Tables of the evaluation: pass rates, intervals, paired differences, router bounds, costs.

All arms play the same tasks and trials, so all routers and bounds are computed from the same outcomes without further
rollouts. The outcome `error` is counted, but it is not a failure and is left out of every rate. Methods are compared
only if they spent equal totals of rollouts. `captrain.comparison.rows` defines the rows, and `captrain.statistics` the
statistics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from captrain.comparison.baselines.registry import baselines
from captrain.comparison.rows import (
    ADAPTERS,
    BASE,
    BEST_SINGLE,
    BOUNDS,
    IDLE,
    ORACLE,
    RANDOM,
    TRACE,
    Method,
    charged,
    compared_pairs,
    headline_methods,
    label,
    methods,
    partial_stages,
    spending,
    supervision,
)
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.records import Purpose, publish_json, publish_text, read_json, read_table
from captrain.statistics import (
    Bootstrap,
    MethodOutcomes,
    best_single,
    cohens_h,
    followed,
    holm,
    mean,
    oracle,
    random_choice,
    sign_test,
    summarise,
)

OUTCOMES = {"passed": 1.0, "failed": 0.0, "error": np.nan}
EVALUATION_REMEDY = "run `dvc repro comparison` to make it"
WORDS = {"method", "label", "kind", "first", "second", "purpose", "stages", "distinguishable"}
"""Columns that hold words. All other columns hold numbers."""
SUMS = ("rollouts", "discarded", "errors", "prompt_tokens", "completion_tokens")


class Metrics(BaseModel):
    """Content of metrics.json, for `dvc metrics show`. Undefined numbers are left out.

    Pass rates and intervals are by method, differences by "first-second". The errors are those of headline methods.
    """

    pass_rate: dict[str, float | None] = {}
    interval: dict[str, dict[str, float]] = {}
    difference: dict[str, dict[str, float]] = {}
    rollouts: dict[str, int] = {}
    errors: int = 0
    confidence: Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True)
class EvaluationTables:
    """Tables of one evaluation.

    Args:
        main: one row per method: method, label, learns_from, pass_rate, low, high, pass_hat_k, mean_reward (empty for
            bounds), tasks (with at least one scored trial), excluded (the other tasks), trials (scored), errors,
            rollouts_spent. The first row is an agent that does nothing. If all splits were played, also overlapping:
            the number of tasks for discovery or training.
        differences: one row per pair: first, second, difference, low, high, better, worse (tasks), p, distinguishable,
            effect, p_holm (p corrected for all tests of the table).
        kinds: one row per task kind and method: kind, method, label, pass_rate, low, high, pass_hat_k, mean_reward,
            tasks. Tasks without a kind are left out.
        ledger: rollouts and tokens by method, stage and purpose.
        costs: one row per method: method, label, rollouts, discarded, errors, prompt_tokens, completion_tokens, and
            the stages it is charged for, joined by spaces. Shared costs are charged to each method.
        metrics: for metrics.json.
        curve: one row per method and point of its training, see `captrain.comparison.evaluation`; None without points
            before the end.
        training: one row per update of each adapter trained by GRPO: adapter, rollouts so far, mean reward, success
            rate, share of informative groups, stage.
    """

    main: pd.DataFrame
    differences: pd.DataFrame
    kinds: pd.DataFrame
    ledger: pd.DataFrame
    costs: pd.DataFrame
    metrics: Metrics
    curve: pd.DataFrame | None = None
    training: pd.DataFrame | None = None


def evaluate(
    outcomes: pd.DataFrame,
    routes: pd.DataFrame,
    ledger: Sequence[LedgerEntry],
    *,
    ranked: Sequence[str],
    controls: Mapping[str, Sequence[str]],
    resamples: int,
    confidence: float,
    seed: int,
    alternatives: bool = True,
) -> EvaluationTables:
    """Compare all methods on one set of outcomes.

    Args:
        outcomes: task, kind, arm, stage, trial, outcome (passed | failed | error), reward. Arms are "idle", "base" and
            those of the stages. All play the same trials and, except compositions and controls, the same tasks.
        routes: task, kind, and one column of arms per router or control; `chosen` is the configured router.
        ledger: every rollout spent; entries of purpose "evaluation" are reported, not compared.
        ranked: capabilities with an environment, best first.
        controls: control -> its capabilities.
        resamples: bootstrap resamples of the tasks.
        confidence: confidence of the percentile intervals, in (0, 1).
        seed: seed of the bootstrap.
        alternatives: adapters of one capability played every task, so there are bounds of routers.

    Raises:
        UserError: the outcomes are not one per task, arm and trial; a route is missing or leads to an arm that was not
            played; a method and TRACE spent unequal totals.
    """
    stages = {str(arm): str(stage) for arm, stage in outcomes.groupby("arm", sort=False)["stage"].first().items()}
    partial = partial_stages(alternatives)
    passes = _by_arm(outcomes, stages, "passed", partial)
    routes = _checked_routes(routes, outcomes, passes)
    rows = methods(stages, [str(column) for column in routes.columns], ranked, alternatives)
    names = [row.name for row in rows]
    totals = spending(names, ledger, ranked, controls)
    passes_by_method = _method_outcomes(rows, passes, routes)
    rewards = _method_outcomes(rows, _by_arm(outcomes, stages, "reward", partial), routes)
    summaries = {name: summarise(array) for name, array in passes_by_method.items()}
    if alternatives:
        # Bounds of routers among the base, which comes first, and TRACE's adapters.
        arms = [BASE, *sorted(arm for arm, stage in stages.items() if stage == ADAPTERS)]
        choices = {arm: passes[arm].to_numpy(float) for arm in arms}
        if choices[BASE].shape[1] > 1:  # the oracle chooses on one trial and scores on another
            summaries[ORACLE] = oracle([*choices.values()])
        summaries[RANDOM] = random_choice([*choices.values()])
        del choices[BASE]
        summaries[BEST_SINGLE] = best_single(choices, [str(task) for task in routes.index])
    graded = {name: pd.DataFrame(array).mean(axis=1).to_numpy() for name, array in rewards.items()}
    kinds = outcomes.groupby("task", sort=False)["kind"].first().loc[passes[BASE].index].to_numpy()
    intervals = Bootstrap(len(kinds), resamples, confidence, seed)
    main = _main_table(summaries, graded, intervals, {**totals, **dict.fromkeys(BOUNDS, totals[TRACE])})
    differences = _difference_table(summaries, intervals)
    return EvaluationTables(
        main=main,
        differences=differences,
        kinds=_kind_table(summaries, graded, intervals, kinds),
        ledger=_ledger_table(ledger),
        costs=_cost_table(names, ledger, ranked, controls),
        metrics=_metrics(main, differences, totals, ledger, confidence),
    )


def mark_overlap(evaluation: EvaluationTables, overlapping: int, tasks: int) -> EvaluationTables:
    """Mark in every row that not all tasks are held out, in the label and in the column `overlapping`.

    Args:
        evaluation: an evaluation over the tasks of all splits.
        overlapping: number of tasks for discovery or training.
        tasks: number of all tasks.
    """
    note = f" ({overlapping} of {tasks} tasks not held out)"
    main = evaluation.main.assign(label=evaluation.main["label"] + note, overlapping=overlapping)
    kinds = evaluation.kinds.assign(label=evaluation.kinds["label"] + note)
    return replace(
        evaluation, main=main, kinds=kinds, differences=evaluation.differences.assign(overlapping=overlapping)
    )


def _by_arm(
    outcomes: pd.DataFrame, stages: Mapping[str, str], column: str, partial: Sequence[str]
) -> dict[str, pd.DataFrame]:
    """Pivot outcomes to one frame (tasks, trials) per arm, of the reward or of `passed` (1.0 or 0.0).

    Errors are NaN, and so are the tasks that an arm of a `partial` stage did not play.
    """
    unknown = sorted(set(outcomes["outcome"]) - set(OUTCOMES))
    if unknown:
        raise UserError(f"outcomes hold {', '.join(map(str, unknown))}", "an outcome is passed, failed or error")
    if outcomes.duplicated(["task", "arm", "trial"]).any():
        row = outcomes[outcomes.duplicated(["task", "arm", "trial"])].iloc[0]
        raise UserError(
            f"task {row['task']}, arm {row['arm']}, trial {row['trial']} was evaluated twice",
            "give one outcome per task, arm and trial: run `dvc repro -f evaluation comparison`",
        )
    if missing := [arm for arm in (IDLE, BASE) if arm not in stages]:
        raise UserError(f"arm {', '.join(missing)} was not evaluated", "run `dvc repro -f evaluation comparison`")
    scored = outcomes.assign(passed=[OUTCOMES[outcome] for outcome in outcomes["outcome"]])
    tasks, trials = sorted(outcomes["task"].unique()), sorted(outcomes["trial"].unique())
    frames: dict[str, pd.DataFrame] = {}
    rows_of = dict(iter(scored.groupby("arm", sort=False)))
    for arm, stage in stages.items():
        rows = rows_of[arm].set_index(["task", "trial"])
        expected = rows.index.get_level_values("task").nunique() if stage in partial and arm != stage else len(tasks)
        if len(rows) != expected * len(trials):
            raise UserError(
                f"arm {arm} has {len(rows)} outcomes where {expected} tasks x {len(trials)} trials were played",
                "play every arm on the same tasks and trials: run `dvc repro -f evaluation comparison`",
            )
        frames[arm] = rows[column].astype(float).unstack("trial").loc[:, trials].reindex(tasks)
    return frames


def _checked_routes(routes: pd.DataFrame, outcomes: pd.DataFrame, passes: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Index routes by task in the order of the outcomes, without the column kind."""
    tasks = passes[BASE].index
    absent = set(tasks) - set(routes["task"])
    if absent or routes["task"].duplicated().any():
        problem = f"{len(absent)} evaluated tasks have no route" if absent else "a task is routed twice"
        raise UserError(f"routes and outcomes do not match: {problem}", "run `dvc repro comparison`")
    arm_of_task = routes.set_index("task").loc[tasks].drop(columns="kind", errors="ignore")
    pairs = set(zip(outcomes["task"], outcomes["arm"], strict=True))
    for router in arm_of_task.columns:
        if unknown := sorted({arm for task, arm in arm_of_task[router].items() if (task, arm) not in pairs}):
            raise UserError(
                f"router {router} leads to {', '.join(unknown)}, which was not evaluated",
                "run `dvc repro comparison`",
            )
    return arm_of_task


def _method_outcomes(
    rows: Sequence[Method], frames: Mapping[str, pd.DataFrame], routes: pd.DataFrame
) -> dict[str, NDArray[np.float64]]:
    """Collect each method's outcomes (tasks, trials) from those of its arms."""
    arms = {arm: frame.to_numpy(dtype=float) for arm, frame in frames.items()}
    return {row.name: arms[row.arm] if row.arm else followed(arms, routes[row.route].tolist()) for row in rows}


def _main_table(
    outcomes: dict[str, MethodOutcomes],
    rewards: dict[str, NDArray[np.float64]],
    intervals: Bootstrap,
    totals: Mapping[str, int],
) -> pd.DataFrame:
    """See `EvaluationTables.main`."""
    rows = []
    whole = np.full(intervals.tasks, True)
    for (method, outcome), numbers in zip(outcomes.items(), _numbers(outcomes, rewards, intervals, whole), strict=True):
        words = {"method": method, "label": label(method), "learns_from": supervision(method) or ""}
        counts = {"excluded": intervals.tasks - int(numbers["tasks"]), "trials": outcome.trials}
        rows.append({**words, **numbers, **counts, "errors": outcome.errors, "rollouts_spent": totals[method]})
    return pd.DataFrame(rows)


def _kind_table(
    outcomes: dict[str, MethodOutcomes],
    rewards: dict[str, NDArray[np.float64]],
    intervals: Bootstrap,
    kinds: NDArray[np.object_],
) -> pd.DataFrame:
    """See `EvaluationTables.kinds`."""
    rows = []
    for kind in sorted({*kinds} - {""}):
        for method, numbers in zip(outcomes, _numbers(outcomes, rewards, intervals, kinds == kind), strict=True):
            rows.append({"kind": kind, "method": method, "label": label(method), **numbers})
    columns = ("kind", "method", "label", "pass_rate", "low", "high", "pass_hat_k", "mean_reward", "tasks")
    return pd.DataFrame(rows, columns=columns)


def _numbers(
    outcomes: dict[str, MethodOutcomes],
    rewards: dict[str, NDArray[np.float64]],
    intervals: Bootstrap,
    part: NDArray[np.bool_],
) -> list[dict[str, float]]:
    """Compute the rates of each method, with intervals, over the tasks in the mask `part`."""
    rates = {method: np.where(part, outcome.rates, np.nan) for method, outcome in outcomes.items()}
    bounds = intervals.intervals([*rates.values()])
    return [
        {
            "pass_rate": mean(rates[method]),
            "low": low,
            "high": high,
            "pass_hat_k": mean(outcome.pass_k[part]),
            "mean_reward": mean(rewards[method][part]) if method in rewards else np.nan,
            "tasks": int((~np.isnan(rates[method])).sum()),
        }
        for (method, outcome), (low, high) in zip(outcomes.items(), bounds, strict=True)
    ]


def _difference_table(outcomes: dict[str, MethodOutcomes], intervals: Bootstrap) -> pd.DataFrame:
    """See `EvaluationTables.differences`.

    Difference, interval and `effect` (Cohen's h) are over the tasks that both methods played. `distinguishable`: the
    interval excludes zero. `p` is the exact two-sided sign test over tasks without ties. Trials of one task are not
    independent, so a test over trials would overstate the evidence. `p` is empty for bounds, which are not outcomes of
    one policy.
    """
    rows, pairs = [], compared_pairs(list(outcomes))
    gaps = [outcomes[first].rates - outcomes[second].rates for first, second in pairs]
    for (first, second), difference, (low, high) in zip(pairs, gaps, intervals.intervals(gaps), strict=True):
        first_outcomes, second_outcomes = outcomes[first], outcomes[second]
        defined = ~np.isnan(difference)
        better, worse = int((difference > 0).sum()), int((difference < 0).sum())
        testable = first_outcomes.one_policy and second_outcomes.one_policy
        rows.append(
            {
                "first": first,
                "second": second,
                "difference": mean(difference),
                "low": low,
                "high": high,
                "better": better,
                "worse": worse,
                "p": sign_test(better, worse) if testable else np.nan,
                "distinguishable": bool(low > 0 or high < 0),
                "effect": cohens_h(mean(first_outcomes.rates[defined]), mean(second_outcomes.rates[defined])),
            }
        )
    return pd.DataFrame(rows).assign(p_holm=holm([row["p"] for row in rows]))


def _ledger_table(ledger: Sequence[LedgerEntry]) -> pd.DataFrame:
    """Sum the ledger by method, stage and purpose, in the order of purposes."""
    order = get_args(Purpose)
    keys = ("method", "stage", "purpose")
    totals: dict[tuple[str, ...], list[int]] = {}
    for entry in ledger:
        key = (entry.method, entry.stage, entry.purpose)
        before = totals.setdefault(key, [0] * len(SUMS))
        totals[key] = [total + getattr(entry, name) for total, name in zip(before, SUMS, strict=True)]
    rows = sorted(totals.items(), key=lambda item: (item[0][0], order.index(item[0][2]), item[0][1]))
    return pd.DataFrame([[*key, *total] for key, total in rows], columns=[*keys, *SUMS])


def _cost_table(
    names: Sequence[str], ledger: Sequence[LedgerEntry], ranked: Sequence[str], controls: Mapping[str, Sequence[str]]
) -> pd.DataFrame:
    """See `EvaluationTables.costs`."""
    rows = []
    for name in names:
        spent_on = (entry for entry in ledger if entry.purpose != "evaluation")
        entries = [entry for entry in spent_on if charged(entry, name, ranked, controls)]
        sums = {column: sum(getattr(entry, column) for entry in entries) for column in SUMS}
        # A row that trains on demonstrations has no ledger entry, but takes time.
        stages = " ".join(dict.fromkeys([*(entry.stage for entry in entries), *({name} & {*baselines()})]))
        rows.append({"method": name, "label": label(name), **sums, "stages": stages})
    return pd.DataFrame(rows)


def _metrics(
    main: pd.DataFrame,
    differences: pd.DataFrame,
    totals: Mapping[str, int],
    ledger: Sequence[LedgerEntry],
    confidence: float,
) -> Metrics:
    """See `Metrics`."""
    rates = main.dropna(subset=["pass_rate"]).to_dict("records")
    compared = differences.dropna(subset=["difference"]).to_dict("records")
    rollouts = {name: total for name, total in totals.items() if name in (TRACE, *baselines())}
    headline = main["method"].isin(headline_methods())
    return Metrics(
        pass_rate={row["method"]: round(row["pass_rate"], 6) for row in rates},
        interval={row["method"]: _rounded(row, "low", "high") for row in rates if row["method"] in headline_methods()},
        difference={f"{row['first']}-{row['second']}": _rounded(row, "difference", "low", "high") for row in compared},
        rollouts=rollouts | {"evaluation": sum(entry.rollouts for entry in ledger if entry.purpose == "evaluation")},
        errors=int(main.loc[headline, "errors"].sum()),
        confidence=confidence,
    )


def _rounded(row: Mapping[Any, float], *names: str) -> dict[str, float]:
    return {name: round(row[name], 6) for name in names}


def interpret_difference(row: Mapping[str, Any], level: float = 0.05) -> str:
    """Return in words whether a row of `EvaluationTables.differences` is distinguishable from zero.

    Both the interval and the corrected test must agree. Without a test, the interval decides.

    Args:
        row: has `distinguishable`, and `p_holm` if there was a test. None and NaN mean no test.
        level: significance level of the test, 1 - confidence of the intervals.
    """
    corrected = row.get("p_holm")
    if not row["distinguishable"]:
        return "not distinguishable"
    if corrected is not None and corrected >= level:  # False for NaN
        return "not distinguishable after correction"
    return "distinguishable"


def publish_evaluation(evaluation: EvaluationTables, folder: Path) -> None:
    """Write the tables as CSV (the costs as spent.csv, the curve if there is one) and metrics.json."""
    for name in ("main", "differences", "kinds", "ledger", "costs", "curve", "training"):
        frame: pd.DataFrame | None = getattr(evaluation, name)
        if frame is not None:
            path = folder / f"{'spent' if name == 'costs' else name}.csv"
            publish_text(path, frame.to_csv(index=False, float_format="%.6f", lineterminator="\n"))
    publish_json(folder / "metrics.json", evaluation.metrics.model_dump())


def evaluation_metrics(folder: Path) -> Metrics:
    """Read metrics.json.

    Raises:
        UserError: the file is missing or damaged.
    """
    return read_json(folder / "metrics.json", Metrics, EVALUATION_REMEDY)


def evaluation_table(folder: Path, name: str, columns: Sequence[str] = ()) -> pd.DataFrame:
    """Read a table of `publish_evaluation` by its name without `.csv`; `columns` are required.

    Raises:
        UserError: the file is missing, lacks a column, or has a word where a number belongs.
    """
    numbers = [column for column in columns if column not in WORDS]
    return read_table(folder / f"{name}.csv", EVALUATION_REMEDY, columns=columns, numbers=numbers)
