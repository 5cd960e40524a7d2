"""Table of a finished point: a row for each method, small enough for git.

Sweeps and replicates write such tables, and figures of several runs are drawn from them alone (`captrain.reporting`). A
table is read off each point's own results, so that gathering again costs seconds and changes nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from captrain.capabilities import read_selection
from captrain.comparison.differences import Difference, versus
from captrain.comparison.files import evaluation_table
from captrain.comparison.points import Point
from captrain.comparison.rows import GRPO, supervision
from captrain.config import Choice
from captrain.execution import exclusive, times
from captrain.records import publish_text, read_table

TableRow = dict[str, object]


def point_rows(point: Point, root: Path) -> list[TableRow]:
    """Read the rows of a whole point (see `rows_of`) while nobody changes its workspace.

    Raises:
        UserError: the evaluation's tables are missing.
    """
    with exclusive(point.lock(root)):
        return rows_of(point.choice, point.workspace(root) / "results")


def rows_of(choice: Choice, results: Path) -> list[TableRow]:
    """Tabulate a finished point, one row for each method of its evaluation.

    Args:
        choice: of the point.
        results: its folder, as the pipeline left it.

    Returns:
        Rows of experiment, seed, method, label, learns_from, pass_rate, low, high (over tasks), rollouts_spent, cpu_s
        (of the stages that the method rests on, None unless all of them ran in this point), over_grpo, over_low,
        over_high, reading (the paired difference to GRPO on the target, None where the evaluation compares no such
        pair), selected (capabilities, joined by spaces).

    Raises:
        UserError: the evaluation's tables are missing.
    """
    main = evaluation_table(results / "evaluation", "main")
    candidates = read_selection(results)["candidates"]
    selected = " ".join(sorted(candidate["id"] for candidate in candidates if candidate["selected"]))
    seconds = _seconds(results)
    differences = versus(evaluation_table(results / "evaluation", "differences").to_dict("records"), GRPO)
    return [
        {
            "experiment": choice.experiment,
            "seed": choice.seed,
            **{name: row[name] for name in ("method", "label")},
            "learns_from": supervision(row["method"]) or "",
            **{name: row[name] for name in ("pass_rate", "low", "high", "rollouts_spent")},
            "cpu_s": seconds.get(row["method"]),
            **_over_grpo(differences.get(row["method"])),
            "selected": selected,
        }
        for row in main.to_dict("records")
    ]


def _over_grpo(difference: Difference | None) -> TableRow:
    if difference is None:
        return {name: None for name in ("over_grpo", "over_low", "over_high", "reading")}
    return {
        "over_grpo": difference.mean,
        "over_low": difference.low,
        "over_high": difference.high,
        "reading": difference.reading,
    }


def _seconds(results: Path) -> dict[str, float]:
    """Sum up CPU seconds of the methods whose stages all ran beside these results."""
    durations = times(results.parent)
    stages = {
        row["method"]: row["stages"].split()
        for row in evaluation_table(results / "evaluation", "spent").to_dict("records")
        if isinstance(row["stages"], str)
    }
    return {
        method: round(sum(durations[stage].cpu_s for stage in names), 1)
        for method, names in stages.items()
        if all(stage in durations for stage in names)
    }


def write_table(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Publish a table as CSV, numbers rounded, so that equal results give equal bytes."""
    publish_text(path, pd.DataFrame(rows).to_csv(index=False, float_format="%.6f", lineterminator="\n"))


def read_rows(path: Path) -> list[TableRow]:
    """Read the rows of points that `write_table` wrote; an empty cell is None.

    Raises:
        UserError: the table is missing, or not whole.
    """
    frame = read_table(path, "name the folder of an earlier replication", columns=("experiment", "seed", "method"))
    return [{name: None if pd.isna(cell) else cell for name, cell in row.items()} for row in frame.to_dict("records")]  # pyright: ignore[reportReturnType]
