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

from captrain.capabilities import read_selection
from captrain.comparison import (
    BASE,
    IDLE,
    ORACLE,
    SUMS,
    TRACE,
    ComparisonRow,
    compare_rows,
    evaluation_metrics,
    evaluation_table,
    grouped,
    headline_methods,
    label,
    supervision,
    unequal_total,
)
from captrain.errors import UserError
from captrain.records import JsonObject, counted, read_json, read_table
from captrain.reporting.rediscovery import rediscovery_table
from captrain.reporting.verdicts import verdict
from captrain.run import load_spec

MORE = {
    "captrain results --all": "all rows, differences and tests",
    "captrain results --spent": "rollouts, tokens and seconds of each row",
    "captrain report": "one page with everything",
}
KINDS = ("kind", "method", "label", "tasks", "pass_rate", "low", "high", "pass_hat_k", "mean_reward")
DIFFERENCES = ("first", "second", "difference", "low", "high", "p", "distinguishable")
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
    "efficacy": "repaired\nof claimed",
    "difference": "above other\nfailures",
    "specificity": "above\nplacebo",
}
"""Headings of the causal table by column of results/causality/capabilities.csv."""
CAUSAL_CAPTION = """\
Each adapter alone plays the test tasks, and the base's failures there are labelled.
claims: share of the failures with the label. repaired of claimed: share of these that pass with the adapter.
above other failures: change in pass rate minus the change on failures without the label.
above placebo: change in pass rate minus the change by the adapters of other capabilities.
Intervals by bootstrap over tasks, not corrected for their number. `captrain report` has all columns."""
LEFT: Final = "left"
NO_BOUND = "no bound here"
"""Verdict on an oracle whose rate is below a row that it should bound."""


def table(folder: Path) -> RenderableType:
    """Render all rows: pass rates with intervals, then what each learns from and spent.

    Raises:
        UserError: a file is missing or incomplete.
    """
    main, ledger = evaluation_table(folder, "main", COLUMNS), evaluation_table(folder, "ledger", LEDGER)
    metrics = evaluation_metrics(folder)
    if absent := [method for method in metrics.pass_rate if method not in {*main["method"]}]:
        raise UserError(
            f"{folder / 'main.csv'} is not a whole table: {', '.join(absent)} of metrics.json is not in it",
            "run `dvc repro comparison` to make it",
        )
    methods = headline_methods()
    others = [method for method in main["method"] if method not in methods and method != IDLE]
    parts = [_section("Test split, best row first", _all_rates(main, (IDLE, *methods), metrics.confidence))]
    if others:
        title = "Other routers, adapters and bounds"
        parts.append(_section(title, _all_rates(main, others, metrics.confidence)))
    parts += [Text(_rates_note(main)), Text(), _section("What each row learns from and spent", _spending(main, ledger))]
    return Group(*parts)


def _section(title: str, part: RenderableType, note: str = "") -> Group:
    """Put a title above a table, and a note and an empty line below."""
    return Group(Text(title, "bold"), part, *([Text(note, "dim")] if note else []), Text())


def _plain_table(*headings: str, left: Sequence[int] = (0,), gap: int = 2) -> Table:
    """Return a table without borders. Its numbers are right-aligned; columns in `left` are not."""
    columns = [
        Column(name, justify=LEFT if place in left else "right", overflow="fold") for place, name in enumerate(headings)
    ]
    return Table(*columns, box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="underline")


def _all_rates(main: pd.DataFrame, methods: Sequence[str], confidence: float) -> Table:
    """Tabulate the rates of methods, best first."""
    scored = main.dropna(subset=["mean_reward"])
    # If only success is rewarded, the mean reward equals the pass rate and is left out.
    graded = bool((scored["mean_reward"] - scored["pass_rate"]).abs().gt(1e-6).any())
    names = ("pass rate", f"{confidence:.0%} interval", "pass^k", *["mean\nreward"] * graded, "rollouts")
    rates = _plain_table("row", *names)
    for row in _ranked(main, methods):
        cells = [row["label"], _number(row["pass_rate"]), _interval(row["low"], row["high"])]
        cells += [_number(row["pass_hat_k"]), *[_number(row["mean_reward"])] * graded]
        rates.add_row(*cells, f"{row['rollouts_spent']:,}", style="bold" if row["method"] == TRACE else "")
    return rates


