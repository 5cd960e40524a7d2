"""Figures of several runs: over seeds, task mixes, and the settings of a study.

Drawn only from the committed tables of `make replicate` and `captrain-sweep`, into results/studies/. They are not part
of a run's own figures, because a run must not depend on other runs. If a table is missing, a line says how to make it.
Published curves have grey panels of their own: they come from another model on other benchmarks, and nothing here is
computed from them.
"""

import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import HashableList

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
from captrain.reporting import DIFFERS, VERDICTS, style

REPLICATES = ("replicates/summary.csv", "replicates/differences.csv")
REPLICATE = 'make replicate OVERRIDES="methods=all"'
HEADLINE_REPLICATES = ("replicates/headline/summary.csv", "replicates/headline/differences.csv")
SMOLLM_REPLICATES = ("replicates/smollm/summary.csv", "replicates/smollm/differences.csv")
MIXTURE_REPLICATES = ("replicates/mixture/summary.csv", "replicates/mixture/differences.csv")
DOMAIN_REPLICATES = ("replicates/domains/summary.csv", "replicates/domains/differences.csv")
FRONT = (BASE, GRPO, "rejection_sft", TRACE, "solutions_routed", "solutions_grpo")
"""Rows of the headline figure."""
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


def draw(results: Path, out: Path, names: Collection[str] = (), width: float = style.WIDTH) -> list[Path]:
    """Draw each figure whose tables exist, as PDF and PNG; for the others, say how to make their tables.

    Args:
        results: folder of the results.
        out: folder for the figures, made if needed.
        names: figures of `STUDIES` to draw; empty for all.
        width: of each figure in inches.

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
            figures[name] = partial(study.draw, *tables, width=width)
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


def headline(
    rates: Sequence[ComparisonRow], differences: Sequence[ComparisonRow], width: float = style.WIDTH
) -> Figure:
    """Draw the rows that answer "is it worth it?" on the first task mix, TRACE's rows in the project's colour.

    Each bar is the mean pass rate over seeds with its t interval, beside the number of rollouts.
    """
    experiment, group = next(iter(grouped(rates, "experiment").items()))
    rows = sorted((row for row in group if row["method"] in FRONT), key=lambda row: -row["pass_rate"])
    rate, places = np.array([row["pass_rate"] for row in rows]), range(len(rows))
    lows, highs = (np.clip([row[end] for row in rows], 0, 1) for end in ("low", "high"))
    error = [np.maximum(rate - lows, 0), np.maximum(highs - rate, 0)]
    figure = Figure(figsize=(width, 1.2 + 0.32 * len(rows)), layout="constrained")
    axes = figure.subplots()
    shades = [style.PROJECT if row["method"] in TRACE_ROWS else style.GREY for row in rows]
    axes.barh(places, rate, height=0.68, color=shades, xerr=error, error_kw={"ecolor": "0.1", "elinewidth": 1.3})
    labels = [row["label"] if width >= style.NARROW else textwrap.fill(row["label"], 22) for row in rows]
    axes.set_yticks(places, labels)
    for place, row in enumerate(rows):
        axes.text(0.01, place, f"{row['pass_rate']:.2f}", va="center", color="white", fontweight="bold")
        cost = f"{row['rollouts_spent']:,.0f}"
        if width >= style.NARROW and row["learns_from"]:
            cost += f", {row['learns_from']}"
        weight = "bold" if place == 0 else "normal"
        axes.text(1.02, place, cost, va="center", fontweight=weight, transform=axes.get_yaxis_transform())
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.set(
        xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5), xlabel=textwrap.fill(f"pass rate: {OVER_SEEDS}", int(8 * width))
    )
    axes.grid(visible=False, axis="y")
    top = style.Line(*(rows[0][name] for name in ("method", "label", "pass_rate", "low", "high")))
    compared = versus((row for row in differences if row["experiment"] == experiment), GRPO)
    words = style.versus_words(replace(top, difference=compared.get(top.method)), GRPO)
    finding = f"{style.named(top.method)} passes {top.rate:.2f} of the test tasks" + (f", {words}" if words else "")
    note = f"{experiment}, {max(row['seeds'] for row in rows)} seeds. On the right: rollouts spent"
    return style.finish(
        figure, finding, f"{note}, and what a row learns from." if width >= style.NARROW else f"{note}."
    )


def over_experiments(
    rates: Sequence[ComparisonRow],
    differences: Sequence[ComparisonRow],
    order: Sequence[str],
    against: str,
    subject: str = "",
    width: float = style.WIDTH,
) -> Figure:
    """Draw all methods on every task mix (mean over seeds) and their differences to one method.

    Args:
        rates: rows of a summary.
        differences: rows of its differences.
        order: the methods, by name or prefix.
        against: the method that the others are compared with.
        subject: the method whose comparison the title sums up; "" for the best row of each mix.
        width: of the figure in inches.
    """
    by_experiment, groups = grouped(differences, "experiment"), dict[str, list[style.Line]]()
    compared: list[Difference] = []
    for experiment, rows in grouped(rates, "experiment").items():
        differences_of, most = versus(by_experiment.get(experiment, []), against), max(row["seeds"] for row in rows)
        lines = {}
        for row in rows:
            name, seeds = row["method"], row["seeds"]
            # Means over different seeds must not be compared.
            text = row["label"] if seeds == most else f"{row['label']} ({seeds} seed{'s' * (seeds > 1)} of {most})"
            lines[name] = style.Line(name, text, row["pass_rate"], row["low"], row["high"], differences_of.get(name))
        chosen = [lines[name] for name in style.ordered(lines, order)]
        top = style.best(chosen)
        seeds = f"{most} {'seed' if most == 1 else 'seeds'}"
        groups[f"{experiment}, {seeds}: {style.named(top.method)} passes most ({top.rate:.2f})"] = chosen
        others = [line for line in chosen if line.method != against and line.difference]
        judged = lines.get(subject) if subject else style.best(others) if others else None
        compared += [judged.difference] if judged and judged.difference else []
    finding = _tally(compared, style.named(subject) if subject else "the best other row", against, "task mixes")
    return style.compare(groups, against, finding, f"pass rate: {OVER_SEEDS}", width=width)


def _tally(differences: Collection[Difference], subject: str, against: str, what: str) -> str:
    """Count in how many task mixes or settings one method passes more than another."""
    reliable = [difference.mean for difference in differences if VERDICTS.get(difference.reading) == DIFFERS]
    names, total = (subject, style.named(against)), len(differences)
    counts = sum(mean > 0 for mean in reliable), sum(mean < 0 for mean in reliable)
    parts = [
        f"{names[place]} passes more than {names[1 - place]} in {count} of {total} {what}"
        for place, count in enumerate(counts)
        if count
    ]
    if not parts:
        return f"No reliable difference between {names[0]} and {names[1]} in {total} {what}"
    same = total - len(reliable)
    text = "; ".join([*parts, *[f"no reliable difference in {same}"] * bool(same)])
    return text[0].upper() + text[1:]


def scaling(
    points: Sequence[ComparisonRow], setting: str, axis_label: str, curves: Sequence[str], width: float = style.WIDTH
) -> Figure:
    """Draw pass rate over a setting, above the differences; published curves have panels of their own."""
    headline = [row for row in points if row["method"] in style.HEADLINE]
    totals = grouped((row for row in headline if row["method"] == TRACE), setting)
    totals_at = {value: float(np.mean([row["rollouts_spent"] for row in totals[value]])) for value in sorted(totals)}
    by_rollouts = setting == "adapters.rollouts"
    places = totals_at if by_rollouts else {value: value for value in totals_at}
    wide = width >= style.NARROW
    tall = 4.6 + 0.24 * len(totals_at)
    figure = Figure(figsize=(width, tall if wide else 2 * tall), layout="constrained")
    part = style.body(figure)
    beside: list[HashableList[str]] = [["ours", curves[0]], ["held", curves[-1]]]
    below: list[HashableList[str]] = [["ours"], ["held"], *([name] for name in curves)]
    mosaic = beside if wide else below
    columns = [3, 2] if wide else [1]
    rows = [8, 3 + len(totals_at)] if wide else [1] * len(mosaic)
    panels = part.subplot_mosaic(mosaic, width_ratios=columns, height_ratios=rows)
    top, bottom = panels["ours"], panels["held"]
    _lines(top, headline, setting, places)
    ticks = [f"{total:,.0f}" if by_rollouts else f"{value}\n({total:,.0f})" for value, total in totals_at.items()]
    top.set_xticks(list(places.values()), ticks)
    top.set_xlabel(axis_label if by_rollouts else f"{axis_label} (rollouts spent)")
    top.set_ylabel("pass rate")
    top.set_title("measured here", loc="left")
    part.legend(*top.get_legend_handles_labels(), loc="outside lower center", ncols=4 if wide else 2)
    differences = _differences_at(headline, setting)
    style.rule(bottom, [f"{totals_at[value]:,.0f} rollouts" for value in differences])
    shades = [style.look_of(TRACE).color] * len(differences)
    style.draw_differences(bottom, dict(enumerate(differences.values())), shades, words=False)
    bottom.set_xlabel(f"{label(TRACE)} minus {label(GRPO)}, paired")
    bottom.xaxis.set_major_locator(MaxNLocator(5))
    for name in curves:
        _published(panels[name], name)
    publication = read_published()
    finding = _tally(differences.values(), style.named(TRACE), GRPO, "budgets")
    note = (
        f"{_over(headline)}. {style.HOLLOW} Grey, with the same markers: {publication.paper}; "
        f"{publication.curves[curves[0]].source}: another model, other benchmarks."
    )
    return style.finish(figure, finding, note)


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
    methods, apart = style.ordered(rates, style.HEADLINE), 0.015 * (max(places.values()) - min(places.values()))
    for place, method in enumerate(methods):
        aside = apart * (place - (len(methods) - 1) / 2)  # keeps the intervals apart
        rows = sorted(rates[method], key=lambda row: row[setting])
        style.draw_rates(axes, [places[row[setting]] + aside for row in rows], rows, style.look_of(method))


def _seeds(points: Sequence[ComparisonRow]) -> int:
    return len(grouped(points, "seed"))


def _over(points: Sequence[ComparisonRow]) -> str:
    """Say over how many seeds a study is, and what its intervals are over."""
    seeds = _seeds(points)
    return f"{seeds} seeds, {OVER_SEEDS}" if seeds > 1 else "1 seed, intervals over tasks"


def _published(axes: Axes, name: str) -> None:
    """Draw a published curve in its own unit, for reference; nothing of it was measured here."""
    publication = read_published()
    curve = publication.curves[name]
    for method, points in curve.lines.items():
        axes.plot(
            list(points),
            list(points.values()),
            color=style.GREY,
            linestyle=":",
            linewidth=1,
            marker=style.look_of(method).marker,
            markerfacecolor="none",
            markersize=5,
        )
    title = f"as published: {publication.tables[curve.table].title}"
    axes.set_title(textwrap.fill(title, 34), loc="left", fontsize=style.SMALL, color=style.GREY)
    axes.set_xlabel(curve.over, color=style.GREY)
    axes.tick_params(colors=style.GREY)


def thresholds(points: Sequence[ComparisonRow], width: float = style.WIDTH) -> Figure:
    """Draw pass rate over the gap's threshold, one panel per coverage threshold, with the number of selected
    capabilities; a star marks where TRACE differs from GRPO on the target."""
    coverages, deltas = (sorted(grouped(points, f"selection.{name}")) for name in ("coverage", "delta"))
    places = {delta: float(place) for place, delta in enumerate(deltas)}
    wide = width >= style.NARROW
    figure = Figure(figsize=(width, 3.9 if wide else 1.5 + 2.2 * len(coverages)), layout="constrained")
    part = style.body(figure)
    shape = (1, len(coverages)) if wide else (len(coverages), 1)
    grid = part.subplots(*shape, sharey=True, squeeze=False).ravel()
    compared: list[Difference] = []
    for axes, coverage in zip(grid, coverages, strict=True):
        headline = [row for row in points if row["selection.coverage"] == coverage and row["method"] in style.HEADLINE]
        by_delta = grouped(headline, "selection.delta")
        _lines(axes, headline, "selection.delta", places)
        for delta, difference in _differences_at(headline, "selection.delta").items():
            compared.append(difference)
            if VERDICTS.get(difference.reading) == DIFFERS:
                axes.text(places[delta], 0.02, "\u2605", ha="center", transform=axes.get_xaxis_transform())
        # Number of selected capabilities, for each seed where seeds differ.
        counts = [sorted({len(row["selected"].split()) for row in by_delta.get(delta, [])}) for delta in deltas]
        ticks = [f"{delta:g}\n{'/'.join(map(str, numbers))}" for delta, numbers in zip(deltas, counts, strict=True)]
        axes.set_xticks(list(places.values()), ticks)
        axes.set_title(f"least coverage {coverage:g}")
        axes.margins(x=0.12)
        axes.set_xlabel("delta, and how many are selected")
    low, high = grid[0].get_ylim()
    grid[0].set_ylim(low - 0.1 * (high - low), high)  # space for the stars
    grid[0].set_ylabel("pass rate")
    part.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    finding = _tally(compared, style.named(TRACE), GRPO, "pairs of thresholds")
    return style.finish(figure, finding, f"{_over(points)}. Star: they differ reliably.", left=False)


def faults(points: Sequence[ComparisonRow], width: float = style.WIDTH) -> Figure:
    """Draw pass rates of rows that learn from solutions over the share of faulty solutions, with GRPO on the target."""
    rate, kind = "baselines.solutions.faults.rate", "baselines.solutions.faults.kind"
    figure = Figure(figsize=(width, 3.8), layout="constrained")
    part = style.body(figure)
    axes = part.subplots()
    grpo = next((row for row in points if row["method"] == GRPO), None)
    lost = []
    looks = {"random": style.Look(style.COLOURS[0], "o", "-"), "systematic": style.Look(style.COLOURS[1], "^", "-.")}
    for name, rows in grouped((row for row in points if row["method"] == "solutions"), kind).items():
        ranked = sorted(rows, key=lambda row: row[rate])
        style.draw_rates(axes, [row[rate] for row in ranked], ranked, looks[name], label=f"{name} faults")
        below = [row[rate] for row in ranked if grpo and row["pass_rate"] <= grpo["pass_rate"]]
        lost.append(f"{name} faults at {below[0]:.0%}" if below else f"{name} faults at none of the shares tried")
    if grpo:
        look = style.look_of(GRPO)
        axes.axhline(grpo["pass_rate"], color=look.color, linestyle=look.linestyle, label=grpo["label"])
    axes.set(xlabel="share of solutions with a fault", ylabel="pass rate")
    part.legend(loc="outside lower center", ncols=3 if width >= style.NARROW else 1)
    finding = f"TRACE on solutions falls below {style.named(GRPO)} with {' and '.join(lost)}"
    return style.finish(figure, finding, f"{_over(points)}. Faulty solutions are kept.")


def gates(rows: Sequence[ComparisonRow], width: float = style.WIDTH) -> Figure:
    """Draw the mean weight of each adapter in each layer of a mixture, by environments and kinds of tasks (rows)."""
    table = pd.DataFrame([row for row in rows if row["mixture"] == rows[0]["mixture"]])
    adapters, places = [*dict.fromkeys(table["adapter"])], [*dict.fromkeys(table["place"])]
    means = table.pivot_table(index="place", columns="adapter", values="weight")
    own = [name for name in adapters if name in places]
    opened = sum(means.loc[name].idxmax() == name for name in own)
    layers = grouped((row for row in rows if row["mixture"] == rows[0]["mixture"]), "layer")
    figure = Figure(figsize=(width, 1.6 + style.ROW * len(places)), layout="constrained")
    grid, images = figure.subplots(1, len(layers), sharey=True, squeeze=False)[0], list[AxesImage]()
    for axes, (layer, cells) in zip(grid, layers.items(), strict=True):
        weights = pd.DataFrame(cells).pivot(index="place", columns="adapter", values="weight").loc[places, adapters]
        images.append(axes.imshow(weights.to_numpy(dtype=float), cmap="Greys", vmin=0, vmax=1, aspect="auto"))
        axes.set_xticks(range(len(adapters)), adapters, rotation=50, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(places)), places)
        axes.set_title(f"block {int(layer) + 1}" if len(layers) > 1 else "one gate for all blocks")
        axes.grid(visible=False)
    figure.colorbar(images[0], ax=[*grid], pad=0.01, fraction=0.04, label="mean weight")
    finding = f"Gates open an environment's own adapter most in {opened} of {len(own)} environments"
    return style.finish(figure, finding, "Mean decisions at the prompt's last token, on training tasks.")


METHODS = partial(over_experiments, order=headline_methods(), against=GRPO, subject=TRACE)
ROUTING = partial(over_experiments, order=style.ROUTING, against=TRACE)
MIXTURE = partial(
    over_experiments, order=(BASE, GRPO, TRACE, "mixture", "router:sets"), against=TRACE, subject="mixture"
)
MERGING = partial(over_experiments, order=style.MERGING, against=TRACE)
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
GATES = "cp results/mixture/gates.csv results/sweeps/mixture_gates.csv"
STUDIES: Mapping[str, Study] = {
    "headline": Study(HEADLINE_REPLICATES, "make replicate NAME=headline", headline),
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
    "replicates_mixture": Study(
        MIXTURE_REPLICATES, "make replicate NAME=mixture OVERRIDES=baselines.mixture.run=true", MIXTURE
    ),
    "mixture_gates": Study(("sweeps/mixture_gates.csv",), GATES, gates),
}
