"""The figure of a diagnosis, where the installation can draw."""

from functools import partial
from pathlib import Path

from captrain.capabilities import SelectionAccount
from captrain.execution import DRAWING, has_package

FOLDER = "figures"


def draw_candidates(report: SelectionAccount, out: Path) -> list[Path]:
    """Draw gap and coverage of each candidate into figures/; returns what was drawn, nothing in the light
    installation."""
    if not has_package(DRAWING):
        return []
    from captrain.reporting import capabilities, render

    return render({"capabilities": partial(capabilities, report)}, out / FOLDER)


def figure_line() -> str:
    """The line of report.md that shows it, or says why there is none."""
    if has_package(DRAWING):
        return f"![gap and coverage of each cause]({FOLDER}/capabilities.png)"
    return "No figure: the light installation does not draw; `pip install 'captrain[train]'`, and diagnose again."
