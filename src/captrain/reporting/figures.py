"""Figures of a finished run, drawn from `results/` alone: no model, no rollouts, no torch.

A fresh clone can redraw every figure from the small committed files, to the same bytes: nothing depends on time or on
the order of a directory, and files have no dates or program versions in their metadata. Published numbers are grey and
have panels of their own, unless the same thing was measured. scripts/study_figures.py draws figures of several runs;
`captrain.reporting.style` is the style of both.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.ticker import MaxNLocator

from captrain.capabilities import read_selection, replay
from captrain.comparison import (
    GRPO,
    TRACE,
    ComparisonRow,
    evaluation_metrics,
    evaluation_table,
    grouped,
    read_published,
    reference,
    trained_baselines,
    versus,
)
from captrain.errors import UserError
from captrain.records import read_table
from captrain.reporting.causality import causal_rows, causality
from captrain.reporting.rediscovery import rediscovered, rediscovery
from captrain.reporting.style import (
    DPI,
    GREY,
    HEADLINE,
    MERGING,
    ROUTING,
    Line,
    arm_label,
    compare,
    draw_rates,
    ordered,
    render,
    tint,
)
from captrain.run import repro

REQUIRED = (
    "evaluation/main.csv",
    "evaluation/differences.csv",
    "evaluation/kinds.csv",
    "evaluation/metrics.json",
    "capabilities/selection.json",
    "capabilities/stability.csv",
    "adapters/history.csv",
    "grpo_target/history.csv",
)
SMOOTH = 5
"""Number of updates that a training curve is averaged over."""
MARKER = 42
"""Size of a candidate's marker, in square points."""


def draw(results: Path, out: Path) -> list[Path]:
    """Draw every figure as PDF and PNG.

    Args:
        results: folder with one folder for each stage.
        out: folder for the figures; it is created if needed.

    Returns:
        The files written.

    Raises:
        UserError: a result file is missing. The message names the stage that makes it.
    """
    for name in REQUIRED:
        if not (results / name).exists():
            stage = name.split("/")[0]
            raise UserError(f"{results / name} is missing", f"run `{repro(stage, results.parent)}` to make it")
    figures: dict[str, Callable[[Path], Figure]] = {
        "main": partial(compared, name="main"),
        "capabilities": lambda results: capabilities(read_selection(results)),
        "stability": stability,
        "thresholds": thresholds,
        "training": training,
        "kinds": kinds,
        "routing": partial(compared, name="routing"),
        "merging": partial(compared, name="merging"),
        "causality": causality,
        "rediscovery": rediscovery,
        "curve": curve,
    }
    # Figures that not every run has: their data, and the reason if there is none.
    evaluation = results / "evaluation"
    rates = evaluation_table(evaluation, "main").dropna(subset=["pass_rate"])
    optional: dict[str, tuple[object, str]] = {
        "kinds": (len(evaluation_table(evaluation, "kinds")), "no task names its kind (data['kind'])"),
        "merging": (
            ordered(rates["method"], ("merged:",)),
            "no merged adapter was played; `dvc exp run -S experiment=all_methods` plays all",
        ),
        "causality": (
            causal_rows(results),
            "no capability was tested; `dvc repro causality` tests those that have adapters",
        ),
        "rediscovery": (rediscovered(results), "the agent was not diagnosed again; baselines.solutions does it"),
        "curve": (
            curve_rows(results),
            "no adapter was evaluated before the end of its training; curve.points does it",
        ),
    }
    for name, (rows, reason) in optional.items():
        if not rows:
            del figures[name]
            print(f"{name}: not drawn, for {reason}")
    return render({name: partial(make, results) for name, make in figures.items()}, out)


COMPARISONS: Mapping[str, tuple[str, Sequence[str] | None]] = {
    "main": ("Pass rate by method (rollouts spent)", None),
    "routing": ("Routing, its bounds and its controls", ROUTING),
    "merging": ("Merged adapters and TRACE, which routes (rollouts spent)", MERGING),
}
"""Figures that compare methods: the title, and the methods by name or prefix (None: all)."""


