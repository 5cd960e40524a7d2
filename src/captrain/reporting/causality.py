"""Figure of the causal test: claimed and repaired shares, change by stratum, and every adapter on every lack.

It reads `results/causality/` (`captrain.comparison.causality` measures it) and shows the adapters that learn from
rewards. An adapter that repairs only its own capability stands out on the diagonal of the last panel; its marks are
right of zero on failures that lack the capability and at zero elsewhere.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from captrain.comparison import ComparisonRow
from captrain.records import counted, read_table
from captrain.reporting.style import DIVERGING, GREY, NARROW, PROJECT, SMALL, WIDTH, arm_label, finish, ink

STRATA = {
    "lacking": ("failures that lack it", PROJECT, "o"),
    "sole": ("failures that lack it alone", "#0a5fa5", "^"),
    "other": ("other failures", "#a63d00", "s"),
    "passed": ("passed rollouts", "#8e3a80", "v"),
}
"""Label, colour and marker of each stratum."""
PLACEBO = "those that lack it, by other adapters (placebo)"
SPACING = 0.15
"""Distance between the intervals of one capability, in rows."""


def causal_rows(results: Path) -> Sequence[ComparisonRow]:
    """Read results/causality/capabilities.csv: a row for each tested adapter; empty if nothing was tested."""
    path, words = results / "causality/capabilities.csv", ("capability", "adapter", "name")
    numbers = [f"{name}{end}" for name in ("claimed", "repaired", "placebo") for end in ("", "_low", "_high")]
    return read_table(path, columns=words, numbers=numbers).to_dict("records") if path.exists() else []


def causality(results: Path, width: float = WIDTH) -> Figure:
    """Draw the share of failures that each capability claims and its adapter repairs, the change by stratum, and the
    change by every adapter on the failures of each lack."""
    words, numbers = ("capability", "stratum", "arm"), ("change", "low", "high")
    effects = read_table(results / "causality/effects.csv", columns=words, numbers=numbers).fillna({"capability": ""})
    rows = [row for row in causal_rows(results) if row["adapter"] == row["capability"]]
    rows.sort(key=lambda row: row["repaired"], reverse=True)
    wide = width >= NARROW
    heights = (
        (2.0 + 0.55 * len(rows), 1.6 + 0.3 * len(rows)) if wide else (4.0 + 1.1 * len(rows), 2.2 + 0.3 * len(rows))
    )
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    areas = figure.add_gridspec(2, 1, height_ratios=heights)
    part, below = figure.add_subfigure(areas[0]), figure.add_subfigure(areas[1])
    shares, changes = part.subplots(*((1, 2) if wide else (2, 1)))
    for name, place, colour in (("claimed", -0.18, GREY), ("repaired", 0.18, PROJECT)):
        heights = [index + place for index in range(len(rows))]
        hatch = None if name == "repaired" else "///"
        face = PROJECT if name == "repaired" else "white"
        shares.barh(
            heights, [row[name] for row in rows], height=0.32, color=face, edgecolor=colour, hatch=hatch, label=name
        )
        for height, row in zip(heights, rows, strict=True):
            shares.plot([row[f"{name}_low"], row[f"{name}_high"]], [height, height], color="0.15", linewidth=1.4)
    shares.set(title="claimed and repaired", xlabel="share of the base's failures")
    _draw_changes(changes, rows, effects)
    part.legend(loc="outside lower center", ncols=3 if wide else 1)
    for axes in (shares, changes):
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    changes.tick_params(labelleft=not wide)
    _draw_cells(below.subplots(), rows, effects, numbers=wide)
    note = "Rates are from other trials than the labels. 1 seed; 95% intervals over tasks."
    return finish(figure, _finding(rows, effects), note)


def _finding(rows: Sequence[ComparisonRow], effects: pd.DataFrame) -> str:
    """Say how many adapters repair the failures that lack their capability, and how many of the others' adapters."""
    lacking = effects[effects["stratum"] == "lacking"].set_index(["capability", "arm"])
    own = [lacking.loc[(row["capability"], row["capability"])] for row in rows]
    repairing = sum(cell["low"] > 0 for cell in own)
    placebos = sum(row["placebo_low"] > 0 for row in rows)
    return (
        f"{repairing} of {counted(len(rows), 'adapter')} repair failures that lack their capability "
        f"({min(cell['change'] for cell in own):+.2f} to {max(cell['change'] for cell in own):+.2f} in pass rate); "
        f"the other adapters do for {placebos} of {len(rows)}"
    )


def _draw_changes(axes: Axes, rows: Sequence[ComparisonRow], effects: pd.DataFrame) -> None:
    places = np.linspace(-2 * SPACING, 2 * SPACING, len(STRATA) + 1)
    for index, row in enumerate(rows):
        name = row["capability"]
        strata = effects[(effects["arm"] == name) & effects["capability"].isin([name, ""])].set_index("stratum")
        for place, (stratum, (text, colour, marker)) in zip(places, STRATA.items(), strict=False):
            cell, height = strata.loc[stratum], index + place
            axes.plot([cell["low"], cell["high"]], [height, height], color=colour, linewidth=1.3)
            axes.plot(cell["change"], height, marker, color=colour, markersize=4, label=text if index == 0 else None)
        height = index + places[-1]
        axes.plot([row["placebo_low"], row["placebo_high"]], [height, height], color=GREY, linewidth=1.3)
        axes.plot(row["placebo"], height, "D", color=GREY, markersize=3.5, label=PLACEBO if index == 0 else None)
    axes.axvline(0, color="0.2", linewidth=0.8)
    axes.set(title="what its adapter changes", xlabel="change in pass rate")


def _draw_cells(axes: Axes, rows: Sequence[ComparisonRow], effects: pd.DataFrame, *, numbers: bool) -> None:
    lacking = effects[effects["stratum"] == "lacking"]
    names = [row["capability"] for row in rows]
    arms = [*names, *(arm for arm in dict.fromkeys(lacking["arm"]) if arm not in names)]
    cells = lacking.pivot(index="capability", columns="arm", values="change").loc[names, arms].to_numpy(dtype=float)
    image = axes.imshow(cells, cmap=DIVERGING, vmin=-1, vmax=1, aspect="auto")
    if numbers:
        for y, x in np.argwhere(~np.isnan(cells)).tolist():
            change = float(cells[y, x])
            colour = ink(*colormaps[DIVERGING]((change + 1) / 2)[:3])
            axes.text(x, y, f"{change:+.2f}", ha="center", va="center", fontsize=SMALL, color=colour)
    labels = [arm_label(arm) for arm in arms]
    axes.set_xticks(range(len(arms)), labels, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), [row["name"] for row in rows])
    axes.grid(visible=False)
    axes.set_title(
        "change in pass rate on the failures that lack a capability (rows), by adapter (columns)"
        if numbers
        else "change by lack and adapter"
    )
    axes.figure.colorbar(image, ax=axes, pad=0.01, fraction=0.04)
