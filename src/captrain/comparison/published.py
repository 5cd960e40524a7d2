"""The paper's published numbers, beside ours if the same benchmark was run with the same model.

`published.yaml` holds the numbers as printed, and lists contradictions between them.
"""

from functools import cache
from pathlib import Path
from typing import Literal

import pandas as pd
from rich.table import Table

from captrain.comparison.rows import label
from captrain.comparison.tables import evaluation_table
from captrain.records import JsonObject, Record, read_yaml

NOT_RUN = "not run here"
WHOLE = "all"
"""Name of the column over all tasks of a table."""
COLUMNS = ["what", "method", "at", "published", "tasks", "ours", "our_tasks"]


class PublishedRates(Record):
    """One published table: `values` is method -> column -> number, over `tasks` of each column. `version` of the paper
    prints them.

    `unit` is the percentage of tasks passed, their count, or the mean of a score in [0, 1]. `benchmark` holds the
    settings of the same benchmark in our configuration; empty where we do not have it.
    """

    title: str
    source: str
    version: str
    benchmark: dict[str, str] = {}
    unit: Literal["percent", "count", "mean"]
    decimals: int
    tasks: dict[str, int]
    values: dict[str, dict[str, float]]


class PublishedCurve(Record):
    """One published curve: `lines` is method -> point -> number, in the unit of `table`."""

    title: str
    source: str
    table: str
    over: str
    lines: dict[str, dict[int, float]]


class PublishedSelection(Record):
    """In how many of `runs` each candidate was retained; `needed` of them select it."""

    source: str
    runs: int
    needed: int
    times: dict[str, int]


class Disagreement(Record):
    """A printed number that contradicts another one."""

    place: str
    value: str
    computed: str


class Published(Record):
    """Content of `published.yaml`."""

    paper: str
    model: str
    tables: dict[str, PublishedRates]
    curves: dict[str, PublishedCurve]
    selection: PublishedSelection
    disagreements: list[Disagreement]


@cache
def read_published() -> Published:
    """Read `published.yaml`."""
    return read_yaml(Path(__file__).with_suffix(".yaml"), Published)


def table(root: Path) -> pd.DataFrame:
    """Tabulate every published number beside ours.

    Args:
        root: of a project with results.

    Returns:
        what (a table, a curve or the selection), method (or candidate), at (a column or point), published, tasks (of
        the published number), ours (in the same unit), our_tasks. The last two are empty where we ran something else.
    """
    known, rows = read_published(), []
    for name, rates in known.tables.items():
        ours = _measured(root / "results", rates)
        for method, values in rates.values.items():
            for column, value in values.items():
                beside = ours.get((method, column), (None, None))
                rows.append((name, method, column, value, rates.tasks[column], *beside))
    for name, curve in known.curves.items():
        tasks = known.tables[curve.table].tasks[WHOLE]
        for method, points in curve.lines.items():
            rows += [(name, method, str(point), value, tasks, None, None) for point, value in points.items()]
    rows += [("selection", name, "runs", times, None, None, None) for name, times in known.selection.times.items()]
    types = {"published": float, "ours": float, "tasks": "Int64", "our_tasks": "Int64"}
    return pd.DataFrame(rows, columns=COLUMNS).astype(types)


def _measured(results: Path, rates: PublishedRates) -> dict[tuple[str, str], tuple[float, int]]:
    """Return (method, column) -> (our number in the table's unit, number of tasks)."""
    if not _same(results, rates):
        return {}
    columns = ["method", "pass_rate", "mean_reward", "tasks"]
    main, kinds = (evaluation_table(results / "evaluation", name, columns) for name in ("main", "kinds"))
    ours = pd.concat([main.assign(kind=WHOLE), kinds]).dropna(subset=["pass_rate"])
    scale = {"percent": 100.0, "count": ours["tasks"], "mean": 1.0}[rates.unit]
    ours["value"] = ours["mean_reward" if rates.unit == "mean" else "pass_rate"] * scale
    return {(row["method"], row["kind"]): (float(row["value"]), int(row["tasks"])) for row in ours.to_dict("records")}


def reference(results: Path) -> tuple[str, dict[str, float]]:
    """Return the published table that is comparable to `results`: its title, and each method's pass rate on all tasks.

    Returns ("", {}) if nothing comparable was published.
    """
    for rates in read_published().tables.values():
        if rates.unit != "mean" and _same(results, rates):
            scale = 100 if rates.unit == "percent" else rates.tasks[WHOLE]
            return rates.title, {method: values[WHOLE] / scale for method, values in rates.values.items()}
    return "", {}


def _same(results: Path, rates: PublishedRates) -> bool:
    """Return whether `results` come from the table's benchmark and the paper's model."""
    path = results / "spec.yaml"
    spec = read_yaml(path, JsonObject) if path.exists() else {}
    model = str(spec.get("base", {}).get("model") or "").split("@")[0]
    if not rates.benchmark or model.split("/")[-1] != read_published().model.split("/")[-1]:
        return False
    return rates.benchmark.items() <= spec.get("benchmark", {}).items()


def published_tables(root: Path) -> list[Table | str]:
    """Return what to print: each published table with our numbers beside it, and the contradictions."""
    known, numbers = read_published(), dict[str, Table]()
    for row in table(root).astype(object).to_dict("records"):
        if rates := known.tables.get(row["what"]):
            title = f"{rates.title}; version: {rates.version}"
            columns = Table("row", "tasks", "published", "ours", title=title, title_justify="left")
            ours = NOT_RUN if pd.isna(row["ours"]) else f"{row['ours']:.{rates.decimals}f} ({row['our_tasks']} tasks)"
            tasks, published = f"{row['at']}, {row['tasks']}", f"{row['published']:.{rates.decimals}f}"
            numbers.setdefault(title, columns).add_row(label(row["method"]), tasks, published, ours)
    disagreements = Table(
        *("where", "printed", "contradicted by"),
        title="Printed numbers that contradict each other",
        title_justify="left",
    )
    for disagreement in known.disagreements:
        disagreements.add_row(disagreement.place, disagreement.value, disagreement.computed)
    return [f"As published: {known.paper}", *numbers.values(), disagreements]