def causal_table(folder: Path) -> RenderableType | None:
    """Render the causal test of each capability with an adapter; None if nothing was tested."""
    path = folder / "capabilities.csv"
    numbers = ["claimed", *(f"{name}{end}" for name in CAUSAL_HEADINGS for end in ("", "_low", "_high"))]
    rows = read_table(path, columns=["name"], numbers=numbers).to_dict("records") if path.exists() else []
    if not rows:
        return None
    causal = _plain_table("capability", *CAUSAL_HEADINGS.values())
    for row in rows:
        cells = [
            f"{_number(row[name])}\n{_interval(row[f'{name}_low'], row[f'{name}_high'])}" for name in CAUSAL_HEADINGS
        ]
        causal.add_row(f"{row['name']}\n  claims {_number(row['claimed'])} of the failures", *cells)
    title = "Does repairing a capability alone repair the failures that were labelled with it?"
    return _section(title, causal, CAUSAL_CAPTION)


def _interval(low: float, high: float) -> str:
    return "" if np.isnan(low) else f"{low:.3f} to {high:.3f}"


def _rates_note(main: pd.DataFrame) -> str:
    """Describe what was played and how the bounds are made."""
    rows = main.to_dict("records")
    methods = [row for row in rows if row["method"] in headline_methods()]
    errors, excluded = sum(row["errors"] for row in methods), max(row["excluded"] for row in methods)
    tasks = counted(max(row["tasks"] for row in methods), "task")
    lines = [
        f"{tasks}; intervals by bootstrap over tasks. {_left_out(errors, excluded)}",
        "pass^k: chance that all k trials of a task pass. rollouts: spent before the evaluation.",
        "The oracle's choice is made and scored on different trials.",
    ]
    passes = {row["method"]: row["pass_rate"] for row in rows}
    if passes.get(ORACLE, 1.0) < passes[TRACE]:
        lines.append(
            "The oracle lies below TRACE, because a task has too few trials: no bound here. Set evaluation.trials=4."
        )
    return "\n".join(lines)


def _spending(main: pd.DataFrame, ledger: pd.DataFrame) -> RenderableType:
    """Tabulate what each row learns from, and its rollouts by purpose."""
    rows = main.to_dict("records")
    spending: dict[str, dict[str, int]] = {}
    for entry in ledger.to_dict("records"):
        purposes = spending.setdefault("evaluation" if entry["purpose"] == "evaluation" else entry["method"], {})
        purposes[entry["purpose"]] = purposes.get(entry["purpose"], 0) + entry["rollouts"]
        purposes["discarded"] = purposes.get("discarded", 0) + entry["discarded"]
    evaluation = spending.pop("evaluation", {}).get("evaluation", 0)
    table = _plain_table("row", "learns from", "own\nrollouts", "spent on", left=(0, 1, 3))
    for method, purposes in spending.items():
        discarded = purposes.pop("discarded")
        parts = " + ".join(f"{count:,} {purpose}" for purpose, count in purposes.items())
        constant = f" ({discarded:,} in constant groups)" if discarded else ""
        table.add_row(label(method), supervision(method) or "", f"{sum(purposes.values()):,}", f"{parts}{constant}")
    (total,) = {row["rollouts_spent"] for row in rows if row["method"] == TRACE}
    differing = [row for row in rows if row["method"] not in (IDLE, BASE) and row["rollouts_spent"] != total]
    lines = [f"Unequal total: {row['label']} {unequal_total(row['method'])}." for row in differing]
    lines.append("own rollouts: those that a row shares with TRACE, such as its diagnosis, are listed under TRACE.")
    lines.append("constant groups: all rewards of the group are equal, so it trains nothing.")
    lines.append(f"Not counted: {evaluation:,} evaluation rollouts. Routers, merging and bounds use TRACE's adapters.")
    return Group(table, Text("\n".join(lines), "dim"))


def _left_out(errors: int, tasks: int) -> str:
    """Say how many errors, and tasks because of them, the rates leave out."""
    return f"Left out of the rates: {counted(errors, 'error')} of infrastructure, {counted(tasks, 'task')} with them."


def _number(value: float | None) -> str:
    return "undefined" if value is None or np.isnan(value) else f"{value:.3f}"


