"""What the methods are worth on the test split: pass rates, intervals, paired differences, router bounds.

Every arm (the base, each adapter, each baseline) has been played on the same tasks and trials, so every router and
every bound is read off the same outcomes and costs no further rollouts. An outcome `error` is counted, left out of
every rate, and never taken for a failure. Methods are compared only at equal totals of rollouts spent. The
statistics are in `captrain.statistics`; here are the tables, the files and the printed table.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich.table import Table

from captrain.errors import UserError
from captrain.records import LedgerEntry, Purpose, publish_json, publish_text
from captrain.statistics import (
    Bootstrap,
    Played,
    best_single,
    followed,
    mean,
    oracle,
    random_choice,
    sign_test,
    summarise,
)

IDLE = "idle"
BASE = "base"
TRACE = "trace"
BASELINES = ("grpo_target",)
ORACLE, RANDOM, BEST_SINGLE = "bound:oracle", "bound:random", "bound:best_single"
LABELS = {
    IDLE: "doing nothing",
    BASE: "base",
    "grpo_target": "GRPO on target",
    TRACE: "TRACE",
    ORACLE: "bound: oracle router",
    RANDOM: "bound: random router",
    BEST_SINGLE: "bound: best single adapter",
}
PAIRS = ((TRACE, BASE), ("grpo_target", BASE), (TRACE, "grpo_target"), (ORACLE, TRACE), (TRACE, RANDOM))
OUTCOMES = {"passed": 1.0, "failed": 0.0, "error": np.nan}


@dataclass(frozen=True)
class Evaluation:
    """Tables of one evaluation.

    main: one row a method: method, label, pass_rate, low, high, pass_hat_k, mean_reward (empty for bounds), tasks
    (with at least one trial without error), excluded (tasks without), trials (without error), errors, rollouts_spent.
    The first row is the floor: an agent that does nothing.
    differences: one row a pair: first, second, difference, low, high, better, worse (tasks), p, distinguishable.
    kinds: one row a task kind and method: kind, method, label, pass_rate, low, high, pass_hat_k, mean_reward, tasks.
    ledger: rollouts and tokens by method, stage and purpose.
    metrics: nested dict for `dvc metrics show`.
    """

    main: pd.DataFrame
    differences: pd.DataFrame
    kinds: pd.DataFrame
    ledger: pd.DataFrame
    metrics: dict[str, Any]


def evaluate(
    outcomes: pd.DataFrame,
    routes: pd.DataFrame,
    ledger: Sequence[LedgerEntry],
    *,
    resamples: int,
    confidence: float,
    seed: int,
) -> Evaluation:
    """Compare the base, the baseline, TRACE, other routers and bounds on one set of outcomes.

    Args:
        outcomes: task, kind, arm, trial, outcome (passed | failed | error), reward; arms are "idle", "base", every
            capability and every baseline, all played on the same tasks and trials.
        routes: task, kind, and one column a router with the arm it chooses; `chosen` is the configured router's.
        ledger: every rollout spent; entries of purpose or method "evaluation" are reported, not compared.
        resamples: bootstrap resamples of the tasks.
        confidence: of the percentile intervals, in (0, 1).
        seed: of the bootstrap.

    Raises:
        UserError: the outcomes are not one per task, arm and trial; a route is missing or leads to an arm that was
            not played; TRACE and a baseline spent unequal totals.
    """
    passes = _by_arm(outcomes, "passed")
    routes = _checked_routes(routes, passes)
    spending = _spending(ledger)
    played = _methods(passes, routes)
    rewards = _rewards(_by_arm(outcomes, "reward"), routes)
    kinds = outcomes.groupby("task", sort=False)["kind"].first().loc[passes[BASE].index].to_numpy()
    intervals = Bootstrap(len(kinds), resamples, confidence, seed)
    main = _main_table(played, rewards, intervals, spending)
    differences = _difference_table(played, intervals)
    return Evaluation(
        main=main,
        differences=differences,
        kinds=_kind_table(played, rewards, intervals, kinds),
        ledger=_ledger_table(ledger),
        metrics=_metrics(main, differences, spending, confidence),
    )


def _by_arm(outcomes: pd.DataFrame, column: str) -> dict[str, pd.DataFrame]:
    """Per arm a frame tasks x trials of `column`: the reward, or `passed` as 1.0 passed, 0.0 failed; NaN for an error.
    The floor first, then the base; capabilities last."""
    unknown = sorted(set(outcomes["outcome"]) - set(OUTCOMES))
    if unknown:
        raise UserError(f"outcomes hold {', '.join(map(str, unknown))}", "an outcome is passed, failed or error")
    if outcomes.duplicated(["task", "arm", "trial"]).any():
        row = outcomes[outcomes.duplicated(["task", "arm", "trial"])].iloc[0]
        raise UserError(
            f"task {row['task']}, arm {row['arm']}, trial {row['trial']} was evaluated twice",
            "give one outcome per task, arm and trial: run `dvc repro -f evaluation`",
        )
    expected = [IDLE, BASE, *BASELINES]
    arms = list(outcomes["arm"].drop_duplicates())
    if missing := [arm for arm in expected if arm not in arms]:
        raise UserError(f"arm {', '.join(missing)} was not evaluated", "run `dvc repro -f evaluation`")
    arms = [*expected, *sorted(set(arms) - set(expected))]
    scored = outcomes.assign(passed=[OUTCOMES[outcome] for outcome in outcomes["outcome"]])
    tasks, trials = sorted(outcomes["task"].unique()), sorted(outcomes["trial"].unique())
    frames: dict[str, pd.DataFrame] = {}
    for arm in arms:
        rows = scored[scored["arm"] == arm].set_index(["task", "trial"])
        if len(rows) != len(tasks) * len(trials):
            raise UserError(
                f"arm {arm} has {len(rows)} outcomes where {len(tasks)} tasks x {len(trials)} trials were played",
                "play every arm on the same tasks and trials: run `dvc repro -f evaluation`",
            )
        frames[arm] = rows[column].astype(float).unstack("trial").loc[tasks, trials]
    return frames


def _checked_routes(routes: pd.DataFrame, passes: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Routes indexed by task in the order of the outcomes, router columns only."""
    tasks = passes[BASE].index
    absent = set(tasks) - set(routes["task"])
    if absent or routes["task"].duplicated().any():
        what = f"{len(absent)} evaluated tasks have no route" if absent else "a task is routed twice"
        raise UserError(f"routes and outcomes do not match: {what}", "run `dvc repro routes evaluation`")
    routed = routes.set_index("task").loc[tasks].drop(columns="kind", errors="ignore")
    choices = set(passes) - {IDLE, *BASELINES}
    for router in routed.columns:
        if unknown := sorted(set(routed[router]) - choices):
            raise UserError(
                f"router {router} leads to {', '.join(unknown)}, which was not evaluated",
                "run `dvc repro routes evaluation`",
            )
    return routed


