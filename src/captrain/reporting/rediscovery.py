"""Re-discovery: the share of rollouts that lack each capability before training and after each round, as a figure and
as a table.

Both read `results/solutions/rediscovery.csv` (`captrain.comparison.baselines.rounds` measures it). The share of a
repaired capability falls to zero. The gap is shown too, because the selection uses it, but with few failures it is
unreliable.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from captrain.capabilities import titled
from captrain.comparison import ComparisonRow, grouped
from captrain.records import read_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORDS = ("capability", "selected")
NUMBERS = ("round", "gap", "gap_low", "gap_high", "coverage", "lacking", "passed", "failed")
"""Columns of results/solutions/rediscovery.csv."""
TITLE = "Re-discovery: the agent on fresh discovery tasks, before and after it was taught"


def of_selected(rows: Sequence[ComparisonRow]) -> Sequence[ComparisonRow]:
    """Keep the rows of capabilities that a diagnosis selected; empty before a second diagnosis."""
    selected = {row["capability"] for row in rows if row["selected"]}
    return [row for row in rows if row["capability"] in selected] if any(row["round"] for row in rows) else []


def rediscovered(results: Path) -> Sequence[ComparisonRow]:
    """Read the rows of selected capabilities from results/solutions/rediscovery.csv."""
    path = results / "solutions/rediscovery.csv"
    if not path.exists():
        return []
    return of_selected(read_table(path, columns=WORDS, numbers=NUMBERS).to_dict("records"))


def rediscovery(results: Path, width: float | None = None) -> "Figure":
    """Draw the share of rollouts that lack each capability, and its gap with interval, for each diagnosis."""
    from matplotlib.figure import Figure  # not needed to print the table

    from captrain.reporting.style import COLOURS, MARKERS, NARROW, WIDTH, arm_label, body, finish

    width = width or WIDTH
    by_round = grouped(rediscovered(results), "round")
    shares_of_base = {row["capability"]: row["lacking"] for row in by_round[0]}
    names = {row["capability"] for rows in by_round.values() for row in rows}
    order = sorted(names, key=lambda name: (-shares_of_base.get(name, 0.0), name))
    figure = Figure(figsize=(width, 1.5 + 0.36 * len(order)), layout="constrained")
    part = body(figure)
    shares, gaps = part.subplots(1, 2, sharey=True)
    for place, rows in enumerate(by_round.values()):
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        aside = 0.22 * (place - (len(by_round) - 1) / 2)
        heights = [order.index(row["capability"]) + aside for row in rows]
        look = {"color": colour, "marker": marker, "linestyle": "none", "markersize": 5}
        shares.plot([row["lacking"] for row in rows], heights, label=_agent(rows[0]), **look)
        gaps.plot([row["gap"] for row in rows], heights, **look)
        gaps.hlines(
            heights, [row["gap_low"] for row in rows], [row["gap_high"] for row in rows], color=colour, linewidth=1.4
        )
    shares.set_yticks(range(len(order)), [arm_label(name) for name in order])
    shares.set_ylim(len(order) - 0.5, -0.5)
    shares.set_xlabel("share of all rollouts\nthat fail and lack it")
    gaps.set_xlabel("gap,\nwith its interval")
    part.legend(loc="outside lower center", ncols=len(by_round) if width >= NARROW else 1)
    return finish(figure, _finding(by_round), "1 seed; fresh discovery tasks in each diagnosis.")


def _finding(by_round: Mapping[int, Sequence[ComparisonRow]]) -> str:
    """Say how many tasks pass before and after, and how many lacks became rarer."""
    first, *_, last = by_round.values()
    before, after = ({row["capability"]: row["lacking"] for row in rows} for rows in (first, last))
    rarer = sum(after.get(name, 0.0) < share for name, share in before.items())
    counts = [f"{rows[0]['passed']} of {rows[0]['passed'] + rows[0]['failed']}" for rows in (first, last)]
    return (
        f"After the last round the agent passes {counts[1]} fresh tasks, before {counts[0]}; "
        f"{rarer} of {len(before)} lacks are rarer"
    )


def rediscovery_table(results: Path) -> RenderableType | None:
    """Tabulate the same, a block for each diagnosis; None if the agent was not diagnosed again."""
    rows = rediscovered(results)
    if not rows:
        return None
    numbers = (Column(name, justify="right") for name in ("selected", "lack it", "gap", "interval"))
    columns = (Column("capability", overflow="fold"), *numbers)
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="underline")
    for number, found in grouped(rows, "round").items():
        agent = f"after round {number}" if number else "base"
        passed = f"{found[0]['passed']} of {found[0]['passed'] + found[0]['failed']} passed"
        table.add_row(Text(f"{agent}: {passed}", "bold"))
        for row in sorted(found, key=lambda row: (-row["lacking"], row["capability"])):
            interval = "" if np.isnan(row["gap_low"]) else f"{row['gap_low']:.2f} to {row['gap_high']:.2f}"
            cells = ["" if np.isnan(row[name]) else f"{row[name]:.3f}" for name in ("lacking", "gap")]
            table.add_row(f"  {titled(row['capability'])}", "yes" if row["selected"] else "no", *cells, interval)
    note = "lack it: share of all rollouts that fail and lack the capability. gap: error rate of failed minus passed."
    return Group(Text(TITLE, "bold"), table, Text(note, "dim"))


def _agent(row: ComparisonRow) -> str:
    agent = f"after round {row['round']}" if row["round"] else "base"
    return f"{agent}: {row['passed']} of {row['passed'] + row['failed']} passed"