def results(root: Path, *, complete: bool = False) -> RenderableType:
    """Render what `captrain results` prints: the rows by pass rate, the differences that matter, and what was selected.

    Args:
        root: of the project.
        complete: print everything instead: all rows with routers and bounds, all differences, rates by kind and on the
            discovery split (for a benchmark that describes itself), the causal test and re-discovery.
    """
    folder = root / "results/evaluation"
    if not (root / "results").exists():
        raise UserError("there are no results yet: no stage has run here", "run `captrain run`")
    discovery = _discovery(root)
    if discovery and not folder.exists():
        return Group(discovery, Text("the test split has not been played: `dvc repro comparison`"))
    if not complete:
        return _summary(root)
    kinds = evaluation_table(folder, "kinds", KINDS).to_dict("records") if discovery else []
    causal, again = causal_table(root / "results/causality"), rediscovery_table(root / "results")
    described = [part for part in (_kinds(kinds) if kinds else None, discovery) if part]
    more = [part for part in (causal, again) if part]
    return Group(table(folder), _paired(folder), *(line for part in described for line in (part, Text())), *more)


def _summary(root: Path) -> RenderableType:
    """Render the first screen: at most 40 lines of 80 columns for the default pipeline."""
    folder = root / "results/evaluation"
    main, metrics = evaluation_table(folder, "main", COLUMNS), evaluation_metrics(folder)
    rows = _ranked(main, (IDLE, *headline_methods()))
    rates = _rates(rows, metrics.confidence)
    rewarded = [row["method"] for row in rows if supervision(row["method"]) == "rewards" and row["method"] != TRACE]
    others = [BASE, TRACE, *rewarded[:1], *(row["method"] for row in rows[1:2])]
    differences = evaluation_table(folder, "differences", DIFFERENCES)
    compared = _compared(differences, (TRACE, rows[0]["method"]), others, 1 - metrics.confidence)
    lacking, commands = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
    for candidate in read_selection(root / "results")["candidates"]:
        if candidate["selected"]:
            lacking.add_row(f"  {candidate['id']}", candidate["name"])
    for command, what in MORE.items():
        commands.add_row(f"  {command}", what)
    parts: list[RenderableType] = [rates, Text(), compared, Text(), "Capabilities that the base lacks", lacking, Text()]
    errors, excluded = sum(row["errors"] for row in rows), max(row["excluded"] for row in rows)
    if errors or excluded:
        parts.append(_left_out(errors, excluded))
    return Group(*parts, commands)


def first_table(root: Path) -> RenderableType:
    """Render the rows of the base and of TRACE, which are evaluated before all others.

    Raises:
        UserError: a file is missing or corrupt.
    """
    spec = load_spec(root / "results/spec.yaml")
    tables = compare_rows(spec, root, (BASE, TRACE))
    rates = _rates(_ranked(tables.main, (BASE, TRACE)), spec.evaluation.confidence)
    compared = _compared(tables.differences, (TRACE,), [BASE], 1 - spec.evaluation.confidence)
    return Group(rates, Text(), compared)


def _ranked(main: pd.DataFrame, methods: Sequence[str]) -> list[ComparisonRow]:
    """List the rows of these methods, best first."""
    rows = [row for row in main.to_dict("records") if row["method"] in methods]
    return sorted(rows, key=lambda row: row["pass_rate"] if row["pass_rate"] == row["pass_rate"] else -1, reverse=True)


def _rates(rows: Sequence[ComparisonRow], confidence: float) -> Table:
    """Tabulate the rates of methods, the best first."""
    headings = ("row", "pass rate", f"{confidence:.0%} interval", "rollouts", "learns from")
    columns = [Column(name, justify="right" if 0 < number < 4 else LEFT) for number, name in enumerate(headings)]
    tasks = max(row["tasks"] for row in rows)
    rates = Table(*columns, title=f"Test split: {counted(tasks, 'task')}", title_justify=LEFT, box=None)
    for row in rows:
        cells = [row["label"], _number(row["pass_rate"]), _interval(row["low"], row["high"])]
        cells += [f"{row['rollouts_spent']:,}", supervision(row["method"]) or ""]
        rates.add_row(*cells, style="bold" if row["method"] in (TRACE, rows[0]["method"]) else "")
    return rates


def _compared(differences: pd.DataFrame, firsts: Sequence[str], others: Sequence[str], level: float) -> Table:
    """Tabulate the differences of the methods `firsts` to others."""
    compared = Table.grid(padding=(0, 2))
    rows = differences.dropna(subset=["difference"]).to_dict("records")
    for first in dict.fromkeys(firsts):
        pairs = [row for row in rows if row["first"] == first and row["second"] in others]
        if pairs:
            compared.add_row(f"Difference of {label(first)}", style="bold")
        for row in pairs:
            cells = [f"  to {label(row['second'])}", f"{row['difference']:+.3f}"]
            compared.add_row(*cells, f"{row['low']:+.3f} to {row['high']:+.3f}", verdict(row, level))
    return compared