def _spending(ledger: Sequence[LedgerEntry]) -> dict[str, int]:
    """Rollouts spent by TRACE, each baseline and evaluation; refuses unequal totals."""
    spent: dict[str, int] = dict.fromkeys((TRACE, *BASELINES, "evaluation"), 0)
    for entry in ledger:
        side = "evaluation" if entry.purpose == "evaluation" else entry.method
        if side not in spent:
            raise UserError(
                f"the ledger of {entry.stage} spends rollouts on an unknown method {side}",
                f"count them for one of {', '.join(spent)}",
            )
        spent[side] += entry.rollouts
    for baseline in BASELINES:
        if spent[baseline] != spent[TRACE]:
            raise UserError(
                f"TRACE spent {spent[TRACE]} rollouts and {baseline} {spent[baseline]}: not comparable",
                "give both the same total (diagnosis and calibration count for TRACE) and run "
                "`dvc repro adapters baselines`",
            )
    return spent


def _methods(passes: dict[str, pd.DataFrame], routes: pd.DataFrame) -> dict[str, Played]:
    """Every row of the main table, in its order. A router chooses among the base and the adapters, base first."""
    arms = {arm: frame.to_numpy(dtype=float) for arm, frame in passes.items()}
    choices = {arm: array for arm, array in arms.items() if arm not in (IDLE, *BASELINES)}
    adapters = {arm: array for arm, array in choices.items() if arm != BASE}
    methods = {method: summarise(array) for method, array in _played(arms, routes).items()}
    methods[ORACLE] = oracle(list(choices.values()))
    methods[RANDOM] = random_choice(list(choices.values()))
    methods[BEST_SINGLE] = best_single(adapters, [str(task) for task in routes.index])
    return methods


