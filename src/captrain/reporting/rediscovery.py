"""Re-discovery: the share of rollouts that lack each capability before training and after each round, as a figure and
as a table.

Both read `results/solutions/rediscovery.csv` (`captrain.comparison.baselines.rounds` measures it). The share of a
repaired capability falls to zero. The gap is shown too, because the selection uses it, but with few failures it is
unreliable.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Column, Table

from captrain.comparison import ComparisonRow, grouped
from captrain.records import read_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORDS = ("capability", "selected")
NUMBERS = ("round", "gap", "gap_low", "gap_high", "coverage", "lacking", "passed", "failed")
"""Columns of results/solutions/rediscovery.csv."""
TITLE = "Re-discovery: the agent on fresh discovery tasks, before and after it was taught"


def of_selected(rows: Sequence[ComparisonRow]) -> Sequence[ComparisonRow]:
    """Keep the rows of capabilities that a diagnosis selected; none if the agent was not diagnosed again."""
    selected = {row["capability"] for row in rows if row["selected"]}
    return [row for row in rows if row["capability"] in selected] if any(row["round"] for row in rows) else []


def rediscovered(results: Path) -> Sequence[ComparisonRow]:
    """Read the rows of selected capabilities from results/solutions/rediscovery.csv."""
    path = results / "solutions/rediscovery.csv"
    if not path.exists():
        return []
    return of_selected(read_table(path, columns=WORDS, numbers=NUMBERS).to_dict("records"))


def rediscovery(results: Path) -> "Figure":
    """Draw the share of rollouts that lack each capability, and its gap with interval, for each diagnosis."""
    import seaborn as sns  # not needed to print the table
    from matplotlib.figure import Figure

    by_round = grouped(rediscovered(results), "round")
    shares_of_base = {row["capability"]: row["lacking"] for row in by_round[0]}
    names = {row["capability"] for rows in by_round.values() for row in rows}
    order = sorted(names, key=lambda name: (-shares_of_base.get(name, 0.0), name))
    figure = Figure(figsize=(9.6, 1.6 + 0.42 * len(order)), layout="constrained")
    shares, gaps = figure.subplots(1, 2, sharey=True)
    colours = sns.color_palette("crest", len(by_round))
    for place, (rows, colour) in enumerate(zip(by_round.values(), colours, strict=True)):
        aside = 0.22 * (place - (len(by_round) - 1) / 2)
        heights = [order.index(row["capability"]) + aside for row in rows]
        shares.plot([row["lacking"] for row in rows], heights, "o", color=colour, markersize=5, label=_agent(rows[0]))
        gaps.plot([row["gap"] for row in rows], heights, "o", color=colour, markersize=5)
        gaps.hlines(
            heights, [row["gap_low"] for row in rows], [row["gap_high"] for row in rows], color=colour, linewidth=1.4
        )
    shares.set_yticks(range(len(order)), [name.replace("_", " ") for name in order])
    shares.set(ylim=(len(order) - 0.5, -0.5), xlabel="share of all rollouts that fail and lack it")
    gaps.set_xlabel("gap, with its interval")
    shares.legend(frameon=True, fontsize=7.5, loc="lower right")
    figure.suptitle(TITLE, x=0.01, ha="left", fontsize=9)
    sns.despine(figure, left=True)
    return figure


def rediscovery_table(results: Path) -> Table | None:
    """Tabulate the same, a row for each capability and diagnosis; None if the agent was not diagnosed again."""
    rows = rediscovered(results)
    if not rows:
        return None
    numbers = ("lacking in", "of failures", "gap", "interval")
    columns = ("capability", "agent", "selected", *(Column(name, justify="right") for name in numbers))
    table = Table(*columns, title=TITLE, title_justify="left")
    for row in sorted(rows, key=lambda row: (row["capability"], row["round"])):
        interval = "" if np.isnan(row["gap_low"]) else f"{row['gap_low']:.2f} to {row['gap_high']:.2f}"
        cells = ["" if np.isnan(row[name]) else f"{row[name]:.3f}" for name in ("lacking", "coverage", "gap")]
        table.add_row(row["capability"], _agent(row), "yes" if row["selected"] else "no", *cells, interval)
    return table


def _agent(row: ComparisonRow) -> str:
    agent = f"after round {row['round']}" if row["round"] else "base"
    return f"{agent}: {row['passed']} of {row['passed'] + row['failed']} passed"
