"""`captrain power`: the difference that a comparison can detect, and what a wanted one takes, before anything is spent.

The model is that of `captrain.statistics`; here are the difficulty of an evaluation's tasks, from its tables, and the
tables that are printed. What differs between training seeds is not part of this: a comparison of two trained adapters
says nothing of the next two.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import RenderableType
from rich.table import Table

from captrain.comparison.rows import BASE, TRACE
from captrain.comparison.tables import evaluation_metrics, evaluation_table
from captrain.errors import UserError
from captrain.records import JsonObject
from captrain.statistics import MAX_TASKS, MAX_TRIALS, Design, detectable, simulated_power, tasks_needed, trials_needed

RATES = ("method", "pass_rate", "low", "high", "tasks", "trials")
DIFFERENCES = ("first", "second", "low", "high")
"""Columns that are read of an evaluation."""


def read_difficulty(folder: Path) -> tuple[JsonObject, str]:
    """Estimate the difficulty of an evaluation's tasks from its tables alone.

    The interval of a pass rate holds the variance of task rates, which is p (1 - p) (icc + (1 - icc) / trials); the
    interval of the difference between TRACE and the base holds, with those of both, what they share.

    Args:
        folder: with main.csv, differences.csv and metrics.json.

    Returns:
        The fields of `Design` base, tasks, trials, icc and shared; and where they come from.

    Raises:
        UserError: a table is missing, or each task was played once, which tells nothing of icc.
    """
    from scipy.special import ndtri

    main = {row["method"]: row for row in evaluation_table(folder, "main", RATES).to_dict("records")}
    pairs = evaluation_table(folder, "differences", DIFFERENCES).to_dict("records")
    differences = [row for row in pairs if (row["first"], row["second"]) == (TRACE, BASE)]
    if not {TRACE, BASE} <= {*main} or not differences:
        remedy = "give --base, --tasks, --trials, --icc and --shared, or run `dvc repro evaluation`"
        raise UserError(f"{folder} does not compare TRACE with the base", remedy)
    z = float(ndtri((1 + evaluation_metrics(folder).confidence) / 2))
    tasks = int(main[BASE]["tasks"])
    trials = round(main[BASE]["trials"] / tasks)
    if trials < 2:
        raise UserError(f"{folder} played each task once", "give --icc and --shared, or play 2 trials or more")
    # The variance of a task's contribution to a mean, from the mean's interval.
    rows = [main[TRACE], main[BASE], differences[0]]
    trace, base, gap = (tasks * ((row["high"] - row["low"]) / (2 * z)) ** 2 for row in rows)
    outcomes = [row["pass_rate"] * (1 - row["pass_rate"]) for row in rows[:2]]
    icc = [
        (trials * rates / whole - 1) / (trials - 1) if whole else 0.0
        for rates, whole in zip((trace, base), outcomes, strict=True)
    ]
    between = [max(0.0, share) * whole for share, whole in zip(icc, outcomes, strict=True)]
    product = float(np.sqrt(between[0] * between[1]))
    shared = min(max((trace + base - gap) / 2 / product, 0.0), 1.0) if product > 0 else 0.0
    numbers = {"base": float(main[BASE]["pass_rate"]), "tasks": tasks, "trials": trials}
    numbers |= {"icc": round(min(max(float(np.mean(icc)), 0.0), 0.99), 3), "shared": round(shared, 3)}
    return numbers, f"{folder}: TRACE and the base on {tasks} tasks x {trials} trials"


def complete_design(
    fields: Mapping[str, float | int | None], folder: Path, *, level: float, power: float
) -> tuple[Design, str]:
    """Complete a design by numbers as they were in an evaluation; and say where icc and shared come from.

    Args:
        fields: base, tasks, trials, icc and shared, as far as they are known.
        folder: of the evaluation; it is read only where something is None.
        level: see `Design`.
        power: likewise.

    Raises:
        UserError: something is None and the evaluation does not tell it, or the numbers are no design.
    """
    numbers, source = read_difficulty(folder) if None in fields.values() else (JsonObject(), "as given")
    if None not in (fields["icc"], fields["shared"]):
        source = "as given"
    numbers |= {name: value for name, value in fields.items() if value is not None}
    return Design(**numbers, level=level, power=power), source


def design_tables(design: Design, difference: float | None, source: str) -> list[RenderableType]:
    """Render a design: what is detectable with other numbers of trials and tasks, and what `difference` takes."""
    table = Table()
    counts = [number for number in (design.tasks // 2, design.tasks, 2 * design.tasks) if 2 <= number <= MAX_TASKS]
    table.add_column("trials")
    for tasks in counts:
        table.add_column(f"{tasks} tasks", justify="right", style="bold" if tasks == design.tasks else None)
    for trials in sorted({1, 2, 4, design.trials}):
        gains = [detectable(replace(design, tasks=tasks, trials=trials)) for tasks in counts]
        cells = ["none" if gain is None else f"{gain:.3f}" for gain in gains]
        table.add_row(str(trials), *cells, style="bold" if trials == design.trials else None)
    title = f"Least gain over {design.base:.3f} found with power {design.power:g} at level {design.level:g}"
    parts: list[RenderableType] = [title, table]
    if difference is not None:
        trials, tasks = trials_needed(design, difference), tasks_needed(design, difference)
        times = "once" if design.trials == 1 else f"{design.trials} times"
        chance, tasks_each = simulated_power(design, difference), f"tasks, each played {times}"
        parts.append(
            f"A difference of {difference:.3f} is found with power {chance:.2f} on "
            f"{design.tasks} {tasks_each}.\nIt takes {trials or f'more than {MAX_TRIALS}'} trials on these tasks, or "
            f"{tasks or f'more than {MAX_TASKS:,}'} {tasks_each}."
        )
    icc, shared = f"{design.icc:g} of the variance of outcomes lies between tasks", f"{design.shared:g} of it shared"
    return [*parts, f"Assumed: {icc}, {shared} ({source})."]
