"""The style of all figures, and the panel that compares methods.

A figure is as wide as the text of a page, or as `make figures WIDTH=` says. Its title states what the data show. Its
smallest text has 7 points. Colours can be told apart by colour-blind readers and have a contrast of at least 4.5:1 on
white; markers and line styles tell the same. Figures are made without pyplot: no display, no global state.
"""

import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure, SubFigure

from captrain.capabilities import CAUSES
from captrain.comparison import (
    BASE,
    BEST_SINGLE,
    BOUNDS,
    GRPO,
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
from captrain.reporting.verdicts import DIFFERS, VERDICTS

WIDTH = 7.0
"""Width of a figure in inches, if none is given."""
NARROW = 6.0
"""A figure narrower than this has its panels stacked vertically, and shorter texts."""
DPI = 200
SMALL, TEXT, TITLE = 7, 8, 9
"""Sizes of text in points; nothing is smaller."""
RC = {
    "axes.titlelocation": "left",
    "axes.titley": 1.0,
    "axes.titlesize": TEXT,
    "axes.labelsize": TEXT,
    "font.size": TEXT,
    "legend.fontsize": SMALL,
    "legend.title_fontsize": SMALL,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # outlines that journals accept
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
}
METADATA = {"pdf": {"CreationDate": None, "Creator": None, "Producer": None}, "png": {"Software": None}}
CANVASES = {"png": FigureCanvasAgg, "pdf": FigureCanvasPdf}
GREY = "0.4"
"""Colour of published numbers, which were not measured here, of notes, and of all other methods."""
PROJECT = "#0f766e"
"""Colour of the project's rows."""
COLOURS = (PROJECT, "#0a5fa5", "#8e3a80", "#6b5900", "0.15", "#a63d00")
"""Colours for lines that are not methods, in order."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":")
DIVERGING = "PuOr"
"""Colour map of changes: orange is worse, purple is better."""
ROUTING = (BASE, "control:placebo", "control:random_router", RANDOM, BEST_SINGLE, TRACE, "router:", ORACLE)
"""Methods of the routing figure by name or prefix."""
MERGING = (BASE, "single", "mixed", BEST_SINGLE, TRACE, "merged:")
SUPERVISED = "Squares learn from demonstrations, circles from rewards or not at all."
HOLLOW = "Hollow: no reliable difference."
ROW = 0.21
"""Height of one method in inches."""


class Look(NamedTuple):
    """How a method is drawn, in every figure."""

    color: str = GREY
    marker: str = "o"
    linestyle: str = "-"


LOOKS = {
    BASE: Look("0.25", "X", ":"),
    GRPO: Look("#a63d00", "s", "--"),
    "gepa": Look("#8e3a80", "^", "-."),
    TRACE: Look(PROJECT, "o", "-"),
}
HEADLINE = tuple(LOOKS)
"""Methods that have a look of their own."""


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
        sns.set_theme("paper", "whitegrid", font="DejaVu Sans", rc=RC)
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


def finish(figure: Figure, finding: str, note: str = "", *, left: bool = True) -> Figure:
    """Add the title, which states the finding, and a note below; both are wrapped to the width of the figure."""
    wide = figure.get_figwidth()
    title = textwrap.fill(finding, int(12.5 * wide))
    figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE, fontweight="bold")
    if note:
        figure.supxlabel(textwrap.fill(note, int(17 * wide)), x=0.01, ha="left", fontsize=SMALL, color=GREY)
    sns.despine(figure, left=left)
    return figure


def body(figure: Figure) -> SubFigure:
    """Return the part of a figure for its panels and their legend, which then lies above the note."""
    return figure.add_subfigure(figure.add_gridspec(1, 1)[0])


def ordered(names: Iterable[str], order: Sequence[str] | None) -> list[str]:
    """Select the names that `order` lists by name or prefix, in its order; all if it is None."""
    if order is None:
        return list(names)
    return [name for start in order for name in names if name == start or (start[-1] == ":" and name.startswith(start))]


def look_of(method: str) -> Look:
    """Return how a method is drawn: the headline each in its own way, TRACE's other rows in its colour."""
    return LOOKS.get(method, Look(PROJECT if method.startswith("solutions") else GREY))


def arm_label(name: str) -> str:
    """Return the label of a baseline, or the title of a capability with the stage of its adapter in brackets."""
    if name in baselines():
        return label(name)
    *stage, capability = name.split(":")
    title = CAUSES[capability].name if capability in CAUSES else capability.replace("_", " ")
    return f"{title} ({stage[0].replace('_', ' ')})" if stage else title


def ink(red: float, green: float, blue: float) -> str:
    """Return the colour of text, black or white, that has the higher contrast on a colour."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue)]
    luminance = float(np.dot(linear, (0.2126, 0.7152, 0.0722)))
    return "black" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "white"


def draw_rates(axes: Axes, places: Sequence[float], rows: Sequence[ComparisonRow], look: Look, **more: Any) -> None:
    """Draw pass rates with intervals at places along the axis; `more` goes to matplotlib."""
    rates = np.array([row["pass_rate"] for row in rows])
    lows, highs = (np.clip([row[name] for row in rows], 0, 1) for name in ("low", "high"))
    more = {"label": rows[0]["label"], "markersize": 4, "capsize": 2, "linewidth": 1.3, **look._asdict(), **more}
    # With few seeds a t interval may exceed the range of a rate.
    axes.errorbar(places, rates, [np.maximum(rates - lows, 0), np.maximum(highs - rates, 0)], **more)


def draw_differences(
    axes: Axes, differences: Mapping[int, Difference], shades: Sequence[str], *, words: bool = True
) -> None:
    """Draw differences with intervals by height, and the verdict on each beside the panel.

    A difference without a reliable sign is hollow.
    """
    axes.axvline(0, color="0.2", linewidth=0.8)
    if not differences:
        return
    means, lows, highs, _ = zip(*differences.values(), strict=True)
    verdicts = [VERDICTS.get(difference.reading, "") for difference in differences.values()]
    axes.hlines(list(differences), np.clip(lows, -1, 1), np.clip(highs, -1, 1), shades)
    faces = [shade if verdict == DIFFERS else "white" for shade, verdict in zip(shades, verdicts, strict=True)]
    axes.scatter(means, list(differences), s=20, c=faces, edgecolors=shades, zorder=3)
    if words:
        for height, verdict in zip(differences, verdicts, strict=True):
            look = {"fontsize": SMALL, "va": "center", "color": "0.2" if verdict == DIFFERS else GREY}
            axes.text(1.03, height, verdict or "no interval", transform=axes.get_yaxis_transform(), **look)


def rule(axes: Axes, labels: Sequence[str]) -> None:
    """Label the rows of a panel and draw a line through each, as one collection because single ticks are slow."""
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(labels)) if any(labels) else [], labels if any(labels) else [])
    axes.set_ylim(max(len(labels), 1) - 0.5, -0.5)
    axes.hlines(range(len(labels)), 0, 1, "0.88", linewidth=0.8, zorder=0, transform=axes.get_yaxis_transform())


def best(rows: Iterable[Line]) -> Line:
    """Return the row with the highest rate; bounds are no methods."""
    return max((row for row in rows if row.method not in BOUNDS), key=lambda row: row.rate)


def named(method: str) -> str:
    """Return the label of a method for use in a sentence, in quotes if it has a comma or a colon."""
    text = label(method)
    return f"\u201c{text}\u201d" if {",", ":"} & {*text} else text


def versus_words(row: Line, against: str) -> str:
    """Say how a row compares with the reference method; "" if they were not compared."""
    if row.difference is None:
        return ""
    mean, other = row.difference.mean, named(against)
    if VERDICTS.get(row.difference.reading) != DIFFERS:
        return f"no reliable difference to {other} ({mean:+.2f})"
    return f"{abs(mean):.2f} {'more' if mean > 0 else 'less'} than {other}"


def compare(
    groups: Mapping[str, Sequence[Line]], against: str, finding: str, rate: str, note: str = "", width: float = WIDTH
) -> Figure:
    """Draw groups of methods, one above the other: rates, and beside them the differences to one method.

    Args:
        groups: title of each group ("" for none) -> its methods, which are drawn by rate; bounds come last.
        against: the method that all are compared with.
        finding: title of the figure.
        rate: label of the axis of rates.
        note: below the figure.
        width: width of the figure in inches.
    """
    supervised = any(is_supervised(row.method) for rows in groups.values() for row in rows)
    note = " ".join(part for part in (SUPERVISED if supervised else "", HOLLOW, note) if part)
    counts = [max(len(rows), 1) for rows in groups.values()]
    row = ROW * (1.5 if width < NARROW else 1.0)  # labels may take two lines
    height = 1.1 + sum(row * count + (0.25 if name else 0.05) for count, name in zip(counts, groups, strict=True))
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(len(groups), 2, sharex="col", squeeze=False, width_ratios=(3, 2), height_ratios=counts)
    for (name, rows), (rates, differences) in zip(groups.items(), grid, strict=True):
        ranked = sorted(rows, key=lambda row: (row.method in BOUNDS, -row.rate))
        _compare(rates, differences, ranked, narrow=width < NARROW)
        rates.set_title(textwrap.fill(name, int((12 if width >= NARROW else 7) * width)))
    grid[-1][0].set_xlabel(textwrap.fill(rate, int(5 * width)))
    grid[-1][1].set_xlabel(textwrap.fill(f"difference to {label(against)}", int(3 * width)))
    return finish(figure, finding, note)


def _compare(rates: Axes, differences: Axes, rows: Sequence[Line], *, narrow: bool) -> None:
    shades = [look_of(row.method).color for row in rows]
    rule(rates, [textwrap.fill(row.label, 22) if narrow else row.label for row in rows])
    rule(differences, [""] * len(rows))
    lows, highs = (np.clip([getattr(row, end) for row in rows], 0, 1) for end in ("low", "high"))
    rates.hlines(range(len(rows)), lows, highs, shades)
    for supervised, marker in ((False, "o"), (True, "s")):
        places = [place for place, row in enumerate(rows) if is_supervised(row.method) is supervised]
        colours = [shades[place] for place in places]
        rates.scatter([rows[place].rate for place in places], places, s=24, c=colours, marker=marker, zorder=3)
    publications = [(row.published, place) for place, row in enumerate(rows) if row.published is not None]
    if publications:
        rates.scatter(*zip(*publications, strict=True), s=40, marker="D", facecolors="none", edgecolors=GREY)
    by_place = {place: row.difference for place, row in enumerate(rows) if row.difference}
    draw_differences(differences, by_place, [shades[place] for place in by_place], words=not narrow)
