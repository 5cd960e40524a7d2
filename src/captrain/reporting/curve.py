"""The curve of one training as it is drawn: pass rate over rollouts spent, of TRACE and of GRPO on the target.

Drawn from `results/evaluation/curve.csv` alone (see `captrain.comparison.evaluation` for what a point is).
"""

from pathlib import Path

import seaborn as sns
from matplotlib.figure import Figure

from captrain.comparison import ComparisonRow, grouped
from captrain.records import read_table
from captrain.reporting.style import HEADLINE, ordered, tint

WORDS, NUMBERS = ("method", "label"), ("rollouts_spent", "pass_rate", "low", "high")


def curve_rows(results: Path) -> list[ComparisonRow]:
    """Read the rows of results/evaluation/curve.csv; none where training was evaluated at its end alone."""
    path = results / "evaluation/curve.csv"
    return [*read_table(path, columns=WORDS, numbers=NUMBERS).to_dict("records")] if path.exists() else []


def curve(results: Path) -> Figure:
    """Pass rate at each point of the training, with its interval over tasks."""
    by_method = grouped(curve_rows(results), "method")
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for method in ordered(by_method, HEADLINE):
        rows = by_method[method]
        rates = [row["pass_rate"] for row in rows]
        error = [[row["pass_rate"] - row["low"] for row in rows], [row["high"] - row["pass_rate"] for row in rows]]
        look = {"color": tint(method), "linewidth": 1.4, "markersize": 4, "capsize": 2}
        axes.errorbar([row["rollouts_spent"] for row in rows], rates, error, fmt="o-", label=rows[0]["label"], **look)
    axes.set(xlabel="rollouts spent, diagnosis and calibration among them", ylabel="pass rate on the test split")
    axes.set_title("One training at its checkpoints, with intervals over tasks", fontsize=9)
    axes.legend(frameon=True, fontsize=7.5)
    sns.despine(figure, left=True)
    return figure
