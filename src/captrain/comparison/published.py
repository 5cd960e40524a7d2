"""Numbers that the paper published, as data beside their source.

The numbers lie in `published.yaml` as they were printed, with what in them does not agree, and are never mixed with
measured ones: `table` sets ours beside them only where the same benchmark was played with the same model.
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
"""The column that is over all tasks of a table."""
GAIN = "gain over the base"
"""The column of a difference that is stated without the rate itself."""


class PublishedRates(Record):
    """One table: method -> column -> number as printed, over `tasks` of each column.

    unit: `percent` of the tasks, `count` of them, or `mean` of a score in [0, 1]. benchmark: what a specification of
    ours says of its benchmark where it is the same one.
    """

    title: str
    source: str
    benchmark: dict[str, str]
    unit: Literal["percent", "count", "mean"]
    decimals: int
    trials: int
    tasks: dict[str, int]
    values: dict[str, dict[str, float]]


class PublishedCurve(Record):
    """Method -> point -> number, of one table's quantity over all of its tasks. `start`: the row of the table that all
    lines start at."""

    title: str
    source: str
    table: str
    over: str
    start: str | None
    lines: dict[str, dict[int, float]]


class FurtherResult(Record):
    """Rates in percent of another document, over tasks that no table is of; `gains` over the base, in points."""

    title: str
    source: str
    decimals: int
    tasks: int
    values: dict[str, float]
    gains: dict[str, float]

    def rows(self) -> list[tuple[str, str, float]]:
        """Method, what its number is of, and the number."""
        values = [(method, WHOLE, value) for method, value in self.values.items()]
        return values + [(method, GAIN, value) for method, value in self.gains.items()]


class PublishedSelection(Record):
    """Times that each candidate was retained in `runs` runs; kept from `needed` on, `kept` of them."""

    source: str
    runs: int
    needed: int
    kept: int
    times: dict[str, int]


class Disagreement(Record):
    """One printed number that cannot be, or does not agree with another: where, what is printed, what it comes to."""

    place: str
    value: str
    computed: str


class Published(Record):
    """Content of `published.yaml`."""

    paper: str
    model: str
    tables: dict[str, PublishedRates]
    further: dict[str, FurtherResult]
    curves: dict[str, PublishedCurve]
    selection: PublishedSelection
    disagreements: list[Disagreement]


@cache
def read_published() -> Published:
    """The published numbers."""
    return read_yaml(Path(__file__).with_suffix(".yaml"), Published)


def table(root: Path) -> pd.DataFrame:
    """Every published number beside ours.

    Args:
        root: of a project with results.

    Returns:
        What (a table, a further result, a curve or the selection), method (or candidate), at (a column or point),
        published, tasks (of the published number), ours (in the same unit), our_tasks; the last two are empty where it
        was not run here.
    """
    publication = read_published()
    rows = []
    for name, rates in publication.tables.items():
        # (method, column) -> our number in the table's unit, and its tasks; nothing where another thing was measured.
        measured: dict[tuple[str, str], tuple[float, int]] = {}
        if _same(root / "results", rates):
            columns = ["method", "pass_rate", "mean_reward", "tasks"]
            main, kinds = (evaluation_table(root / "results/evaluation", name, columns) for name in ("main", "kinds"))
            for row in pd.concat([main.assign(kind=WHOLE), kinds]).dropna(subset=["pass_rate"]).to_dict("records"):
                scale = {"percent": 100.0, "count": float(row["tasks"]), "mean": 1.0}[rates.unit]
                value = row["mean_reward"] if rates.unit == "mean" else row["pass_rate"]
                measured[str(row["method"]), str(row["kind"])] = (float(value * scale), int(row["tasks"]))
        for method, columns in rates.values.items():
            for column, value in columns.items():
                value_here, tasks = measured.get((method, column), (None, None))
                rows.append((name, method, column, value, rates.tasks[column], value_here, tasks))
    for name, result in publication.further.items():
        rows += [(name, method, column, value, result.tasks, None, None) for method, column, value in result.rows()]
    for name, curve in publication.curves.items():
        tasks = publication.tables[curve.table].tasks[WHOLE]
        for method, points in curve.lines.items():
            rows += [(name, method, str(point), value, tasks, None, None) for point, value in points.items()]
    rows += [
        ("selection", name, "runs", times, None, None, None) for name, times in publication.selection.times.items()
    ]
    columns = ["what", "method", "at", "published", "tasks", "ours", "our_tasks"]
    numbers = {"published": float, "ours": float, "tasks": "Int64", "our_tasks": "Int64"}
    return pd.DataFrame(rows, columns=columns).astype(numbers)


def reference(results: Path) -> tuple[str, dict[str, float]]:
    """Read what was published of the thing that was measured in `results`: the title of the table, and method -> share
    of all tasks passed. "" and {} where another thing was measured, or no table of passed tasks is of it."""
    for rates in read_published().tables.values():
        if rates.unit != "mean" and _same(results, rates):
            scale = 100 if rates.unit == "percent" else rates.tasks[WHOLE]
            return rates.title, {method: values[WHOLE] / scale for method, values in rates.values.items()}
    return "", {}


def _same(results: Path, rates: PublishedRates) -> bool:
    """Tell if the table's benchmark was played in `results`, with the paper's model."""
    path = results / "spec.yaml"
    spec = read_yaml(path, JsonObject) if path.exists() else {}
    model, benchmark = str(spec.get("base", {}).get("model") or "").split("@")[0], spec.get("benchmark", {})
    same = all(benchmark.get(key) == value for key, value in rates.benchmark.items())
    return same and model.split("/")[-1] == read_published().model.split("/")[-1]


def published_tables(root: Path) -> list[Table]:
    """The tables with ours beside them, and the contradictions, to be printed; curves are left to `table`."""
    publication, numbers = read_published(), table(root).dropna(subset=["ours"]).to_dict("records")
    tables = []
    for name, rates in publication.tables.items():
        headings = [f"{column}, {tasks} tasks" for column, tasks in rates.tasks.items()]
        rates_table = Table(title=f"{rates.title}, as published", title_justify="left", caption_justify="left")
        for heading in ("method", *headings, "ours"):
            rates_table.add_column(heading, justify="left" if heading == "method" else "right")
        for method, values in rates.values.items():
            cells_here = [
                f"{row['at']} {row['ours']:.{rates.decimals}f} ({row['our_tasks']} tasks)"
                for row in numbers
                if (row["what"], row["method"]) == (name, method)
            ]
            cells = [f"{values[column]:.{rates.decimals}f}" for column in rates.tasks]
            rates_table.add_row(label(method), *cells, ", ".join(cells_here) or NOT_RUN)
        rates_table.caption = f"{publication.paper}: {rates.source}"
        tables.append(rates_table)
    for result in publication.further.values():
        further_table = Table("method", "number", title=f"{result.title}, as published", title_justify="left")
        for method, column, value in result.rows():
            name = label(method) if column == WHOLE else f"{label(method)}, {column}"
            further_table.add_row(name, f"{value:.{result.decimals}f}")
        further_table.caption = f"{result.tasks} tasks; {result.source}"
        tables.append(further_table)
    disagreements = Table("where", "printed", "by computation", title="What does not agree", title_justify="left")
    for disagreement in publication.disagreements:
        disagreements.add_row(disagreement.place, disagreement.value, disagreement.computed)
    return [*tables, disagreements]