def compared(results: Path, name: str) -> Figure:
    """Draw the pass rates of methods with intervals and rollouts spent, and their differences to TRACE.

    Published rates are marked if they measure the same thing.
    """
    title, order = COMPARISONS[name]
    evaluation = results / "evaluation"
    differences = versus(evaluation_table(evaluation, "differences").to_dict("records"), TRACE)
    place, publication = reference(results)
    lines = {
        row["method"]: Line(
            row["method"],
            f"{row['label']} ({row['rollouts_spent']:,})",
            *(row["pass_rate"], row["low"], row["high"]),
            difference=differences.get(row["method"]),
            published=publication.get(row["method"]),
        )
        for row in evaluation_table(evaluation, "main").dropna(subset=["pass_rate"]).to_dict("records")
    }
    note = f"Open diamonds: as published ({read_published().paper}; {place}); measured there, not here."
    rate = f"pass rate, with {evaluation_metrics(evaluation).confidence:.0%} interval over test tasks"
    rows = [lines[method] for method in ordered(lines, order)]
    return compare({"": rows}, TRACE, title, rate, note if publication else "")


def capabilities(selection: Mapping[str, Any]) -> Figure:
    """Draw gap against coverage for every candidate, with intervals and the thresholds of the selection."""
    thresholds, candidates = selection["thresholds"], selection["candidates"]
    defined = [
        candidate for candidate in candidates if candidate["gap"] is not None and candidate["coverage"] is not None
    ]
    undefined = len(candidates) - len(defined)
    figure = Figure(figsize=(6.4, 4.2), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    groups = ((True, "selected", "o", sns.color_palette("deep")[2]), (False, "rejected", "X", "0.55"))
    for selected, name, marker, colour in groups:
        points = [candidate for candidate in defined if candidate["selected"] is selected]
        for candidate in points:
            bounds = [candidate["gap_low"], candidate["gap_high"]]
            if None not in bounds:
                axes.plot([candidate["coverage"]] * 2, bounds, color=colour, linewidth=1.2)
        places = [candidate["coverage"] for candidate in points], [candidate["gap"] for candidate in points]
        axes.scatter(*places, marker=marker, s=MARKER, color=colour, zorder=5, label=f"{name} ({len(points)})")
    axes.axhline(thresholds["delta"], color="0.2", linestyle="--", linewidth=1)
    axes.axvline(thresholds["coverage"], color="0.2", linestyle="--", linewidth=1)
    _name_points(figure, defined)
    note = f"; {undefined} with undefined gap not drawn" if undefined else ""
    axes.set(
        title=f"Candidate capabilities (thresholds dashed{note})",
        xlabel="coverage: share of failed rollouts that lack the capability",
        ylabel="gap: error rate among failed minus among passed",
    )
    axes.legend(loc="best", frameon=True)
    sns.despine(figure)
    return figure


def _name_points(figure: Figure, points: Sequence[ComparisonRow]) -> None:
    """Write each candidate's name beside its point: on the right, or on the left in the right half of the axes.

    Names on one side are moved apart in steps. If names still overlap, all go to a column beside the axes.
    """
    axes = figure.axes[0]
    axes.margins(0.12, 0.1)
    left_edge, right_edge = axes.get_xlim()
    bottom, top = axes.get_ylim()
    step, away = 0.045 * (top - bottom), 0.02 * (right_edge - left_edge)
    heights: dict[bool, float] = {True: -np.inf, False: -np.inf}
    names: list[Annotation] = []
    for candidate in sorted(points, key=lambda candidate: (candidate["gap"], candidate["id"])):
        leftward = candidate["coverage"] > (left_edge + right_edge) / 2
        height = max(candidate["gap"], heights[leftward] + step)
        heights[leftward] = height
        name = axes.annotate(
            candidate["name"],
            (candidate["coverage"], candidate["gap"]),
            xytext=(candidate["coverage"] + (-1 if leftward else 1) * away, height),
            ha="right" if leftward else "left",
            va="center",
            fontsize=7.5,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            fontweight="bold" if candidate["selected"] else "normal",
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2},
        )
        names.append(name)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(name) for name in names]
    if any(first.overlaps(second) for first, second in combinations(boxes, 2)):
        figure.set_figheight(max(figure.get_figheight(), 0.6 + 0.2 * len(names)))
        for place, name in enumerate(names):
            name.set(anncoords="axes fraction", x=1.02, y=(place + 0.5) / len(names), horizontalalignment="left")


