"""Figures of a finished run, drawn from `results/` alone: no model, no rollouts, no torch.

Whoever clones the repository can redraw every figure from the small committed files. Two runs give the same bytes:
nothing is drawn that depends on time or on the order of a directory, and dates and program versions stay out of the
files' metadata. Figures are made without pyplot: no display, no global state.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from captrain.errors import UserError
from captrain.methods import label

NEEDED = (
    "evaluation/main.csv",
    "evaluation/kinds.csv",
    "evaluation/metrics.json",
    "capabilities/selection.json",
    "adapters/history.csv",
    "grpo_target/history.csv",
)
TRAINED = ("adapters", "grpo_target", "awm", "single", "mixed", "ramp")
"""Stages that train by reinforcement."""
METADATA = {"pdf": {"CreationDate": None, "Creator": None, "Producer": None}, "png": {"Software": None}}
HEADLINE = ("base", "grpo_target", "gepa", "trace")


def draw(results: Path, out: Path) -> list[Path]:
    """Draw every figure as PDF and PNG.

    Args:
        results: folder that holds one folder a stage.
        out: folder for the figures, made if needed.

    Returns:
        The files written.

    Raises:
        UserError: a result file is missing; the message names the stage that makes it.
    """
    figures: dict[str, Callable[[Path], Figure]] = {
        "main": main,
        "capabilities": lambda results: capabilities(_selection(results)),
        "training": training,
        "kinds": kinds,
    }
    for name in NEEDED:
        if not (results / name).exists():
            raise UserError(f"{results / name} is missing", f"run `dvc repro {name.split('/')[0]}` to make it")
    return render({name: partial(make, results) for name, make in figures.items()}, out)


def render(figures: Mapping[str, Callable[[], Figure]], out: Path) -> list[Path]:
    """Draw each figure in the one style and write it to `out` as PDF and PNG; returns the files written."""
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a matplotlibrc of the machine must not change a byte
        sns.set_theme(context="paper", style="whitegrid", font="DejaVu Sans")
        for name, make in figures.items():
            figure = make()
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # laid out now: not again for each file
            for kind, metadata in METADATA.items():
                path = out / f"{name}.{kind}"
                figure.savefig(path, dpi=150, metadata=metadata)
                written.append(path)
    return written


def main(results: Path) -> Figure:
    """Pass rate of every method with its interval; rollouts spent are written beside it."""
    table = pd.read_csv(results / "evaluation/main.csv")
    confidence = json.loads((results / "evaluation/metrics.json").read_text())["confidence"]
    rows = table.dropna(subset=["pass_rate"]).to_dict("records")
    figure = Figure(figsize=(6.4, 0.9 + 0.33 * len(rows)), layout="constrained")
    axes = figure.subplots()
    colours = sns.color_palette("deep")
    for place, row in enumerate(rows):
        headline = row["method"] in HEADLINE
        colour = colours[HEADLINE.index(row["method"])] if headline else "0.45"
        axes.plot([row["low"], row["high"]], [place, place], color=colour, linewidth=2.2 if headline else 1.4)
        axes.plot(row["pass_rate"], place, marker="o" if headline else "D", color=colour, markersize=6)
    axes.set_yticks(range(len(rows)), [_spent(row) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"pass rate on the test split, with {confidence:.0%} interval over tasks")
    axes.set_title("Pass rate by method (rollouts spent)", loc="left")
    sns.despine(figure, left=True)
    return figure


def _spent(row: dict[Any, Any]) -> str:
    return f"{row['label']} ({row['rollouts_spent']:,})"


def _selection(results: Path) -> dict[str, Any]:
    return json.loads((results / "capabilities/selection.json").read_text())


def capabilities(selection: dict[str, Any]) -> Figure:
    """Gap against coverage of every candidate, with interval bars and the thresholds of the selection."""
    thresholds, candidates = selection["thresholds"], selection["candidates"]
    shown = [one for one in candidates if one["gap"] is not None and one["coverage"] is not None]
    undefined = len(candidates) - len(shown)
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    colours = {True: sns.color_palette("deep")[2], False: "0.55"}
    for selected, name, marker in ((True, "selected", "o"), (False, "rejected", "X")):
        points = [one for one in shown if one["selected"] is selected]
        colour = colours[selected]
        for one in points:
            if one["gap_low"] is not None and one["gap_high"] is not None:
                axes.plot([one["coverage"]] * 2, [one["gap_low"], one["gap_high"]], color=colour, linewidth=1.2)
        places = [one["coverage"] for one in points], [one["gap"] for one in points]
        axes.scatter(*places, marker=marker, s=42, color=colour, zorder=5, label=f"{name} ({len(points)})")
    axes.axhline(thresholds["delta"], color="0.2", linestyle="--", linewidth=1)
    axes.axvline(thresholds["coverage"], color="0.2", linestyle="--", linewidth=1)
    _name_points(figure, shown)
    axes.set_xlabel("coverage: share of failed rollouts that lack the capability")
    axes.set_ylabel("gap: error rate among failed minus among passed")
    note = f"; {undefined} with undefined gap not drawn" if undefined else ""
    axes.set_title(f"Candidate capabilities (thresholds dashed{note})", loc="left")
    axes.legend(loc="best", frameon=True)
    sns.despine(figure)
    return figure


def _name_points(figure: Figure, points: list[dict[str, Any]]) -> None:
    """Write each name right of its point, or left of it in the right half, and nudge names of one side apart."""
    axes = figure.axes[0]
    axes.margins(0.12, 0.1)
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    step = 0.045 * (top - bottom)
    used: dict[bool, float] = {True: -np.inf, False: -np.inf}
    for one in sorted(points, key=lambda one: (one["gap"], one["id"])):
        turned = one["coverage"] > (left + right) / 2
        height = max(one["gap"], used[turned] + step)
        used[turned] = height
        axes.annotate(
            one["name"],
            (one["coverage"], one["gap"]),
            xytext=(one["coverage"] + (-1 if turned else 1) * 0.02 * (right - left), height),
            ha="right" if turned else "left",
            va="center",
            fontsize=7.5,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            fontweight="bold" if one["selected"] else "normal",
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2},
        )


def training(results: Path) -> Figure:
    """Reward, success and the share of informative groups over rollouts spent, one line an adapter."""
    paths = [results / stage / "history.csv" for stage in TRAINED]
    parts = [pd.read_csv(path) for path in paths if path.exists()]
    history = pd.concat([part for part in parts if len(part)] or parts[:1])
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    grid = figure.subplots(1, 3, sharex=True, sharey=True)
    names = list(history["adapter"].drop_duplicates())
    panels = {
        "reward": "mean reward",
        "success": "success rate",
        "informative": "share of informative groups",
    }
    for axes, (column, title) in zip(grid, panels.items(), strict=True):
        for name, colour in zip(names, sns.color_palette("colorblind", len(names)), strict=True):
            lines = history[history["adapter"] == name]
            own = {"color": "0.15", "linestyle": "--"} if name == "grpo_target" else {"color": colour}
            axes.plot(lines["rollouts"], lines[column], label=_adapter(name), linewidth=1.4, **own)
        axes.set_title(title, loc="left")
        axes.set_xlabel("rollouts spent")
        axes.set_ylim(-0.02, 1.02)
    if names:
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
    sns.despine(figure)
    return figure


def _adapter(name: str) -> str:
    return label(name) if name in TRAINED else name.replace("_", " ")


def kinds(results: Path) -> Figure:
    """Pass rate by task kind of the base, the headline baselines and TRACE, with intervals."""
    table = pd.read_csv(results / "evaluation/kinds.csv")
    methods = [method for method in HEADLINE if method in set(table["method"])]
    names = sorted(set(table["kind"].astype(str)))
    figure = Figure(figsize=(6.4, 1.2 + 0.5 * len(names)), layout="constrained")
    axes = figure.subplots()
    for index, method in enumerate(methods):
        colour = sns.color_palette("deep")[HEADLINE.index(method)]
        rows = [row for row in table.dropna(subset=["pass_rate"]).to_dict("records") if row["method"] == method]
        places = [names.index(str(row["kind"])) + 0.2 * (index - (len(methods) - 1) / 2) for row in rows]
        for place, row in zip(places, rows, strict=True):
            axes.plot([row["low"], row["high"]], [place, place], color=colour, linewidth=1.6)
        named = rows[0]["label"] if rows else method
        axes.plot([row["pass_rate"] for row in rows], places, "o", color=colour, markersize=5, label=named)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("pass rate on the test split")
    axes.set_title("Pass rate by task kind", loc="left")
    figure.legend(loc="outside lower center", ncols=len(methods), frameon=False)
    sns.despine(figure, left=True)
    return figure
