"""Figure of the causal test: claimed and repaired shares, change by stratum, and every adapter on every lack.

It reads `results/causality/` (`captrain.comparison.causality` measures it) and shows the adapters that learn from
rewards. An adapter that repairs only its own capability stands out on the diagonal of the last panel; its dots are
right of zero on failures that lack the capability and at zero elsewhere.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from captrain.comparison import ComparisonRow
from captrain.records import read_table
from captrain.reporting.style import GREY, arm_label

STRATA = {
    "lacking": "failures that lack it",
    "sole": "failures that lack it alone",
    "other": "other failures",
    "passed": "passed rollouts",
}
PLACEBO = "failures that lack it, by the others' adapters (placebo)"
SPACING = 0.15
"""Distance between the intervals of one capability, in rows."""


def causal_rows(results: Path) -> Sequence[ComparisonRow]:
    """Read results/causality/capabilities.csv: a row for each tested adapter; empty if nothing was tested."""
    path, words = results / "causality/capabilities.csv", ("capability", "adapter", "name")
    numbers = [f"{name}{end}" for name in ("claimed", "repaired", "placebo") for end in ("", "_low", "_high")]
    return read_table(path, columns=words, numbers=numbers).to_dict("records") if path.exists() else []


def causality(results: Path) -> Figure:
    """Draw the share of failures that each capability claims and its adapter repairs, the change by stratum, and the
    change by every adapter on the failures of each lack."""
    words, numbers = ("capability", "stratum", "arm"), ("change", "low", "high")
    effects = read_table(results / "causality/effects.csv", columns=words, numbers=numbers).fillna({"capability": ""})
    rows = [row for row in causal_rows(results) if row["adapter"] == row["capability"]]
    figure = Figure(figsize=(12.4, 2.2 + 0.62 * len(rows)), layout="constrained")
    shares, changes, cells = figure.subplots(1, 3, width_ratios=(3, 4, 4))
    for name, place, colour in (("claimed", -0.18, GREY), ("repaired", 0.18, sns.color_palette("deep")[2])):
        heights = [index + place for index in range(len(rows))]
        shares.barh(heights, [row[name] for row in rows], height=0.32, color=colour, alpha=0.75, label=name)
        for height, row in zip(heights, rows, strict=True):
            shares.plot([row[f"{name}_low"], row[f"{name}_high"]], [height, height], color="0.15", linewidth=1.2)
    shares.set(title="Claimed and repaired", xlabel="share of the base's failures on the test split")
    shares.legend(fontsize=7, frameon=True, loc="lower right")
    _draw_changes(changes, rows, effects)
    _draw_cells(cells, rows, effects)
    for axes in (shares, changes):
        axes.set_ylim(len(rows) - 0.5, -0.5)
    shares.set_yticks(range(len(rows)), [row["name"] for row in rows])
    changes.set_yticks(range(len(rows)), [""] * len(rows))
    sns.despine(figure, left=True)
    return figure


def _draw_changes(axes: Axes, rows: Sequence[ComparisonRow], effects: pd.DataFrame) -> None:
    colours = dict(zip(STRATA, ["#1b7a45", "#6fbf8b", "#c44e52", "#4c72b0"], strict=True))
    places = np.linspace(-2 * SPACING, 2 * SPACING, len(STRATA) + 1)
    for index, row in enumerate(rows):
        name = row["capability"]
        strata = effects[(effects["arm"] == name) & effects["capability"].isin([name, ""])].set_index("stratum")
        for place, stratum in zip(places, STRATA, strict=False):
            cell, height = strata.loc[stratum], index + place
            axes.plot([cell["low"], cell["high"]], [height, height], color=colours[stratum], linewidth=1.4)
            text = STRATA[stratum] if index == 0 else None
            axes.plot(cell["change"], height, "o", color=colours[stratum], markersize=4, label=text)
        height = index + places[-1]
        axes.plot([row["placebo_low"], row["placebo_high"]], [height, height], color=GREY, linewidth=1.4)
        axes.plot(row["placebo"], height, "D", color=GREY, markersize=3.5, label=PLACEBO if index == 0 else None)
    axes.axvline(0, color="0.2", linewidth=0.8)
    axes.set(title="What its adapter changes", xlabel="change in pass rate, in other trials than were labelled")
    axes.legend(fontsize=6.5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)


def _draw_cells(axes: Axes, rows: Sequence[ComparisonRow], effects: pd.DataFrame) -> None:
    lacking = effects[effects["stratum"] == "lacking"]
    names = [row["capability"] for row in rows]
    arms = [*names, *(arm for arm in dict.fromkeys(lacking["arm"]) if arm not in names)]
    cells = lacking.pivot(index="capability", columns="arm", values="change").loc[names, arms].to_numpy(dtype=float)
    axes.imshow(cells, cmap="RdYlGn", vmin=-1, vmax=1, aspect="auto")
    for (y, x), change in np.ndenumerate(cells):
        if not np.isnan(change):
            axes.text(x, y, f"{change:+.2f}", ha="center", va="center", fontsize=7, color="0.1")
    axes.set_xticks(range(len(arms)), [arm_label(arm) for arm in arms], rotation=35, ha="right", fontsize=7)
    axes.set_yticks(range(len(names)), [""] * len(names))
    axes.grid(visible=False)
    axes.set_title("Change on failures of a lack, by adapter")
