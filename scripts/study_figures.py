"""Figures of several runs: over seeds, task mixes, and the settings of a study.

Drawn only from the committed tables of `make replicate` and `captrain-sweep`, into results/studies/. They are not part
of a run's own figures, because a run must not depend on other runs. If a table is missing, a line says how to make it.
Published curves have grey panels of their own: they come from another model on other benchmarks, and nothing here is
computed from them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from captrain.comparison import (
    BASE,
    CONFIDENCE,
    GRPO,
    TRACE,
    ComparisonRow,
    Difference,
    differences_over_seeds,
    grouped,
    headline_methods,
    label,
    rates_over_seeds,
    read_published,
    versus,
)
from captrain.records import read_table
from captrain.reporting import style

REPLICATES = ("replicates/summary.csv", "replicates/differences.csv")
REPLICATE = 'make replicate OVERRIDES="methods=all"'
HEADLINE_REPLICATES = ("replicates/headline/summary.csv", "replicates/headline/differences.csv")
SMOLLM_REPLICATES = ("replicates/smollm/summary.csv",)
DOMAIN_REPLICATES = ("replicates/domains/summary.csv", "replicates/domains/differences.csv")
FRONT = (BASE, GRPO, "rejection_sft", TRACE, "solutions_routed", "solutions_grpo")
"""Rows of the headline figure, top to bottom."""
TRACE_ROWS = (TRACE, "solutions_routed", "solutions_grpo")
OVER_SEEDS = f"mean over seeds, with {CONFIDENCE:.0%} t interval"


class Study(NamedTuple):
    """One figure: its tables, how to make them, and how to draw it.

    `settings` are those that a sweep varies beside the seed, or `methods` of which one must have been played. Both may
    be empty.
    """

    tables: tuple[str, ...]
    command: str
    draw: Callable[..., Figure]
    settings: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()


def draw(results: Path, out: Path, names: Collection[str] = ()) -> list[Path]:
    """Draw each figure whose tables exist, as PDF and PNG; for the others, say how to make their tables.

    Args:
        results: folder of the results.
        out: folder for the figures, made if needed.
        names: figures of `STUDIES` to draw; empty for all.

    Returns:
        The files written.
    """
    figures: dict[str, Callable[[], Figure]] = {}
    for name in names or STUDIES:
        study = STUDIES[name]
        paths = [results / table for table in study.tables]
        missing = [path for path in paths if not path.exists()]
        # An empty cell means that nothing was selected.
        blanks = {"selected": "", "reading": "", "learns_from": ""}
        tables = [] if missing else [read_table(path).fillna(blanks).to_dict("records") for path in paths]
        reason = f"there is no {missing[0]}" if missing else _unfit(study, tables[0])
        if reason:
            print(f"{name}: not drawn, for {reason}; `{study.command}` makes what it needs")
        else:
            figures[name] = partial(study.draw, *tables)
    return style.render(figures, out) if figures else []


def _unfit(study: Study, rows: Sequence[ComparisonRow]) -> str:
    """Return why a figure cannot be drawn from a table, or ""."""
    if study.methods and not style.ordered(grouped(rows, "method"), study.methods):
        return f"{study.tables[0]} has no method {study.methods[0]}..."
    if study.settings:
        columns = list(rows[0])
        varying = {name for name in columns[: columns.index("point")] if len(grouped(rows, name)) > 1} - {"seed"}
        if not {*study.settings} <= {*columns} or not varying <= {*study.settings}:
            return f"{study.tables[0]} varies other settings than {' and '.join(study.settings)} and the seed"
    return ""


def headline(rates: Sequence[ComparisonRow]) -> Figure:
    """Draw the rows that answer "is it worth it?" on the first task mix, TRACE's best row in the project's colour.

    Each bar is the mean pass rate over seeds with its t interval, beside the number of rollouts.
    """
    experiment, group = next(iter(grouped(rates, "experiment").items()))
    by_method = {row["method"]: row for row in group}
    rows = [by_method[name] for name in FRONT if name in by_method]
    best = max((row for row in rows if row["method"] in TRACE_ROWS), key=lambda row: row["pass_rate"])
    pale = {name: style.PROJECT_PALE for name in TRACE_ROWS}
    shades = [style.PROJECT if row is best else pale.get(row["method"], "0.72") for row in rows]
    rate, places = [row["pass_rate"] for row in rows], range(len(rows))
    error = [[row["pass_rate"] - row["low"] for row in rows], [row["high"] - row["pass_rate"] for row in rows]]
    figure = Figure(figsize=(8.8, 0.9 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.barh(places, rate, height=0.68, color=shades, xerr=error, error_kw={"ecolor": "0.25", "elinewidth": 1.1})
    axes.set_yticks(places, [row["label"] for row in rows])
    for place, row in enumerate(rows):
        bold: dict[str, Any] = {"fontweight": "bold", "color": style.PROJECT} if row is best else {"color": "0.2"}
        cost = f"{row['rollouts_spent']:,.0f}" + (f", {row['learns_from']}" if row["learns_from"] else "")
        axes.text(0.01, place, f"{row['pass_rate']:.2f}", va="center", color="white", fontweight="bold")
        axes.text(1.02, place, cost, va="center", transform=axes.get_yaxis_transform(), **bold)
        if row is best:
            axes.get_yticklabels()[place].set(**bold)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    seeds = max(row["seeds"] for row in rows)
    axes.set_title(f"Pass rate on the test split ({experiment}, {seeds} seeds)", loc="left", fontsize=10)
    axes.set_title("rollouts spent, learns from", loc="right", x=1.38, fontsize=8, color="0.35")
    axes.set_xlabel(OVER_SEEDS, fontsize=8)
    sns.despine(figure, left=True)
    return figure


def over_experiments(
    rates: Sequence[ComparisonRow],
    differences: Sequence[ComparisonRow],
    order: Sequence[str],
    against: str,
    title: str,
) -> Figure:
    """Draw all methods on every task mix (mean over seeds) and their differences to one method.

    Args:
        rates: rows of a summary.
        differences: rows of its differences.
        order: the methods, by name or prefix.
        against: the method that the others are compared with.
        title: of the figure.
    """
    by_experiment, groups = grouped(differences, "experiment"), dict[str, list[style.Line]]()
    for experiment, rows in grouped(rates, "experiment").items():
        differences_of, most = versus(by_experiment.get(experiment, []), against), max(row["seeds"] for row in rows)
        lines = {}
        for row in rows:
            name, seeds = row["method"], row["seeds"]
            # Means over different seeds must not be compared.
            text = row["label"] if seeds == most else f"{row['label']} ({seeds} seed{'s' * (seeds > 1)} of {most})"
            lines[name] = style.Line(name, text, row["pass_rate"], row["low"], row["high"], differences_of.get(name))
        heading = f"{experiment} ({most} {'seed' if most == 1 else 'seeds'})"
        groups[heading] = [lines[name] for name in style.ordered(lines, order)]
    return style.compare(groups, against, title, f"pass rate: {OVER_SEEDS}")


def scaling(points: Sequence[ComparisonRow], setting: str, axis_label: str, curves: Sequence[str]) -> Figure:
    """Draw pass rate over a setting, above the differences; published curves have a column of their own."""
    headline = [row for row in points if row["method"] in style.HEADLINE]
    totals = grouped((row for row in headline if row["method"] == TRACE), setting)
    totals_at = {value: float(np.mean([row["rollouts_spent"] for row in totals[value]])) for value in sorted(totals)}
    by_rollouts = setting == "adapters.rollouts"
    places = totals_at if by_rollouts else {value: value for value in totals_at}
    figure = Figure(figsize=(10.4, 3.8 + 0.24 * len(totals_at)), layout="constrained")
    mosaic: Any = [["ours", curves[0]], ["held", curves[-1]]]
    panels = figure.subplot_mosaic(mosaic, width_ratios=(3, 2), height_ratios=(8, 3 + len(totals_at)))
    top, bottom = panels["ours"], panels["held"]
    _lines(top, headline, setting, places)
    ticks = [f"{total:,.0f}" if by_rollouts else f"{value}\n({total:,.0f})" for value, total in totals_at.items()]
    top.set_xticks(list(places.values()), ticks)
    top.set_xlabel(axis_label if by_rollouts else f"{axis_label} (rollouts spent)")
    top.set_ylabel("pass rate")
    top.set_title(f"Measured here: {_over(headline)}", loc="left")
    top.legend(frameon=True, fontsize=7.5)
    differences = _differences_at(headline, setting)
    style.rule(bottom, [f"{totals_at[value]:,.0f} rollouts" for value in differences])
    style.draw_differences(bottom, dict(enumerate(differences.values())), [style.tint(TRACE)] * len(differences))
    bottom.set_xlabel(f"{label(TRACE)} minus {label(GRPO)}, paired", fontsize=8)
    bottom.xaxis.set_major_locator(MaxNLocator(5))
    for name in curves:
        _published(panels[name], name)
    publication = read_published()
    note = f"Grey: {publication.paper}; {publication.curves[curves[0]].source}: another model, other benchmarks."
    figure.supxlabel(note, fontsize=7.5, color=style.GREY)
    sns.despine(figure, left=True)
    return figure


def _differences_at(points: Sequence[ComparisonRow], setting: str) -> dict[Any, Difference]:
    """Return TRACE's difference to GRPO on the target at each value of a setting, over seeds, or over tasks for one
    seed."""
    if _seeds(points) > 1:
        differences = grouped(differences_over_seeds(points, setting), setting)
        by_value = {value: versus(differences[value], GRPO).get(TRACE) for value in sorted(differences)}
        return {value: difference for value, difference in by_value.items() if difference}
    rows = sorted((row for row in points if row["method"] == TRACE), key=lambda row: row[setting])
    columns = ("over_grpo", "over_low", "over_high", "reading")
    return {
        row[setting]: Difference(*(row[name] for name in columns))
        for row in rows
        if row["over_grpo"] == row["over_grpo"]
    }


def _lines(axes: Axes, points: Sequence[ComparisonRow], setting: str, places: Mapping[Any, float]) -> None:
    """Draw the main methods' pass rates at each value of a setting, with intervals over tasks for one seed."""
    rates = grouped(rates_over_seeds(points, setting) if _seeds(points) > 1 else points, "method")
    methods, apart = style.ordered(rates, style.HEADLINE), 0.012 * (max(places.values()) - min(places.values()))
    for place, method in enumerate(methods):
        aside = apart * (place - (len(methods) - 1) / 2)  # keeps the intervals apart
        rows = sorted(rates[method], key=lambda row: row[setting])
        style.draw_rates(
            axes, [places[row[setting]] + aside for row in rows], rows, color=style.tint(method), linewidth=1.4
        )