def _paired(folder: Path) -> RenderableType:
    """Tabulate all paired differences, grouped by their first row."""
    level = 1 - evaluation_metrics(folder).confidence
    main = evaluation_table(folder, "main", COLUMNS).to_dict("records")
    passes = {str(row["method"]): float(row["pass_rate"]) for row in main if row["pass_rate"] == row["pass_rate"]}
    paired = _plain_table("first row, minus", "rate", "interval", "p", "verdict", left=(0, 4), gap=1)
    pairs = grouped(
        evaluation_table(folder, "differences", DIFFERENCES).dropna(subset=["difference"]).to_dict("records"), "first"
    )
    methods = headline_methods()
    for first in sorted(pairs, key=lambda name: (name not in methods, -passes.get(str(name), -1))):
        paired.add_row(Text(label(first), "bold"))
        for row in pairs[first]:
            is_no_bound = row["first"] == ORACLE and row["difference"] < 0
            paired.add_row(
                f"  {label(row['second'])}",
                f"{row['difference']:+.3f}",
                f"{row['low']:+.3f} to {row['high']:+.3f}",
                "" if row["p"] != row["p"] else f"{row['p']:.3f}" if row["p"] >= 0.001 else "<.001",
                NO_BOUND if is_no_bound else verdict(row, level),
            )
    note = (
        "p: exact sign test over tasks; not given for bounds, which are no single policy.\n"
        "differs: by the interval and, where there is a test, by p after Holm's correction for all tests here."
    )
    return _section("Paired differences over tasks, in pass rate", paired, note)


def costs(root: Path) -> RenderableType:
    """Tabulate what each method spent, with the seconds of the stages that it needs."""
    from captrain.run import times

    seconds_of = times(root)
    names = ("rollouts", "constant\ngroups", "errors", "tokens\nread", "tokens\nwritten", "wall s", "CPU s")
    table = _plain_table("row", *names, gap=1)
    stages_of = dict[str, list[str]]()
    for row in evaluation_table(root / "results/evaluation", "spent", ("label", "stages", *SUMS)).to_dict("records"):
        stages = str(row["stages"]).split() if isinstance(row["stages"], str) else []
        numbers = [f"{row[name]:,}" for name in SUMS]
        complete = all(stage in seconds_of for stage in stages)
        seconds = [
            f"{sum(getattr(seconds_of[stage], unit) for stage in stages):,.0f}" if stages and complete else ""
            for unit in ("wall_s", "cpu_s")
        ]
        table.add_row(row["label"], *numbers, *seconds)
        if stages:
            stages_of.setdefault(" ".join(stages), []).append(row["label"])
    lines = [
        "constant groups: rollouts of groups with equal rewards, which train nothing",
        "seconds: of whole stages, in the run that made these results; empty if unknown",
        *(f"stages {stages}: {'; '.join(labels)}" for stages, labels in stages_of.items()),
    ]
    return _section("What each row spent before the evaluation", table, "\n".join(lines))


def _kinds(rows: Sequence[ComparisonRow]) -> Table:
    """Tabulate rates by kind of task, without bounds."""
    names = ("kind", "method", "tasks", "pass rate", "interval", "pass^k", "mean reward")
    table = Table(*names, title="Test split by kind of task", title_justify="left")
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
    table = Table(*names, title="Discovery split, base", title_justify="left")
    whole = summary.model_copy(update={"rollouts": sum(kind.rollouts for kind in summary.kinds.values())})
    for kind, row in {**summary.kinds, "all": whole}.items():
        rates = (_number(rate) for part in (row, row.floor) for rate in (part.pass_rate, part.mean_reward))
        table.add_row(kind, str(row.rollouts), *rates)
    errors, closed = summary.outcomes.get("error", 0), len(about.get("not_runnable") or {})
    lines = [
        f"{name.replace('_', ' ')}: {json.dumps(value)}" for name, value in about.items() if name != "not_runnable"
    ]
    lines.append(
        f"{counted(errors, 'rollout')} ended in errors of infrastructure; {counted(closed, 'task')} not runnable here"
    )
    return Group(table, Text("\n".join(lines)))