def stability(results: Path) -> Figure:
    """Draw the retention, coverage and gap of each candidate over labelling runs, and the retention in the paper."""
    selection, runs = read_selection(results), read_table(results / "capabilities/stability.csv")
    limits, candidates = selection["thresholds"], selection["candidates"]
    figure = Figure(figsize=(11.2, 1.6 + 0.24 * max(len(candidates), 9)), layout="constrained")
    grid = figure.subplots(1, 4, width_ratios=(3, 3, 3, 3))
    for axes in grid[1:3]:
        axes.sharey(grid[0])
    selected_colour = sns.color_palette("deep")[2]
    for place, candidate in enumerate(candidates):
        shade = selected_colour if candidate["selected"] else "0.6"
        grid[0].barh(place, candidate["runs_retained"], color=shade, height=0.6)
        runs_of = runs[runs["capability"] == candidate["id"]]
        # Spread the runs, so that equal values do not hide each other.
        heights = place + np.linspace(-0.28, 0.28, len(runs_of)) if len(runs_of) > 1 else [place] * len(runs_of)
        for axes, column in zip(grid[1:3], ("coverage", "gap"), strict=True):
            axes.scatter(runs_of[column], heights, s=9, color=shade, linewidth=0)
    for axes, limit in zip(grid, ("agreement", "coverage", "delta"), strict=False):
        axes.axvline(limits[limit], color="0.2", linestyle="--", linewidth=1)
    grid[0].set_yticks(range(len(candidates)), [candidate["name"] for candidate in candidates])
    grid[0].set_ylim(max(len(candidates), 1) - 0.5, -0.5)
    count = candidates[0]["runs"] if candidates else 0
    grid[0].set(title="Candidates over labelling runs (thresholds dashed)", xlabel=f"runs of {count} that retain it")
    for axes, name in zip(grid[1:3], ("coverage", "gap"), strict=True):
        axes.tick_params(labelleft=False)
        axes.set_xlabel(f"{name}, a point for each run")
    for axes in (grid[0], grid[3]):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    # The last panel shows the selection of the paper.
    publication, axes = read_published(), grid[3]
    times, names = publication.selection.times, range(len(publication.selection.times))
    axes.barh(names, list(times.values()), height=0.6, facecolor="none", edgecolor=GREY)
    axes.axvline(publication.selection.needed, color=GREY, linestyle="--", linewidth=1)
    axes.set_yticks(names, list(times), color=GREY)
    axes.set_ylim(len(times) - 0.5, -0.5)
    axes.set_xlabel(f"runs of {publication.selection.runs} that retain it", color=GREY)
    axes.set_title("As published", color=GREY)
    note = f"Grey outlines: {publication.paper}; {publication.selection.source}: another model, other benchmarks."
    figure.supxlabel(note, fontsize=7.5, color=GREY)
    sns.despine(figure, left=True)
    return figure


def thresholds(results: Path) -> Figure:
    """Draw the selected capabilities over a grid of thresholds, replayed from the account of the selection."""
    selection = read_selection(results)
    limits, candidates = selection["thresholds"], selection["candidates"]
    deltas, coverages = [step / 10 for step in range(1, 10)], [step / 20 for step in range(1, 9)]
    cells = {(d, c): replay(selection, d, c) for d in deltas for c in coverages}
    numbers = {candidate["id"]: place for place, candidate in enumerate(candidates, start=1)}
    occurring = [candidate for candidate in candidates if any(candidate["id"] in cell for cell in cells.values())]
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    counts = np.array([[len(cells[d, c]) for d in deltas] for c in coverages])
    axes.imshow(counts, cmap=sns.light_palette("seagreen", as_cmap=True), origin="lower", aspect="auto", vmin=0)
    for (d, c), cell in cells.items():
        text = " ".join(str(number) for number in sorted(numbers[slug] for slug in cell)) or "-"
        configured = (d, c) == (limits["delta"], limits["coverage"])
        look = {"fontsize": 7.5, "fontweight": "bold" if configured else "normal"}
        dark = len(cell) > 0.7 * max(counts.max(), 1)
        place = deltas.index(d), coverages.index(c)
        axes.text(*place, text, ha="center", va="center", color="white" if dark else "0.2", **look)
    axes.set_xticks(range(len(deltas)), [f"{delta:g}" for delta in deltas])
    axes.set_yticks(range(len(coverages)), [f"{coverage:g}" for coverage in coverages])
    axes.grid(visible=False)
    title = "Selected capabilities by threshold (as configured: bold)"
    axes.set(title=title, xlabel="delta: least gap", ylabel="least coverage")
    legend = "   ".join(f"{numbers[candidate['id']]} {candidate['name']}" for candidate in occurring)
    figure.supxlabel(legend or "nothing is selected anywhere", fontsize=7.5)
    return figure


