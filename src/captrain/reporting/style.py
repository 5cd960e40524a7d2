"""The style of all figures, and the panel that compares methods.

A comparison prints the reading of each difference as the table does, for example "not distinguishable". Figures are
made without pyplot: no display, no global state.
"""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure

from captrain.comparison import (
    BASE,
    BEST_SINGLE,
    ORACLE,
    RANDOM,
    TRACE,
    ComparisonRow,
    Difference,
    baselines,
    is_supervised,
    label,
)
from captrain.records import publish_bytes

DPI = 150
METADATA = {"pdf": {"CreationDate": None, "Creator": None, "Producer": None}, "png": {"Software": None}}
CANVASES = {"png": FigureCanvasAgg, "pdf": FigureCanvasPdf}
Colour = str | tuple[float, float, float]
HEADLINE = (BASE, "grpo_target", "gepa", TRACE)
ROUTING = (BASE, "control:placebo", "control:random_router", RANDOM, BEST_SINGLE, TRACE, "router:", ORACLE)
"""Methods of the routing figure by name or prefix, in order."""
MERGING = (BASE, "single", "mixed", BEST_SINGLE, TRACE, "merged:")
SUPERVISED = "Squares: learns from demonstrations; circles: from rewards alone, or nothing."
PROJECT, PROJECT_PALE = "#0f766e", "#7fb8b2"
"""Colours of the project's best row and of its other rows."""
GREY = "0.5"
"""Colour of published numbers, which were not measured here."""

ROW = 0.24
"""Height of one method in inches."""


@dataclass(frozen=True)
class Line:
    """One method in a comparison: a rate with its interval, and its difference to the reference method if they were
    compared."""

    method: str
    label: str
    rate: float
    low: float
    high: float
    difference: Difference | None = None
    published: float | None = None


def render(figures: Mapping[str, Callable[[], Figure]], out: Path) -> list[Path]:
    """Draw each figure and write it to `out` as PDF and PNG; returns the paths of the files."""
    out.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore a matplotlibrc of this machine
        sns.set_theme("paper", "whitegrid", font="DejaVu Sans", rc={"axes.titlelocation": "left", "axes.titley": 1.0})
        for name, make in figures.items():
            figure = make()
            figure.set_dpi(DPI)
            # Use the canvases directly: `savefig` draws each file twice. The first canvas does the layout for both.
            for kind, canvas in CANVASES.items():
                path, content = out / f"{name}.{kind}", io.BytesIO()
                getattr(canvas(figure), f"print_{kind}")(content, metadata=METADATA[kind])
                publish_bytes(path, content.getvalue())
                figure.set_layout_engine("none")
                paths.append(path)
    return paths


def ordered(names: Iterable[str], order: Sequence[str] | None) -> list[str]:
    """Select the names that `order` lists by name or prefix, in its order; all if it is None."""
    if order is None:
        return list(names)
    return [name for start in order for name in names if name == start or (start[-1] == ":" and name.startswith(start))]


def tint(method: str) -> Colour:
    """Return the colour of a headline method, grey for the others."""
    return sns.color_palette("deep")[HEADLINE.index(method)] if method in HEADLINE else "0.45"


def arm_label(name: str) -> str:
    """Return the label of a baseline or of a capability's adapter."""
    return label(name) if name in baselines() else name.replace("_", " ")


def draw_rates(
    axes: Axes, places: Sequence[float], rows: Sequence[ComparisonRow], form: str = "o-", **look: Any
) -> None:
    """Draw pass rates with intervals at places along the axis; `look` goes to matplotlib."""
    rates = [row["pass_rate"] for row in rows]
    error = [[row["pass_rate"] - row["low"] for row in rows], [row["high"] - row["pass_rate"] for row in rows]]
    look = {"label": rows[0]["label"], "markersize": 4, "capsize": 2, **look}
    axes.errorbar(places, rates, error, fmt=form, **look)


