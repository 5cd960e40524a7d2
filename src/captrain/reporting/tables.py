"""The final table as it is printed: drawn from the files that the evaluation wrote, with what is counted beneath it."""

from pathlib import Path

import numpy as np
import pandas as pd
from rich.table import Table

from captrain.comparison import (
    BASE,
    IDLE,
    ORACLE,
    TRACE,
    evaluation_metrics,
    evaluation_table,
    headline_methods,
    label,
    supervision,
    unequal_total,
)
from captrain.errors import UserError
from captrain.records import read_table

COLUMNS = (
    "method",
    "label",
    "pass_rate",
    "low",
    "high",
    "pass_hat_k",
    "mean_reward",
    "tasks",
    "excluded",
    "errors",
    "rollouts_spent",
)
LEDGER = ("method", "purpose", "rollouts", "discarded")
CAUSAL_HEADINGS = {
    "claimed": "claimed",
    "repaired": "repaired",
    "efficacy": "repaired of claimed",
    "sole_efficacy": "of sole lacks",
    "difference": "above other failures",
    "placebo": "placebo",
    "specificity": "above placebo",
}
"""Columns of the causal table, by the column of results/causality/capabilities.csv."""
CAUSAL_CAPTION = """\
The base's failed test rollouts, labelled by the analyst of the diagnosis; its adapter on every task.
claimed: share of the failures with the label; repaired: share of all failures that its adapter repairs there.
of sole lacks: of failures that lack no other selected capability. Labels are of one trial, rates of the others.
above other failures: change in pass rate minus that on failures without the label.
placebo: change by the adapters of the other capabilities, on failures that lack this one and not theirs.
Intervals by bootstrap over tasks, not corrected for their number."""
NO_BOUND = "no bound here"
"""Remark on an oracle that lies below the row that it should bound."""


def table(folder: Path) -> Table:
    """Render the final table, drawn from what `write` wrote: pass rates, intervals, rollouts spent, what is counted.

    Raises:
        UserError: a file is missing.
    """
    main, ledger = evaluation_table(folder, "main", COLUMNS), evaluation_table(folder, "ledger", LEDGER)
    metrics = evaluation_metrics(folder)
    confidence = metrics.confidence
    if absent := [method for method in metrics.pass_rate if method not in {*main["method"]}]:
        raise UserError(
            f"{folder / 'main.csv'} is not a whole table: {', '.join(absent)} of metrics.json is not in it",
            "run `dvc repro evaluation` to make it",
        )
    final = Table(title="Test split", caption=_caption(main, ledger), caption_justify="left", title_justify="left")
    final.add_column("method")
    final.add_column("learns from")
    scored = main.dropna(subset=["mean_reward"])
    # Where success alone is rewarded, the mean reward is the pass rate and says nothing more.
    graded = bool((scored["mean_reward"] - scored["pass_rate"]).abs().gt(1e-6).any())
    names = ["pass rate", f"{confidence:.0%} interval", "pass^k", *["mean reward"] * graded, "rollouts spent"]
    for name in names:
        final.add_column(name, justify="right")
    passes = main.set_index("method")["pass_rate"]
    for row in main.to_dict("records"):
        interval = _interval(row["low"], row["high"])
        remark = f" ({NO_BOUND})" if row["method"] == ORACLE and row["pass_rate"] < passes[TRACE] else ""
        cells = [f"{row['label']}{remark}", supervision(row["method"]) or "", _number(row["pass_rate"]), interval]
        cells += [_number(row["pass_hat_k"])]
        cells += [_number(row["mean_reward"])] * graded
        style = "bold" if row["method"] in headline_methods() else "dim"
        final.add_row(*cells, f"{row['rollouts_spent']:,}", style=style)
    return final


def causal_table(folder: Path) -> Table | None:
    """Render the causal test of each capability that has an adapter, drawn from what the stage `causality` wrote; None
    where nothing was tested."""
    path = folder / "capabilities.csv"
    numbers = [f"{name}{end}" for name in CAUSAL_HEADINGS for end in ("", "_low", "_high")]
    rows = read_table(path, columns=["name"], numbers=numbers).to_dict("records") if path.exists() else []
    if not rows:
        return None
    title = "Does repairing a capability alone repair the failures that were labelled with it?"
    causal = Table(title=title, caption=CAUSAL_CAPTION, caption_justify="left", title_justify="left")
    causal.add_column("capability")
    for heading in CAUSAL_HEADINGS.values():
        causal.add_column(heading, justify="right")
    for row in rows:
        cells = [
            f"{_number(row[name])}\n{_interval(row[f'{name}_low'], row[f'{name}_high'])}" for name in CAUSAL_HEADINGS
        ]
        causal.add_row(row["name"], *cells)
    return causal


def _interval(low: float, high: float) -> str:
    return "" if np.isnan(low) else f"{low:.3f} to {high:.3f}"


def _number(value: float) -> str:
    return "undefined" if np.isnan(value) else f"{value:.3f}"


def _caption(main: pd.DataFrame, ledger: pd.DataFrame) -> str:
    """Describe what was played and what is counted, from the numbers themselves."""
    rows = main.to_dict("records")
    methods = [row for row in rows if row["method"] in headline_methods()]
    errors, excluded = sum(row["errors"] for row in methods), max(row["excluded"] for row in methods)
    lines = [
        f"{max(row['tasks'] for row in methods)} tasks; intervals by bootstrap over tasks; {errors} errors of "
        f"infrastructure left out of the rates, {excluded} tasks excluded for them."
    ]
    spending: dict[str, dict[str, int]] = {}
    for row in ledger.to_dict("records"):
        purposes = spending.setdefault("evaluation" if row["purpose"] == "evaluation" else row["method"], {})
        purposes[row["purpose"]] = purposes.get(row["purpose"], 0) + row["rollouts"]
        purposes["discarded"] = purposes.get("discarded", 0) + row["discarded"]
    evaluation = spending.pop("evaluation", {}).get("evaluation", 0)
    for method, purposes in spending.items():
        discarded = purposes.pop("discarded")
        parts = " + ".join(f"{count:,} {purpose}" for purpose, count in purposes.items())
        lines.append(f"Spent by {label(method)}: {parts} (constant groups, {discarded:,} rollouts, included).")
    (total,) = {row["rollouts_spent"] for row in rows if row["method"] == TRACE}
    differing = [row for row in rows if row["method"] not in (IDLE, BASE) and row["rollouts_spent"] != total]
    lines += [f"Another total than TRACE's: {row['label']} {unequal_total(row['method'])}." for row in differing]
    lines.append(f"Not counted: {evaluation:,} evaluation rollouts. Routers, merging and bounds use TRACE's adapters.")
    lines.append("The oracle's choice is made and scored on different trials.")
    passes = {row["method"]: row["pass_rate"] for row in rows}
    if passes.get(ORACLE, 1.0) < passes[TRACE]:
        lines.append("It lies below TRACE, chosen on too few trials of a task: no bound here. Set evaluation.trials=4.")
    return "\n".join(lines)