def training(results: Path) -> Figure:
    """Draw reward, success and the share of informative groups over rollouts spent, a line for each adapter.

    The first row has TRACE's adapters and GRPO on the target, the second those of the other trained baselines.
    """
    histories = {stage: results / stage / "history.csv" for stage in ("adapters", *trained_baselines())}
    lines = {
        stage: list(read_table(path).groupby("adapter", sort=False))
        for stage, path in histories.items()
        if path.exists()
    }
    headline = lines.pop("adapters") + lines.pop(GRPO)
    further = [line for adapters in lines.values() for line in adapters]
    rows = [adapters for adapters in (headline, further) if adapters] or [headline]
    figure = Figure(figsize=(9.6, 0.4 + 3.0 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), 3, sharex=True, sharey=True, squeeze=False)
    panels = {
        "reward": "mean reward",
        "success": "success rate",
        "informative": "share of informative groups",
    }
    for panels_of, adapters in zip(grid, rows, strict=True):
        colours = sns.color_palette("colorblind", len(adapters))
        for axes, (column, title) in zip(panels_of, panels.items(), strict=True):
            for (name, line), shade in zip(adapters, colours, strict=True):
                look = {"color": "0.15", "linestyle": "--"} if name == GRPO else {"color": shade}
                smooth = line[column].rolling(SMOOTH, min_periods=1).mean()
                axes.plot(line["rollouts"], smooth, label=arm_label(str(name)), linewidth=1.4, **look)
            axes.set(title=title, ylim=(-0.02, 1.02))
        if adapters:
            panels_of[0].legend(fontsize=6.5, frameon=True)
    for axes in grid[-1]:
        axes.set_xlabel(f"rollouts spent; means of {SMOOTH} updates", fontsize=8)
    sns.despine(figure)
    return figure


def kinds(results: Path) -> Figure:
    """Draw pass rates by kind of task for the base, the headline baselines and TRACE, with intervals."""
    table = evaluation_table(results / "evaluation", "kinds")
    methods = [method for method in HEADLINE if method in set(table["method"])]
    names = sorted(set(table["kind"].astype(str)))
    figure = Figure(figsize=(6.4, 1.2 + 0.5 * len(names)), layout="constrained")
    axes = figure.subplots()
    for index, method in enumerate(methods):
        colour = tint(method)
        rows = [row for row in table.dropna(subset=["pass_rate"]).to_dict("records") if row["method"] == method]
        places = [names.index(str(row["kind"])) + 0.2 * (index - (len(methods) - 1) / 2) for row in rows]
        for place, row in zip(places, rows, strict=True):
            axes.plot([row["low"], row["high"]], [place, place], color=colour, linewidth=1.6)
        legend_label = rows[0]["label"] if rows else method
        axes.plot([row["pass_rate"] for row in rows], places, "o", color=colour, markersize=5, label=legend_label)
    axes.set_yticks(range(len(names)), names)
    limits = {"xlim": (-0.02, 1.02), "ylim": (len(names) - 0.5, -0.5)}
    note = "pass rate on the test split; differences by kind are not tested"
    axes.set(title="Pass rate by task kind", xlabel=note, **limits)
    figure.legend(loc="outside lower center", ncols=len(methods), frameon=False)
    sns.despine(figure, left=True)
    return figure


def curve_rows(results: Path) -> Sequence[ComparisonRow]:
    """Read results/evaluation/curve.csv; empty if training was evaluated only at its end."""
    path, numbers = results / "evaluation/curve.csv", ("rollouts_spent", "pass_rate", "low", "high")
    if not path.exists():
        return []
    return read_table(path, columns=("method", "label"), numbers=numbers).to_dict("records")


def curve(results: Path) -> Figure:
    """Draw pass rate over rollouts spent at the checkpoints of one training, for TRACE and GRPO on the target."""
    by_method = grouped(curve_rows(results), "method")
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for method in ordered(by_method, HEADLINE):
        rows = by_method[method]
        draw_rates(axes, [row["rollouts_spent"] for row in rows], rows, color=tint(method), linewidth=1.4)
    axes.set(xlabel="rollouts spent, diagnosis and calibration among them", ylabel="pass rate on the test split")
    axes.set_title("One training at its checkpoints, with intervals over tasks", fontsize=9)
    axes.legend(frameon=True, fontsize=7.5)
    sns.despine(figure, left=True)
    return figure
