"""`captrain power`: the difference that a planned comparison can detect, and the tasks and trials that a wanted
difference needs.

`captrain.statistics` has the formulas. This module reads the difficulty of tasks from an evaluation, and prints the
answer. Variation between training seeds is not included: two trained adapters say nothing about the next two.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import NamedTuple

from rich.console import RenderableType
from rich.table import Table

from captrain.comparison.rows import BASE, TRACE
from captrain.comparison.tables import evaluation_metrics, evaluation_table
from captrain.errors import UserError
from captrain.records import counted
from captrain.statistics import (
    MAX_TASKS,
    MAX_TRIALS,
    NORMAL,
    Design,
    detectable,
    power_of,
    tasks_needed,
    trials_needed,
)

RATES = ("method", "pass_rate", "low", "high", "tasks", "trials")
DIFFERENCES = ("first", "second", "low", "high")
"""Columns that are read from an evaluation."""


class Difficulty(NamedTuple):
    """Difficulty of an evaluation's tasks: fields of `Design`."""

    base: float
    tasks: int
    trials: int
    icc: float
    shared: float


def read_difficulty(folder: Path) -> Difficulty:
    """Estimate the difficulty of an evaluation's tasks from its tables.

    The interval of a pass rate holds the variance of task rates, p (1 - p) (icc + (1 - icc) / trials). The interval of
    the difference between TRACE and the base also holds what the two have in common.

    Args:
        folder: with main.csv, differences.csv and metrics.json.

    Raises:
        UserError: a table is missing, or each task was played only once, so that icc cannot be estimated.
    """
    main = {row["method"]: row for row in evaluation_table(folder, "main", RATES).to_dict("records")}
    pairs = evaluation_table(folder, "differences", DIFFERENCES).to_dict("records")
    differences = [row for row in pairs if (row["first"], row["second"]) == (TRACE, BASE)]
    if not {TRACE, BASE} <= {*main} or not differences:
        remedy = "give --base, --tasks, --trials, --icc and --shared, or run `dvc repro comparison`"
        raise UserError(f"{folder} does not compare TRACE with the base", remedy)
    tasks = int(main[BASE]["tasks"])
    trials = round(main[BASE]["trials"] / tasks)
    if trials < 2:
        raise UserError(f"{folder} played each task once", "give --icc and --shared, or play 2 trials or more")
    # From the interval of a mean to the variance of one task.
    width = 2 * NORMAL.inv_cdf((1 + evaluation_metrics(folder).confidence) / 2)
    rows = [main[TRACE], main[BASE], differences[0]]
    trace, base, gap = (tasks * ((row["high"] - row["low"]) / width) ** 2 for row in rows)
    between, icc = 1.0, 0.0
    for rates, row in zip((trace, base), rows[:2], strict=True):
        outcomes = row["pass_rate"] * (1 - row["pass_rate"])
        share = (trials * rates / outcomes - 1) / (trials - 1) if outcomes else 0.0
        icc += share / 2
        between *= max(0.0, share) * outcomes
    shared = min(max((trace + base - gap) / 2 / sqrt(between), 0.0), 1.0) if between else 0.0
    icc = round(min(max(icc, 0.0), 0.99), 3)
    return Difficulty(float(main[BASE]["pass_rate"]), tasks, trials, icc, round(shared, 3))


def complete_design(
    fields: Mapping[str, float | int | None], folder: Path, *, level: float, power: float
) -> tuple[Design, str]:
    """Complete a design with the numbers of an evaluation, and say where icc and shared come from.

    Args:
        fields: base, tasks, trials, icc and shared; None for each unknown number.
        folder: folder of the evaluation, which is read only if a number is unknown.
        level: see `Design`.
        power: see `Design`.

    Raises:
        UserError: the evaluation does not tell an unknown number, or a number is out of range.
    """
    known = {name: value for name, value in fields.items() if value is not None}
    if len(known) == len(fields):
        difficulty, source = Difficulty._make(known[name] for name in Difficulty._fields), "as given"
    else:
        played = read_difficulty(folder)
        difficulty, source = played._replace(**known), "as given"
        if not {"icc", "shared"} <= {*known}:
            source = (
                f"{folder}: TRACE and the base on {counted(played.tasks, 'task')} x {counted(played.trials, 'trial')}"
            )
    return Design(*difficulty, level=level, power=power), source


def design_tables(design: Design, difference: float | None, source: str) -> list[RenderableType]:
    """Render the differences that a design detects with other trials and tasks, and what `difference` needs."""
    table = Table()
    counts = [number for number in (design.tasks // 2, design.tasks, 2 * design.tasks) if 2 <= number <= MAX_TASKS]
    table.add_column("trials")
    for tasks in counts:
        table.add_column(f"{tasks} tasks", justify="right", style="bold" if tasks == design.tasks else None)
    for trials in sorted({1, 2, 4, design.trials}):
        gains = [detectable(replace(design, tasks=tasks, trials=trials)) for tasks in counts]
        cells = ["none" if gain is None else f"{gain:.3f}" for gain in gains]
        table.add_row(str(trials), *cells, style="bold" if trials == design.trials else None)
    given = f"power {design.power:g}, level {design.level:g}"
    title = f"Smallest detectable gain over a pass rate of {design.base:.3f} ({given})"
    parts: list[RenderableType] = [title, table]
    if difference is not None:
        trials = trials_needed(design, difference) or f"more than {MAX_TRIALS}"
        tasks = tasks_needed(design, difference) or f"more than {MAX_TASKS:,}"
        each = f"tasks, each played {'once' if design.trials == 1 else f'{design.trials} times'}"
        parts.append(
            f"A difference of {difference:.3f} is detected with power {power_of(design, difference):.2f} on "
            f"{design.tasks} {each}.\nIt takes {trials} trials on these tasks, or {tasks} {each}."
        )
    icc, shared = f"{design.icc:g} of the variance of outcomes lies between tasks", f"{design.shared:g} of it shared"
    return [*parts, f"Assumed: {icc}, {shared} ({source})."]
