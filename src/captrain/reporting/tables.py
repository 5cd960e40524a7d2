"""The tables of `captrain results`, from the files that the stages wrote."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from captrain.comparison import (
    BASE,
    IDLE,
    ORACLE,
    SUMS,
    TRACE,
    ComparisonRow,
    evaluation_metrics,
    evaluation_table,
    headline_methods,
    interpret_difference,
    label,
    supervision,
    unequal_total,
)
from captrain.errors import UserError
from captrain.records import JsonObject, read_json, read_table
from captrain.reporting.rediscovery import rediscovery_table

KINDS = ("kind", "method", "label", "tasks", "pass_rate", "low", "high", "pass_hat_k", "mean_reward")
DIFFERENCES = ("first", "second", "difference", "low", "high", "p", "distinguishable")
DISTINCT = {
    "distinguishable": "yes",
    "not distinguishable": "no",
    "not distinguishable after correction": "no (Holm)",
}
"""Readings of a difference in short: a row of the table must fit 80 columns."""
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
"""Headings of the causal table by column of results/causality/capabilities.csv."""
CAUSAL_CAPTION = """\
The base's failed test rollouts, labelled by the analyst of the diagnosis; its adapter on every task.
claimed: share of the failures with the label; repaired: share of all failures that its adapter repairs there.
of sole lacks: of failures that lack no other selected capability. Labels are of one trial, rates of the others.
above other failures: change in pass rate minus that on failures without the label.
placebo: change by the adapters of the other capabilities, on failures that lack this one and not theirs.
Intervals by bootstrap over tasks, not corrected for their number."""
LEFT: Final = "left"
NO_BOUND = "no bound here"
"""Remark on an oracle below the row that it should bound."""


def table(folder: Path) -> Table:
    """Render the main table: pass rates, intervals and rollouts spent.

    Raises:
        UserError: a file is missing or incomplete.
    """
    main, ledger = evaluation_table(folder, "main", COLUMNS), evaluation_table(folder, "ledger", LEDGER)
    metrics = evaluation_metrics(folder)
    confidence = metrics.confidence
    if absent := [method for method in metrics.pass_rate if method not in {*main["method"]}]:
        raise UserError(
            f"{folder / 'main.csv'} is not a whole table: {', '.join(absent)} of metrics.json is not in it",
            "run `dvc repro evaluation` to make it",
        )
    scored = main.dropna(subset=["mean_reward"])
    # If only success is rewarded, the mean reward equals the pass rate and is left out.
    graded = bool((scored["mean_reward"] - scored["pass_rate"]).abs().gt(1e-6).any())
    names = ["pass rate", f"{confidence:.0%} interval", "pass^k", *["mean reward"] * graded, "rollouts spent"]
    columns = ("method", "learns from", *(Column(name, justify="right") for name in names))
    caption = _caption(main, ledger)
    final = Table(*columns, title="Test split", caption=caption, title_justify=LEFT, caption_justify=LEFT)
    passes = main.set_index("method")["pass_rate"]
    for row in main.to_dict("records"):
        interval = _interval(row["low"], row["high"])
        remark = f" ({NO_BOUND})" if row["method"] == ORACLE and row["pass_rate"] < passes[TRACE] else ""
        cells = [f"{row['label']}{remark}", supervision(row["method"]) or "", _number(row["pass_rate"]), interval]
        cells += [_number(row["pass_hat_k"]), *[_number(row["mean_reward"])] * graded]
        style = "bold" if row["method"] in headline_methods() else "dim"
        final.add_row(*cells, f"{row['rollouts_spent']:,}", style=style)
    return final


def causal_table(folder: Path) -> Table | None:
    """Render the causal test of each capability with an adapter; None if nothing was tested."""
    path = folder / "capabilities.csv"
    numbers = [f"{name}{end}" for name in CAUSAL_HEADINGS for end in ("", "_low", "_high")]
    rows = read_table(path, columns=["name"], numbers=numbers).to_dict("records") if path.exists() else []
    if not rows:
        return None
    title = "Does repairing a capability alone repair the failures that were labelled with it?"
    columns = (Column(heading, justify="right") for heading in CAUSAL_HEADINGS.values())
    columns = ("capability", *columns)
    causal = Table(*columns, title=title, caption=CAUSAL_CAPTION, title_justify=LEFT, caption_justify=LEFT)
    for row in rows:
        cells = [
            f"{_number(row[name])}\n{_interval(row[f'{name}_low'], row[f'{name}_high'])}" for name in CAUSAL_HEADINGS
        ]
        causal.add_row(row["name"], *cells)
    return causal


def _interval(low: float, high: float) -> str:
    return "" if np.isnan(low) else f"{low:.3f} to {high:.3f}"


def _caption(main: pd.DataFrame, ledger: pd.DataFrame) -> str:
    """Describe what was played and which rollouts are counted."""
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


def _number(value: float | None) -> str:
    return "undefined" if value is None or np.isnan(value) else f"{value:.3f}"


def results(root: Path) -> RenderableType:
    """Render everything that `captrain results` prints, with the main table last.

    Before it come: rates by kind and on the discovery split (for a benchmark that describes itself), the causal test,
    re-discovery, the list of figures, and the paired differences.
    """
    folder = root / "results/evaluation"
    discovery = _discovery(root)
    if discovery and not folder.exists():
        return Group(discovery, Text("the test split has not been played: `dvc repro evaluation`"))
    final = table(folder)
    level = 1 - evaluation_metrics(folder).confidence
    title = "paired differences over tasks, in pass rate"
    paired = Table("difference", "rate", "interval", "p", "distinct", title=title, title_justify="left")
    for row in evaluation_table(folder, "differences", DIFFERENCES).dropna(subset=["difference"]).to_dict("records"):
        paired.add_row(
            f"{row['first']} - {row['second']}",
            f"{row['difference']:+.3f}",
            f"{row['low']:+.3f} to {row['high']:+.3f}",
            "" if row["p"] != row["p"] else f"{row['p']:.3f}" if row["p"] >= 0.001 else "< 0.001",
            NO_BOUND
            if row["first"] == ORACLE and row["difference"] < 0
            else DISTINCT.get(reading := interpret_difference(row, level), reading),
        )
    paired.caption = (
        "p: exact sign test over tasks; not given for bounds, which are no single policy\n"
        "distinct: by the interval and, where there is a test, by p after Holm's correction for all tests here; "
        "no (Holm): not after the correction"
    )
    names = ", ".join(path.name for path in sorted((root / "results/figures").glob("*.p*")))
    figures = f"figures: {names} in results/figures/" if names else "figures: not drawn yet; run `dvc repro figures`"
    kinds = evaluation_table(folder, "kinds", KINDS).to_dict("records") if discovery else []
    causal, again = causal_table(root / "results/causality"), rediscovery_table(root / "results")
    more = [part for part in (_kinds(kinds) if kinds else None, discovery, causal, again) if part]
    # The main table comes last: a terminal shows the end of the output.
    return Group(*(line for part in more for line in (part, Text())), Text(figures), Text(), paired, Text(), final)


def costs(root: Path) -> RenderableType:
    """Tabulate what each method spent, with the seconds of the stages that it needs."""
    from captrain.run import times

    seconds_of = times(root)
    names = ("method", "rollouts", "constant groups", "errors", "tokens read", "written", "wall s", "CPU s", "stages")
    table = Table(*names, title="what each method spent before the evaluation", title_justify="left")
    for row in evaluation_table(root / "results/evaluation", "spent", ("label", "stages", *SUMS)).to_dict("records"):
        stages = str(row["stages"]).split() if isinstance(row["stages"], str) else []
        numbers = [f"{row[name]:,}" for name in SUMS]
        complete = all(stage in seconds_of for stage in stages)
        seconds = [
            f"{sum(getattr(seconds_of[stage], unit) for stage in stages):,.0f}" if stages and complete else ""
            for unit in ("wall_s", "cpu_s")
        ]
        table.add_row(row["label"], *numbers, *seconds, " ".join(stages))
    table.caption = "seconds: of whole stages, in the run that made these results; empty if unknown"
    return table


def _kinds(rows: Sequence[ComparisonRow]) -> Table:
    """Tabulate rates by kind of task, without bounds."""
    names = ("kind", "method", "tasks", "pass rate", "interval", "pass^k", "mean reward")
    table = Table(*names, title="test split by kind", title_justify="left")
    for row in rows:
        if row["mean_reward"] == row["mean_reward"] and not row["method"].startswith("router:"):
            numbers = (_number(row[name]) for name in ("pass_hat_k", "mean_reward"))
            interval = f"{row['low']:.3f} to {row['high']:.3f}"
            table.add_row(row["kind"], row["label"], str(row["tasks"]), _number(row["pass_rate"]), interval, *numbers)
    return table


class _Rates(BaseModel):
    pass_rate: float | None
    mean_reward: float | None


class _KindRates(_Rates):
    rollouts: int = 0
    floor: _Rates


class _Summary(_KindRates):
    """Fields of results/rollouts/summary.json; only kinds have `rollouts`."""

    outcomes: dict[str, int]
    kinds: dict[str, _KindRates]
    benchmark: JsonObject = {}


def _discovery(root: Path) -> RenderableType | None:
    """Tabulate the base on the discovery split, beside an agent that does nothing, with the benchmark's own facts.

    None for a benchmark that does not describe itself.
    """
    path = root / "results/rollouts/summary.json"
    summary = read_json(path, _Summary) if path.exists() else None
    if summary is None or not summary.benchmark:
        return None
    about = summary.benchmark
    names = ("kind", "rollouts", "pass rate", "mean reward", "doing nothing: pass rate", "mean reward")
    table = Table(*names, title="discovery split, base", title_justify="left")
    whole = summary.model_copy(update={"rollouts": sum(kind.rollouts for kind in summary.kinds.values())})
    for kind, row in {**summary.kinds, "all": whole}.items():
        rates = (_number(rate) for part in (row, row.floor) for rate in (part.pass_rate, part.mean_reward))
        table.add_row(kind, str(row.rollouts), *rates)
    errors, closed = summary.outcomes.get("error", 0), len(about.get("not_runnable") or {})
    lines = [
        f"{name.replace('_', ' ')}: {json.dumps(value)}" for name, value in about.items() if name != "not_runnable"
    ]
    lines.append(f"{errors} rollouts ended in errors of infrastructure; {closed} tasks are not runnable here")
    return Group(table, Text("\n".join(lines)))