def _seeds(points: Sequence[ComparisonRow]) -> int:
    return len(grouped(points, "seed"))


def _over(points: Sequence[ComparisonRow]) -> str:
    """Say what the intervals of a study are over."""
    return OVER_SEEDS if _seeds(points) > 1 else "one seed, with its interval over tasks"


def _published(axes: Axes, name: str) -> None:
    """Draw a published curve in its own unit, for reference; nothing of it was measured here."""
    publication = read_published()
    curve = publication.curves[name]
    marks = {GRPO: "s", "gepa": "^", TRACE: "D"}
    for method, points in curve.lines.items():
        axes.plot(
            list(points),
            list(points.values()),
            color=style.GREY,
            linestyle=":",
            linewidth=1,
            marker=marks[method],
            markerfacecolor="none",
            markersize=5,
            label=label(method),
        )
    axes.set_title(f"As published: {publication.tables[curve.table].title}", loc="left", fontsize=8, color=style.GREY)
    axes.set_xlabel(curve.over, fontsize=7.5, color=style.GREY)
    axes.tick_params(colors=style.GREY, labelsize=7)
    axes.legend(frameon=True, fontsize=7)


def thresholds(points: Sequence[ComparisonRow]) -> Figure:
    """Draw pass rate over the gap's threshold, one panel per coverage threshold, with the number of selected
    capabilities and TRACE's difference to GRPO on the target."""
    coverages, deltas = (sorted(grouped(points, f"selection.{name}")) for name in ("coverage", "delta"))
    places = {delta: float(place) for place, delta in enumerate(deltas)}
    figure = Figure(figsize=(1.2 + 2.9 * len(coverages), 4.6), layout="constrained")
    grid = figure.subplots(1, len(coverages), sharey=True, squeeze=False)[0]
    for axes, coverage in zip(grid, coverages, strict=True):
        headline = [row for row in points if row["selection.coverage"] == coverage and row["method"] in style.HEADLINE]
        by_delta = grouped(headline, "selection.delta")
        _lines(axes, headline, "selection.delta", places)
        for delta, difference in _differences_at(headline, "selection.delta").items():
            look = {"fontsize": 6.5, "rotation": 90, "ha": "right", "va": "bottom", "color": "0.35"}
            axes.text(
                places[delta] - 0.04,
                0.02,
                difference.reading.replace(" after", "\nafter"),
                transform=axes.get_xaxis_transform(),
                **look,
            )
        # Number of selected capabilities, for each seed where seeds differ.
        counts = [sorted({len(row["selected"].split()) for row in by_delta.get(delta, [])}) for delta in deltas]
        ticks = [f"{delta:g}\n{'/'.join(map(str, numbers))}" for delta, numbers in zip(deltas, counts, strict=True)]
        axes.set_xticks(list(places.values()), ticks, fontsize=7.5)
        axes.set_title(f"least coverage {coverage:g}", loc="left", fontsize=9)
        axes.margins(x=0.12)
        axes.set_xlabel("delta, and how many are selected", fontsize=8)
    low, high = grid[0].get_ylim()
    grid[0].set_ylim(low - 0.45 * (high - low), high)  # space for the text
    grid[0].set_ylabel(f"pass rate: {_over(points)}", fontsize=8)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    title = f"Thresholds of the selection; upright: {label(TRACE)} against {label(GRPO)}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    sns.despine(figure)
    return figure


