"""Figures of a finished run, drawn from `results/` alone: no model, no rollouts, no torch.

A fresh clone can redraw every figure from the small committed files, to the same bytes: nothing depends on time or on
the order of a directory, and files have no dates or program versions in their metadata. The title of each figure is
computed from the data. Published numbers are grey and have panels of their own, unless the same thing was measured.
scripts/study_figures.py draws figures of several runs; `captrain.reporting.style` is the style of both.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import HashableList

from captrain.capabilities import read_selection, replay
from captrain.comparison import (
    BASE,
    GRPO,
    TRACE,
    ComparisonRow,
    evaluation_metrics,
    evaluation_table,
    grouped,
    label,
    read_published,
    reference,
    versus,
)
from captrain.errors import UserError
from captrain.records import read_table
from captrain.reporting.causality import causal_rows, causality
from captrain.reporting.rediscovery import rediscovered, rediscovery
from captrain.reporting.style import (
    COLOURS,
    GREY,
    HEADLINE,
    LINES,
    MARKERS,
    MERGING,
    NARROW,
    PROJECT,
    ROUTING,
    ROW,
    SMALL,
    TEXT,
    WIDTH,
    Line,
    arm_label,
    best,
    body,
    compare,
    draw_rates,
    finish,
    ink,
    look_of,
    named,
    ordered,
    render,
    versus_words,
)
from captrain.run import repro

REQUIRED = (
    "evaluation/main.csv",
    "evaluation/differences.csv",
    "evaluation/kinds.csv",
    "evaluation/metrics.json",
    "capabilities/selection.json",
    "capabilities/stability.csv",
    "evaluation/training.csv",
)
SMOOTH = 5
"""Number of updates that a training curve is averaged over."""


def draw(results: Path, out: Path, width: float = WIDTH) -> list[Path]:
    """Draw every figure as PDF and PNG.

    Args:
        results: folder with one folder for each stage.
        out: folder for the figures; it is created if needed.
        width: width of each figure in inches.

    Returns:
        The files written.

    Raises:
        UserError: a result file is missing. The message names the stage that makes it.
    """
    for name in REQUIRED:
        if not (results / name).exists():
            folder = name.split("/")[0]
            stage = "comparison" if folder == "evaluation" else folder
            raise UserError(f"{results / name} is missing", f"run `{repro(stage, results.parent)}` to make it")
    figures: dict[str, Callable[[Path, float], Figure]] = {
        "main": partial(compared, name="main"),
        "capabilities": lambda results, width: capabilities(read_selection(results), width),
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
            "no capability was tested; `dvc repro causality` tests each one that has an adapter",
        ),
        "rediscovery": (
            rediscovered(results),
            "the agent was not diagnosed again; baselines.solutions does that",
        ),
        "curve": (
            curve_rows(results),
            "adapters were evaluated only after training; set curve.points to evaluate them earlier",
        ),
    }
    for name, (rows, reason) in optional.items():
        if not rows:
            del figures[name]
            print(f"figure {name} skipped: {reason}")
    return render({name: partial(make, results, width) for name, make in figures.items()}, out)


COMPARISONS: Mapping[str, Sequence[str] | None] = {"main": None, "routing": ROUTING, "merging": MERGING}
"""Figures that compare methods: the methods by name or prefix (None: all)."""


def compared(results: Path, width: float = WIDTH, *, name: str) -> Figure:
    """Draw the pass rates of methods with intervals and rollouts spent, and their differences to TRACE.

    Published rates are marked if they measure the same thing.
    """
    evaluation = results / "evaluation"
    differences = versus(evaluation_table(evaluation, "differences").to_dict("records"), TRACE)
    place, publication = reference(results)
    table = evaluation_table(evaluation, "main").dropna(subset=["pass_rate"])
    lines = {
        row["method"]: Line(
            row["method"],
            f"{row['label']} ({row['rollouts_spent']:,})",
            *(row["pass_rate"], row["low"], row["high"]),
            difference=differences.get(row["method"]),
            published=publication.get(row["method"]),
        )
        for row in table.to_dict("records")
    }
    rows = [lines[method] for method in ordered(lines, COMPARISONS[name])]
    confidence = f"{evaluation_metrics(evaluation).confidence:.0%}"
    notes = [f"In brackets: rollouts spent. 1 seed, {table['tasks'].max()} test tasks."]
    if publication:
        notes.append(f"Open diamonds: as published ({read_published().paper}; {place}); measured there, not here.")
    rate = f"pass rate, {confidence} interval over test tasks"
    return compare({"": rows}, TRACE, _compared_finding(rows), rate, " ".join(notes), width)


def _compared_finding(rows: Sequence[Line]) -> str:
    """Say which row is best, how it compares with TRACE, and how GRPO on the target does."""
    top = best(rows)
    words = {row.method: versus_words(row, TRACE) for row in rows if row is top or row.method == GRPO}
    first = f"{named(top.method)} passes most test tasks: {top.rate:.2f}"
    first += f", {words.pop(top.method)}" if words.get(top.method) else ""
    return "; ".join([first, *(f"{named(method)} passes {text}" for method, text in words.items() if text)])


def capabilities(selection: Mapping[str, Any], width: float = WIDTH) -> Figure:
    """Draw gap with interval and coverage of every candidate, beside the thresholds of the selection."""
    thresholds, candidates = selection["thresholds"], selection["candidates"]
    rows = sorted(
        candidates, key=lambda row: (row["selected"], row["gap"] or 0.0, row["coverage"] or 0.0), reverse=True
    )
    figure = Figure(figsize=(width, 1.5 + 1.3 * ROW * max(len(rows), 1)), layout="constrained")
    gaps, coverages = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for place, row in enumerate(rows):
        look = {"color": PROJECT if row["selected"] else GREY, "marker": "o" if row["selected"] else "X"}
        if None not in (row["gap_low"], row["gap_high"]):
            gaps.plot([row["gap_low"], row["gap_high"]], [place, place], color=look["color"], linewidth=1.4)
        for axes, value in ((gaps, row["gap"]), (coverages, row["coverage"])):
            if value is not None:
                axes.plot(value, place, markersize=5, **look)
    for axes, limit in ((gaps, "delta"), (coverages, "coverage")):
        axes.axvline(thresholds[limit], color="0.2", linestyle="--", linewidth=1)
    gaps.set_yticks(range(len(rows)), [row["name"] for row in rows])
    gaps.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    gaps.set_xlabel(textwrap.fill("gap: error rate of failed minus passed rollouts", int(6 * width)))
    coverages.set_xlabel(textwrap.fill("coverage: share of failed rollouts that lack it", int(4 * width)))
    selected = [row["name"] for row in rows if row["selected"]]
    finding = f"{len(selected)} of {len(rows)} candidates are selected" + (
        f": {', '.join(selected)}" if selected else ""
    )
    note = "Circles: selected; crosses: rejected; dashed: least gap and coverage."
    undefined = sum(row["gap"] is None for row in rows)
    return finish(figure, finding, f"{note} {undefined} with undefined gap." if undefined else note)


def stability(results: Path, width: float = WIDTH) -> Figure:
    """Draw the retention, coverage and gap of each candidate over labelling runs, and the retention in the paper."""
    selection, runs = read_selection(results), read_table(results / "capabilities/stability.csv")
    limits = selection["thresholds"]
    candidates = sorted(selection["candidates"], key=lambda row: -row["runs_retained"])
    publication = read_published()
    times = publication.selection.times
    beside: list[HashableList[str]] = [["kept", "coverage", "gap", "paper"]]
    below: list[HashableList[str]] = [["kept", "coverage", "gap"], ["paper"] * 3]
    mosaic = beside if width >= NARROW else below
    heights = [1.9 + 0.2 * max(len(candidates), len(times))] * len(mosaic)
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    axes_of = figure.subplot_mosaic(mosaic)
    kept = axes_of["kept"]
    for place, candidate in enumerate(candidates):
        shade = PROJECT if candidate["selected"] else GREY
        kept.barh(place, candidate["runs_retained"], color=shade, height=0.6)
        runs_of = runs[runs["capability"] == candidate["id"]]
        # Spread the runs, so that equal values do not hide each other.
        heights = place + np.linspace(-0.28, 0.28, len(runs_of)) if len(runs_of) > 1 else [place] * len(runs_of)
        for name in ("coverage", "gap"):
            marker = "o" if candidate["selected"] else "x"
            axes_of[name].plot(runs_of[name], heights, marker, markersize=2.5, color=shade)
    count = candidates[0]["runs"] if candidates else 0
    for name, limit in (("kept", "agreement"), ("coverage", "coverage"), ("gap", "delta")):
        axes = axes_of[name]
        axes.axvline(limits[limit], color="0.2", linestyle="--", linewidth=1)
        axes.set_ylim(max(len(candidates), 1) - 0.5, -0.5)
        axes.set_yticks(range(len(candidates)), [candidate["name"] for candidate in candidates])
        axes.tick_params(labelleft=name == "kept")
        axes.set_xlabel(f"runs of {count}\nthat keep it" if name == "kept" else f"{name}\nin each run")
        axes.xaxis.set_major_locator(MaxNLocator(3, integer=name == "kept"))
    # The last panel shows the selection of the paper.
    axes = axes_of["paper"]
    axes.barh(range(len(times)), list(times.values()), height=0.6, facecolor="none", edgecolor=GREY)
    axes.axvline(publication.selection.needed, color=GREY, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(times)), list(times), color=GREY)
    axes.set_ylim(len(times) - 0.5, -0.5)
    axes.set_xlabel(f"runs of {publication.selection.runs}\nthat keep it", color=GREY)
    axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.set_title("as published", color=GREY)
    often = sum(candidate["runs_retained"] >= limits["agreement"] for candidate in candidates)
    finding = (
        f"{often} of {len(candidates)} candidates are kept in at least {limits['agreement']} of {count} labelling runs"
    )
    note = (
        f"Dashed: thresholds. Outlines: {publication.paper}; {publication.selection.source}: another model, other "
        "benchmarks."
    )
    return finish(figure, finding, note)


def thresholds(results: Path, width: float = WIDTH) -> Figure:
    """Draw the selected capabilities over a grid of thresholds, replayed from the account of the selection."""
    selection = read_selection(results)
    limits, candidates = selection["thresholds"], selection["candidates"]
    deltas, coverages = [step / 10 for step in range(1, 10)], [step / 20 for step in range(1, 9)]
    cells = {(d, c): replay(selection, d, c) for d in deltas for c in coverages}
    numbers = {candidate["id"]: place for place, candidate in enumerate(candidates, start=1)}
    occurring = [candidate for candidate in candidates if any(candidate["id"] in cell for cell in cells.values())]
    figure = Figure(figsize=(width, 3.9), layout="constrained")
    axes = figure.subplots()
    counts = np.array([[len(cells[d, c]) for d in deltas] for c in coverages])
    colours = sns.light_palette(PROJECT, as_cmap=True)
    axes.imshow(counts, cmap=colours, origin="lower", aspect="auto", vmin=0, vmax=max(counts.max(), 1))
    for (d, c), cell in cells.items():
        chosen = sorted(numbers[slug] for slug in cell)
        text = str(len(cell)) if width < NARROW else " ".join(map(str, chosen)) or "-"
        configured = (d, c) == (limits["delta"], limits["coverage"])
        shade = ink(*colours(len(cell) / max(counts.max(), 1))[:3])
        look = {"fontsize": TEXT if configured else SMALL, "fontweight": "bold" if configured else "normal"}
        place = deltas.index(d), coverages.index(c)
        axes.text(*place, text, ha="center", va="center", color=shade, **look)
    axes.set_xticks(range(len(deltas)), [f"{delta:g}" for delta in deltas])
    axes.set_yticks(range(len(coverages)), [f"{coverage:g}" for coverage in coverages])
    axes.grid(visible=False)
    axes.set(xlabel="delta: least gap", ylabel="least coverage")
    chosen = {candidate["id"] for candidate in candidates if candidate["selected"]}
    same = sum({*cell} == chosen for cell in cells.values())
    finding = f"{same} of {len(cells)} pairs of thresholds select the same {len(chosen)} capabilities as the run"
    legend = ", ".join(f"{numbers[candidate['id']]} {candidate['name']}" for candidate in occurring)
    told = "Number of selected capabilities" if width < NARROW else f"Selected: {legend or 'nothing anywhere'}"
    return finish(figure, finding, f"{told}. Bold: the thresholds of the run.")


def training(results: Path, width: float = WIDTH) -> Figure:
    """Draw reward, success and the share of informative groups over rollouts spent, a line for each adapter.

    The first row has TRACE's adapters and GRPO on the target, the second those of the other trained baselines.
    """
    table = evaluation_table(results / "evaluation", "training")
    stages = table.groupby("stage", sort=False)
    lines = {str(stage): list(updates.groupby("adapter", sort=False)) for stage, updates in stages}
    own, grpo = lines.pop("adapters", []), lines.pop(GRPO, [])
    further = [line for adapters in lines.values() for line in adapters]
    rows = [adapters for adapters in (own + grpo, further) if adapters] or [own + grpo]
    panels = {"reward": "mean reward", "success": "success rate", "informative": "share of informative groups"}
    wide = width >= NARROW
    figure = Figure(figsize=(width, 0.9 + (2.6 if wide else 6.2) * len(rows)), layout="constrained")
    parts = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
    for part, adapters in zip(parts, rows, strict=True):
        grid = part.subplots(*((1, 3) if wide else (3, 1)), sharex=True, sharey=True)
        for axes, (column, title) in zip(grid, panels.items(), strict=True):
            for place, (name, line) in enumerate(adapters):
                shade, dash = COLOURS[place % len(COLOURS)], LINES[place % len(LINES)]
                look = look_of(GRPO)._asdict() if name == GRPO else {"color": shade, "linestyle": dash}
                look["marker"] = MARKERS[place % len(MARKERS)]
                smooth = line[column].rolling(SMOOTH, min_periods=1).mean()
                look |= {"linewidth": 1.3, "markersize": 3.5, "markevery": max(len(line) // 6, 1)}
                axes.plot(line["rollouts"], smooth, label=arm_label(str(name)), **look)
            axes.set(title=title, ylim=(-0.02, 1.02))
        for axes in grid if wide else grid[-1:]:
            axes.set_xlabel("rollouts spent")
        if adapters:
            handles, labels = grid[0].get_legend_handles_labels()
            part.legend(handles, labels, loc="outside lower center", ncols=5 if wide else 2)
    return finish(figure, _training_finding(own, grpo), f"Means of {SMOOTH} updates. 1 seed.", left=False)


def _training_finding(own: Sequence[tuple[object, pd.DataFrame]], grpo: Sequence[tuple[object, pd.DataFrame]]) -> str:
    """Say how far the success rates rose from the first updates to the last."""
    ends = [(line["success"].head(SMOOTH).mean(), line["success"].tail(SMOOTH).mean()) for _, line in (*own, *grpo)]
    if not own or not ends:
        return "No adapter was trained"
    risen = sum(last > first for first, last in ends[: len(own)])
    lasts = [last for _, last in ends[: len(own)]]
    end = f"; {label(GRPO)} ends at {ends[-1][1]:.2f}" if grpo else ""
    return (
        f"Success rises for {risen} of {len(own)} adapters in their environments, to {min(lasts):.2f} to "
        f"{max(lasts):.2f}{end}"
    )


def kinds(results: Path, width: float = WIDTH) -> Figure:
    """Draw pass rates by kind of task for the base, the headline baselines and TRACE, with intervals."""
    table = evaluation_table(results / "evaluation", "kinds").dropna(subset=["pass_rate"]).astype({"kind": str})
    methods = [method for method in HEADLINE if method in set(table["method"])]
    rates = table.pivot(index="kind", columns="method", values="pass_rate")
    names = list(rates.sort_values([TRACE, BASE], ascending=False).index) if len(rates) else []
    figure = Figure(figsize=(width, 1.4 + 0.48 * len(names)), layout="constrained")
    part = body(figure)
    axes = part.subplots()
    for index, method in enumerate(methods):
        look = look_of(method)
        rows = [row for row in table.to_dict("records") if row["method"] == method]
        places = [names.index(row["kind"]) + 0.2 * (index - (len(methods) - 1) / 2) for row in rows]
        axes.hlines(places, [row["low"] for row in rows], [row["high"] for row in rows], look.color, linewidth=1.5)
        points = [row["pass_rate"] for row in rows]
        axes.plot(points, places, look.marker, color=look.color, markersize=5, label=label(method))
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(-0.02, 1.02), ylim=(len(names) - 0.5, -0.5), xlabel="pass rate on the test split")
    part.legend(loc="outside lower center", ncols=len(methods) if width >= NARROW else 2)
    over = [f"the base in {np.sum(rates[TRACE] > rates[BASE])}"] if {TRACE, BASE} <= {*methods} else []
    over += [f"{label(GRPO)} in {np.sum(rates[TRACE] > rates[GRPO])}"] if {TRACE, GRPO} <= {*methods} else []
    finding = (
        f"Of {len(names)} kinds of task, {label(TRACE)} passes more than {' and '.join(over) or 'no other row in 0'}"
    )
    return finish(figure, finding, "Differences by kind are not tested. 1 seed.")


def curve_rows(results: Path) -> Sequence[ComparisonRow]:
    """Read results/evaluation/curve.csv; empty if training was evaluated only at its end."""
    path, numbers = results / "evaluation/curve.csv", ("rollouts_spent", "pass_rate", "low", "high")
    if not path.exists():
        return []
    return read_table(path, columns=("method", "label"), numbers=numbers).to_dict("records")


def curve(results: Path, width: float = WIDTH) -> Figure:
    """Draw pass rate over rollouts spent at the checkpoints of one training, for TRACE and GRPO on the target."""
    by_method = grouped(curve_rows(results), "method")
    figure = Figure(figsize=(width, 3.6), layout="constrained")
    part = body(figure)
    axes = part.subplots()
    ends = []
    for method in ordered(by_method, HEADLINE):
        rows = by_method[method]
        draw_rates(axes, [row["rollouts_spent"] for row in rows], rows, look_of(method))
        last = max(rows, key=lambda row: row["rollouts_spent"])
        ends.append(f"{last['label']} {last['pass_rate']:.2f}")
    axes.set(xlabel="rollouts spent, with diagnosis and calibration", ylabel="pass rate on the test split")
    part.legend(loc="outside lower center", ncols=2)
    return finish(figure, f"Pass rate at the end of training: {', '.join(ends)}", "1 seed; intervals over tasks.")