def draw_differences(axes: Axes, differences: Mapping[int, Difference], shades: Sequence[Colour]) -> None:
    """Draw differences with intervals by height, and the reading of each beside the panel.

    A difference that is not distinguishable is hollow.
    """
    distinguishable = [difference.reading == "distinguishable" for difference in differences.values()]
    means, lows, highs, readings = zip(*differences.values(), strict=True)
    axes.hlines(list(differences), lows, highs, shades)
    faces = [shade if full else "white" for shade, full in zip(shades, distinguishable, strict=True)]
    axes.scatter(means, list(differences), s=22, c=faces, edgecolors=shades, zorder=3)
    axes.axvline(0, color="0.2", linewidth=0.8)
    for height, reading, full in zip(differences, readings, distinguishable, strict=True):
        look = {"fontsize": 7, "va": "center", "color": "0.2" if full else "0.45"}
        axes.text(1.02, height, reading or "no interval", transform=axes.get_yaxis_transform(), **look)


def rule(axes: Axes, labels: Sequence[str]) -> None:
    """Label the rows of a panel and draw a line through each, as one collection because single ticks are slow."""
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(labels)) if any(labels) else [], labels if any(labels) else [])
    axes.set_ylim(max(len(labels), 1) - 0.5, -0.5)
    axes.hlines(range(len(labels)), 0, 1, "0.85", linewidth=0.8, zorder=0, transform=axes.get_yaxis_transform())


def compare(groups: Mapping[str, Sequence[Line]], against: str, title: str, rate: str, note: str = "") -> Figure:
    """Draw groups of methods, one above the other: rates, and beside them the differences to one method.

    Places are computed in inches: a layout engine would take a third of the time.

    Args:
        groups: title of each group ("" for none) -> its methods in order.
        against: the method that all are compared with.
        title: of the figure.
        rate: label of the axis of rates.
        note: below the figure.
    """
    if any(is_supervised(row.method) for rows in groups.values() for row in rows):
        note = f"{SUPERVISED} {note}".rstrip()
    longest = max((len(row.label) for rows in groups.values() for row in rows), default=0)
    margin, wide, gap, narrow, words = 0.25 + 0.068 * longest, 3.2, 0.15, 2.1, 2.05
    heads = {name: 0.32 if name else 0.08 for name in groups}
    bottom, top = 0.75 if note else 0.5, 0.3
    width = margin + wide + gap + narrow + words
    height = bottom + top + sum(heads[name] + ROW * len(rows) for name, rows in groups.items())
    figure = Figure(figsize=(width, height))
    figure.text(0.01, 1 - 0.1 / height, title, ha="left", va="top", fontsize=10)
    figure.text(0.01, 0.08 / height, note, ha="left", va="bottom", fontsize=7.5, color=GREY)
    above, first = height - top, None
    for name, rows in groups.items():
        tall = ROW * len(rows)
        above -= heads[name] + tall
        place, low, size = margin / width, above / height, tall / height
        share = first or (None, None)
        rates = figure.add_axes((place, low, wide / width, size), sharex=share[0])
        differences = figure.add_axes(((margin + wide + gap) / width, low, narrow / width, size), sharex=share[1])
        first = first or (rates, differences)
        _compare(rates, differences, rows)
        rates.set_title(name, fontsize=9)
        last = name == list(groups)[-1]
        for axes in (rates, differences):
            axes.tick_params(labelbottom=last)
        if last:
            rates.set_xlabel(rate, fontsize=8)
            differences.set_xlabel(f"difference to {label(against)}", fontsize=8)
    for axes, least in zip(first or (), (0.0, -1.0), strict=False):
        # With few seeds a t interval may exceed the range of a rate and would squeeze the others.
        low, high = axes.get_xlim()
        axes.set_xlim(max(low, least - 0.02), min(high, 1.02))
    sns.despine(figure, left=True)
    return figure


def _compare(rates: Axes, differences: Axes, rows: Sequence[Line]) -> None:
    shades = [tint(row.method) for row in rows]
    rule(rates, [row.label for row in rows])
    rule(differences, [""] * len(rows))
    rates.hlines(range(len(rows)), [row.low for row in rows], [row.high for row in rows], shades)
    for supervised, marker in ((False, "o"), (True, "s")):
        places = [place for place, row in enumerate(rows) if is_supervised(row.method) is supervised]
        colours = [shades[place] for place in places]
        rates.scatter([rows[place].rate for place in places], places, s=26, c=colours, marker=marker, zorder=3)
    publications = [(row.published, place) for place, row in enumerate(rows) if row.published is not None]
    if publications:
        rates.scatter(*zip(*publications, strict=True), s=40, marker="D", facecolors="none", edgecolors=GREY)
    by_place = {place: row.difference for place, row in enumerate(rows) if row.difference}
    draw_differences(differences, by_place, [shades[place] for place in by_place])