def _played(arms: dict[str, NDArray[np.float64]], routes: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """What was really played: the floor, the base, the baselines, and what routers chose among the arms."""
    played = {arm: arms[arm] for arm in (IDLE, BASE, *BASELINES)}
    played[TRACE] = followed(arms, routes["chosen"].tolist())
    return played | {f"router:{name}": followed(arms, routes[name].tolist()) for name in routes.columns.drop("chosen")}


def _rewards(frames: dict[str, pd.DataFrame], routes: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """Mean reward of each task (tasks,) by method, NaN where all trials were errors."""
    arms = {arm: frame.to_numpy(dtype=float) for arm, frame in frames.items()}
    return {method: pd.DataFrame(array).mean(axis=1).to_numpy() for method, array in _played(arms, routes).items()}


def _label(method: str) -> str:
    return LABELS.get(method, method.replace(":", ": "))


def _main_table(
    played: dict[str, Played], rewards: dict[str, NDArray[np.float64]], intervals: Bootstrap, spending: dict[str, int]
) -> pd.DataFrame:
    """See `Evaluation.main`. Routers and bounds use TRACE's adapters, so they spend what TRACE spends."""
    rows = []
    for method, outcome in played.items():
        low, high = intervals.interval(outcome.rates)
        defined = int((~np.isnan(outcome.rates)).sum())
        rows.append(
            {
                "method": method,
                "label": _label(method),
                "pass_rate": mean(outcome.rates),
                "low": low,
                "high": high,
                "pass_hat_k": mean(outcome.pass_k),
                "mean_reward": mean(rewards[method]) if method in rewards else np.nan,
                "tasks": defined,
                "excluded": len(outcome.rates) - defined,
                "trials": outcome.trials,
                "errors": outcome.errors,
                "rollouts_spent": 0 if method in (IDLE, BASE) else spending.get(method, spending[TRACE]),
            }
        )
    return pd.DataFrame(rows)


def _difference_table(played: dict[str, Played], intervals: Bootstrap) -> pd.DataFrame:
    """See `Evaluation.differences`.

    The interval is of the mean difference over tasks defined for both; `distinguishable` says that it leaves out
    zero. `p` is the exact two-sided sign test on tasks (more passes with the first against more with the second,
    ties left out): trial-level pairs of one task are not independent and would overstate the evidence. It is empty
    where one side is a bound, whose task rates are cross-fitted or expectations and not outcomes of one policy.
    """
    rows = []
    for first, second in PAIRS:
        one, two = played[first], played[second]
        difference = one.rates - two.rates
        low, high = intervals.interval(difference)
        better, worse = int((difference > 0).sum()), int((difference < 0).sum())
        testable = one.one_policy and two.one_policy
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
            }
        )
    return pd.DataFrame(rows)


def _kind_table(
    played: dict[str, Played], rewards: dict[str, NDArray[np.float64]], intervals: Bootstrap, kinds: NDArray[np.object_]
) -> pd.DataFrame:
    """See `Evaluation.kinds`."""
    rows = []
    for kind in sorted(set(kinds)):
        for method, outcome in played.items():
            rates = np.where(kinds == kind, outcome.rates, np.nan)
            low, high = intervals.interval(rates)
            tasks = int((~np.isnan(rates)).sum())
            numbers = {
                "pass_rate": mean(rates),
                "low": low,
                "high": high,
                "pass_hat_k": mean(outcome.pass_k[kinds == kind]),
                "mean_reward": mean(rewards[method][kinds == kind]) if method in rewards else np.nan,
                "tasks": tasks,
            }
            rows.append({"kind": kind, "method": method, "label": _label(method), **numbers})
    return pd.DataFrame(rows)


def _ledger_table(ledger: Sequence[LedgerEntry]) -> pd.DataFrame:
    """Sums by method, stage and purpose, in the order of the pipeline."""
    order = get_args(Purpose)
    keys = ("method", "stage", "purpose")
    sums = ("rollouts", "discarded", "errors", "prompt_tokens", "completion_tokens")
    totals: dict[tuple[str, ...], list[int]] = {}
    for entry in ledger:
        key = (entry.method, entry.stage, entry.purpose)
        before = totals.setdefault(key, [0] * len(sums))
        totals[key] = [total + getattr(entry, name) for total, name in zip(before, sums, strict=True)]
    rows = sorted(totals.items(), key=lambda item: (item[0][0], order.index(item[0][2]), item[0][1]))
    return pd.DataFrame([[*key, *total] for key, total in rows], columns=[*keys, *sums])