def faults(points: Sequence[ComparisonRow]) -> Figure:
    """Draw pass rates of rows that learn from solutions over the share of faulty solutions, with GRPO on the target."""
    rate, kind = "baselines.solutions.faults.rate", "baselines.solutions.faults.kind"
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    styles = {"random": "C0o-", "systematic": "C2s--"}
    for name, rows in grouped((row for row in points if row["method"] == "solutions"), kind).items():
        ranked = sorted(rows, key=lambda row: row[rate])
        style.draw_rates(axes, [row[rate] for row in ranked], ranked, styles[name], label=f"{name} faults")
    for row in [row for row in points if row["method"] == GRPO][:1]:
        axes.axhline(row["pass_rate"], color=style.tint(GRPO), linewidth=1.2, label=row["label"])
    axes.set_xlabel("share of solutions with a fault, none of them left out")
    axes.set_ylabel("pass rate")
    axes.set_title(f"How good solutions must be: {_over(points)}", loc="left")
    axes.legend(frameon=True, fontsize=7.5)
    sns.despine(figure, left=True)
    return figure


METHODS = partial(over_experiments, order=headline_methods(), against=GRPO, title="Methods over seeds, by task mix")
ROUTING = partial(over_experiments, order=style.ROUTING, against=TRACE, title="Routing over seeds, by task mix")
MERGING = partial(over_experiments, order=style.MERGING, against=TRACE, title="Merging over seeds, by task mix")
ROLLOUTS = partial(
    scaling,
    setting="adapters.rollouts",
    axis_label="rollouts spent",
    curves=("tau2_rollouts", "toolsandbox_rollouts"),
)
CAPABILITIES = partial(
    scaling,
    setting="capabilities.count",
    axis_label="capabilities kept at most",
    curves=("tau2_capabilities",),
)
PROMPTS = partial(
    scaling,
    setting="baselines.gepa.prompts",
    axis_label="prompts of GEPA at most",
    curves=("tau2_capabilities",),
)
STUDIES: Mapping[str, Study] = {
    "headline": Study(HEADLINE_REPLICATES[:1], "make replicate NAME=headline", headline),
    "smollm": Study(SMOLLM_REPLICATES, "make replicate NAME=smollm EXPERIMENTS=smollm", headline),
    "replicates": Study(REPLICATES, REPLICATE, METHODS),
    "replicates_headline": Study(HEADLINE_REPLICATES, "make replicate NAME=headline", METHODS),
    "replicates_domains": Study(DOMAIN_REPLICATES, "make domains", METHODS),
    "routing": Study(REPLICATES, REPLICATE, ROUTING, methods=("router:",)),
    "merging": Study(REPLICATES, REPLICATE, MERGING, methods=("merged:",)),
    "scaling_rollouts": Study(
        ("sweeps/rollouts.csv",), "captrain-sweep -m +study=rollouts", ROLLOUTS, ("adapters.rollouts",)
    ),
    "scaling_capabilities": Study(
        ("sweeps/capabilities.csv",), "captrain-sweep -m +study=capabilities", CAPABILITIES, ("capabilities.count",)
    ),
    "scaling_prompts": Study(
        ("sweeps/prompts.csv",), "captrain-sweep -m +study=prompts", PROMPTS, ("baselines.gepa.prompts",)
    ),
    "scaling_rollouts_paper": Study(
        ("sweeps/paper_rollouts.csv",), "captrain-sweep -m +study=paper_rollouts", ROLLOUTS, ("adapters.rollouts",)
    ),
    "thresholds": Study(
        ("sweeps/thresholds.csv",),
        "captrain-sweep -m +study=thresholds",
        thresholds,
        ("selection.coverage", "selection.delta"),
    ),
    "faults": Study(
        ("sweeps/faults.csv",),
        "captrain-sweep -m +study=faults",
        faults,
        ("baselines.solutions.faults.kind", "baselines.solutions.faults.rate"),
    ),
}