def _metrics(
    main: pd.DataFrame, differences: pd.DataFrame, spending: dict[str, int], confidence: float
) -> dict[str, Any]:
    """Small and nested; undefined numbers are left out."""
    methods, pairs = main.dropna(subset=["pass_rate"]), differences.dropna(subset=["difference"])
    return {
        "pass_rate": {row["method"]: round(row["pass_rate"], 6) for row in methods.to_dict("records")},
        "interval": {
            row["method"]: _rounded(row, "low", "high")
            for row in methods.to_dict("records")
            if row["method"] in (BASE, TRACE, *BASELINES)
        },
        "difference": {
            f"{row['first']}-{row['second']}": _rounded(row, "difference", "low", "high")
            for row in pairs.to_dict("records")
        },
        "rollouts": spending,
        "errors": sum(row["errors"] for row in main.to_dict("records") if row["method"] in (BASE, TRACE, *BASELINES)),
        "confidence": confidence,
    }


def _rounded(row: dict[Any, Any], *names: str) -> dict[str, float]:
    return {name: round(row[name], 6) for name in names}


def write(evaluation: Evaluation, folder: Path) -> None:
    """Write main.csv, differences.csv, kinds.csv, ledger.csv and metrics.json; equal evaluations, equal bytes."""
    for name in ("main", "differences", "kinds", "ledger"):
        frame: pd.DataFrame = getattr(evaluation, name)
        publish_text(folder / f"{name}.csv", frame.to_csv(index=False, float_format="%.6f", lineterminator="\n"))
    publish_json(folder / "metrics.json", evaluation.metrics)


def read(folder: Path, name: str) -> pd.DataFrame:
    """One table that `write` wrote, by its name without `.csv`.

    Raises:
        UserError: it is missing.
    """
    path = folder / f"{name}.csv"
    if not path.exists():
        raise UserError(f"{path} is missing", "run `dvc repro evaluation` to make it")
    return pd.read_csv(path)


def table(folder: Path) -> Table:
    """The final table, drawn from what `write` wrote: pass rates with intervals, rollouts spent, what is counted.

    Raises:
        UserError: a file is missing.
    """
    main, ledger = read(folder, "main"), read(folder, "ledger")
    confidence = json.loads((folder / "metrics.json").read_text())["confidence"]
    drawn = Table(title="Test split", caption=_caption(main, ledger), caption_justify="left", title_justify="left")
    drawn.add_column("method")
    scored = main.dropna(subset=["mean_reward"])
    # Where success alone is rewarded, the mean reward is the pass rate and says nothing more.
    graded = bool((scored["mean_reward"] - scored["pass_rate"]).abs().gt(1e-6).any())
    names = ["pass rate", f"{confidence:.0%} interval", "pass^k", *["mean reward"] * graded, "rollouts spent"]
    for name in names:
        drawn.add_column(name, justify="right")
    for row in main.to_dict("records"):
        interval = "" if np.isnan(row["low"]) else f"{row['low']:.3f} to {row['high']:.3f}"
        cells = [row["label"], _shown(row["pass_rate"]), interval, _shown(row["pass_hat_k"])]
        cells += [_shown(row["mean_reward"])] * graded
        style = "bold" if row["method"] in (BASE, TRACE, *BASELINES) else "dim"
        drawn.add_row(*cells, f"{row['rollouts_spent']:,}", style=style)
    return drawn


def _shown(value: float) -> str:
    return "undefined" if np.isnan(value) else f"{value:.3f}"


def _caption(main: pd.DataFrame, ledger: pd.DataFrame) -> str:
    """What was played and what is counted, from the numbers themselves."""
    played = [row for row in main.to_dict("records") if row["method"] in (BASE, TRACE, *BASELINES)]
    errors, excluded = sum(row["errors"] for row in played), max(row["excluded"] for row in played)
    lines = [
        f"{max(row['tasks'] for row in played)} tasks; intervals by bootstrap over tasks; {errors} errors of "
        f"infrastructure left out of the rates, {excluded} tasks excluded for them."
    ]
    spent: dict[str, dict[str, int]] = {}
    for row in ledger.to_dict("records"):
        purposes = spent.setdefault("evaluation" if row["purpose"] == "evaluation" else row["method"], {})
        purposes[row["purpose"]] = purposes.get(row["purpose"], 0) + row["rollouts"]
        purposes["discarded"] = purposes.get("discarded", 0) + row["discarded"]
    evaluation = spent.pop("evaluation", {}).get("evaluation", 0)
    for method, purposes in spent.items():
        discarded = purposes.pop("discarded")
        parts = " + ".join(f"{count:,} {purpose}" for purpose, count in purposes.items())
        lines.append(f"Counted for {_label(method)}: {parts} (constant groups, {discarded:,} rollouts, included).")
    lines.append(f"Not counted: {evaluation:,} evaluation rollouts. Routers and bounds use TRACE's adapters.")
    lines.append("The oracle's choice is made and scored on different trials.")
    return "\n".join(lines)
