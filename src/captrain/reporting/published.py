"""Numbers of the paper, as data beside their source, and the contradictions among them.

The numbers lie in `published.yaml` as they were printed and are never mixed with measured ones: `table` sets ours
beside them only where the same benchmark was played with the same model. `contradictions` computes, and types no
finding: a rate over tasks that were each played once is a count over them, a curve starts and ends at rows of its
table, a stated difference is that of two counts, and a budget holds the training that is said to have used it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import pandas as pd
from pydantic import BaseModel
from rich.table import Table

from captrain.evaluation import evaluation_table, label
from captrain.records import JsonObject, Record, read_yaml

NOT_RUN = "not run here"
WHOLE = "all"
"""The column that is over all tasks of a table."""
GAIN = "gain over the base"
"""The column of a difference that is stated without the rate itself."""


class Rates(Record):
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

    def count(self, value: float, column: str) -> int:
        """Return the number of tasks nearest to a printed value."""
        return round(value * self.tasks[column] / 100) if self.unit == "percent" else round(value)

    def printed_rate(self, count: int, column: str) -> float:
        """Round a count of tasks as the table prints it."""
        return round(100 * count / self.tasks[column], self.decimals) if self.unit == "percent" else count

    def formatted(self, value: float) -> str:
        """Format a value with the decimals that the table prints."""
        return f"{value:.{self.decimals}f}"


class Curve(Record):
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
        """List method, what its number is of, and the number."""
        values = [(method, WHOLE, value) for method, value in self.values.items()]
        return values + [(method, GAIN, value) for method, value in self.gains.items()]


class Selection(Record):
    """Retention of each candidate, in how many of `runs` runs; kept from `needed` on, `kept` of them."""

    source: str
    runs: int
    needed: int
    kept: int
    times: dict[str, int]


class StatedDifference(Record):
    """A difference that the text states, in the unit of the table."""

    table: str
    first: str
    second: str
    difference: float


class Training(Record):
    """Settings of TRACE's training, ranges as (least, most)."""

    source: str
    adapters: int
    group_size: int
    groups_per_step: tuple[int, int]
    steps: tuple[int, int]
    rollouts: int


class Published(Record):
    """Content of `published.yaml`."""

    paper: str
    model: str
    tables: dict[str, Rates]
    further: dict[str, FurtherResult]
    curves: dict[str, Curve]
    selection: Selection
    stated: list[StatedDifference]
    training: Training


class Claim(NamedTuple):
    """TRACE ahead of another method: tasks that each passed, of how many, once each."""

    table: str
    column: str
    second: str
    tasks: int
    passed: int
    passed_second: int


class _Setting(BaseModel):
    """Fields that are read of a spec.yaml of any version."""

    base: JsonObject = {}
    benchmark: JsonObject = {}


@dataclass(frozen=True)
class Contradiction:
    """One published number that cannot be, or does not agree with another: its place, what is printed, what it is by
    computation."""

    place: str
    printed_value: str
    computed: str


@cache
def read_published() -> Published:
    """Read the published numbers."""
    return read_yaml(Path(__file__).with_suffix(".yaml"), Published)


def table(root: Path) -> pd.DataFrame:
    """Tabulate every published number beside ours.

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
        measured = _measured(root, rates)
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
    """Look up what was published of the very thing that was measured in `results`: the title of the table, and method
    -> share of all tasks passed. "" and {} where another thing was measured, or no table of passed tasks is of it."""
    for rates in read_published().tables.values():
        if rates.unit != "mean" and _same(results, rates):
            scale = 100 if rates.unit == "percent" else rates.tasks[WHOLE]
            return rates.title, {method: values[WHOLE] / scale for method, values in rates.values.items()}
    return "", {}


def _same(results: Path, rates: Rates) -> bool:
    """Return whether the table's benchmark was played in `results`, with the paper's model."""
    path = results / "spec.yaml"
    spec = read_yaml(path, _Setting) if path.exists() else _Setting()
    model = str(spec.base.get("model") or "").split("@")[0]
    same = all(spec.benchmark.get(key) == value for key, value in rates.benchmark.items())
    return same and model.split("/")[-1] == read_published().model.split("/")[-1]


def _measured(root: Path, rates: Rates) -> dict[tuple[str, str], tuple[float, int]]:
    """Read our numbers in the table's unit and their tasks, by (method, column); {} if another thing was measured."""
    if not _same(root / "results", rates):
        return {}
    folder = root / "results/evaluation"
    main, kinds = (
        evaluation_table(folder, name, ["method", "pass_rate", "mean_reward", "tasks"]) for name in ("main", "kinds")
    )
    frames = [main.assign(kind=WHOLE), kinds]
    measured = {}
    for row in pd.concat(frames).dropna(subset=["pass_rate"]).to_dict("records"):
        scale = {"percent": 100.0, "count": float(row["tasks"]), "mean": 1.0}[rates.unit]
        value = row["mean_reward"] if rates.unit == "mean" else row["pass_rate"]
        measured[str(row["method"]), str(row["kind"])] = (float(value * scale), int(row["tasks"]))
    return measured


def published_tables(root: Path) -> list[Table]:
    """Render the tables with ours beside them, and the contradictions; curves are left to `table`."""
    publication, rows = read_published(), table(root).to_dict("records")
    tables = []
    for name, rates in publication.tables.items():
        rates_table = Table(title=f"{rates.title}, as published", title_justify="left", caption_justify="left")
        for heading in ("method", *(f"{column}, {tasks} tasks" for column, tasks in rates.tasks.items()), "ours"):
            rates_table.add_column(heading, justify="left" if heading == "method" else "right")
        for method, values in rates.values.items():
            cells_here = [
                f"{row['at']} {rates.formatted(row['ours'])} ({row['our_tasks']} tasks)"
                for row in rows
                if (row["what"], row["method"]) == (name, method) and not pd.isna(row["ours"])
            ]
            cells = [rates.formatted(values[column]) for column in rates.tasks]
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
    for contradiction in contradictions():
        disagreements.add_row(contradiction.place, contradiction.printed_value, contradiction.computed)
    return [*tables, disagreements]


def claims() -> list[Claim]:
    """List TRACE against every other row of each table that counts tasks, column by column."""
    return [
        Claim(
            *(name, column, method, rates.tasks[column]),
            passed=rates.count(rates.values["trace"][column], column),
            passed_second=rates.count(values[column], column),
        )
        for name, rates in read_published().tables.items()
        if rates.unit != "mean"
        for method, values in rates.values.items()
        if method != "trace"
        for column in rates.tasks
    ]


def contradictions() -> list[Contradiction]:
    """List the published numbers that cannot be, or do not agree, in the order of the file."""
    publication = read_published()
    return [
        *_uncountable(publication),
        *_parts(publication),
        *_ends(publication),
        *_differences(publication),
        *_retained(publication),
        *_budget(publication),
    ]


def _uncountable(publication: Published) -> Iterator[Contradiction]:
    """Yield rates that no count of tasks prints as."""
    cells: dict[tuple[str, str, float], list[str]] = {}
    for name, rates in publication.tables.items():
        for method, columns in rates.values.items():
            for column, value in columns.items():
                cells.setdefault((name, column, value), []).append(f"{name}, {label(method)}, {column}")
    for name, curve in publication.curves.items():
        for method, points in curve.lines.items():
            for point, value in points.items():
                cells.setdefault((curve.table, WHOLE, value), []).append(f"{name}, {label(method)} at {point}")
    for (name, column, value), places in cells.items():
        rates = publication.tables[name]
        if rates.unit == "mean" or rates.trials != 1:
            continue
        near = rates.count(value, column)
        if value not in (
            rates.printed_rate(near, column),
            *(rates.printed_rate(near + step, column) for step in (-1, 1)),
        ):
            exact = value * rates.tasks[column] / 100
            options = " and ".join(
                f"{count} of {rates.tasks[column]} print as {rates.formatted(rates.printed_rate(count, column))}"
                for count in (int(exact), int(exact) + 1)
            )
            yield Contradiction("; ".join(places), rates.formatted(value), f"no count of tasks: {options}")


def _parts(publication: Published) -> Iterator[Contradiction]:
    """Yield wholes that the mean of their parts, weighted by tasks, cannot round to."""
    for name, rates in publication.tables.items():
        parts = [column for column in rates.tasks if column != WHOLE]
        if not parts or rates.unit == "count":
            continue
        for method, values in rates.values.items():
            mean = sum(values[part] * rates.tasks[part] for part in parts) / sum(rates.tasks[part] for part in parts)
            # Parts and whole are each rounded, so they may differ by a whole last digit.
            if abs(mean - values[WHOLE]) > 10.0**-rates.decimals:
                yield Contradiction(
                    f"{name}, {label(method)}, {WHOLE}",
                    rates.formatted(values[WHOLE]),
                    f"the mean of {' and '.join(parts)}, weighted by tasks, is {mean:.{rates.decimals + 1}f}",
                )


def _ends(publication: Published) -> Iterator[Contradiction]:
    """Yield curves that do not start at the row that they start from, or do not come to their method's own row."""
    for name, curve in publication.curves.items():
        rates = publication.tables[curve.table]
        starts: dict[float, list[str]] = {}
        for method, points in curve.lines.items() if curve.start else ():
            starts.setdefault(points[min(points)], []).append(label(method))
        for value, methods in starts.items():
            row = rates.values[curve.start or ""]
            if value != row[WHOLE]:
                same = "".join(f"; {rates.formatted(value)} is {column}'s" for column in row if row[column] == value)
                yield Contradiction(
                    f"{name}, first point of {', '.join(methods)}",
                    rates.formatted(value),
                    f"{label(curve.start or '')}, {WHOLE}, of {curve.table} is {rates.formatted(row[WHOLE])}{same}",
                )
        for method, points in curve.lines.items():
            row = rates.values[method][WHOLE]
            if row not in points.values():
                yield Contradiction(
                    f"{name}, {label(method)}",
                    ", ".join(rates.formatted(value) for value in points.values()),
                    f"its row of {curve.table}, {rates.formatted(row)}, is not a point of the curve",
                )


def _differences(publication: Published) -> Iterator[Contradiction]:
    """Yield stated differences that are not those of the counts of tasks."""
    for statement in publication.stated:
        rates = publication.tables[statement.table]
        counts = [rates.count(rates.values[method][WHOLE], WHOLE) for method in (statement.first, statement.second)]
        difference = rates.printed_rate(counts[0] - counts[1], WHOLE)
        if difference != statement.difference:
            yield Contradiction(
                f"text, {label(statement.first)} over {label(statement.second)} on {statement.table}",
                rates.formatted(statement.difference),
                f"{counts[0] - counts[1]} of {rates.tasks[WHOLE]} tasks are {rates.formatted(difference)}; what is "
                "printed is the difference of rounded rates",
            )


def _retained(publication: Published) -> Iterator[Contradiction]:
    """Yield candidates retained more often than there were runs, or another number kept than the rule keeps."""
    selection = publication.selection
    for name, times in selection.times.items():
        if times > selection.runs:
            yield Contradiction(f"selection, {name}", str(times), f"there were {selection.runs} runs")
    retained = sum(times >= selection.needed for times in selection.times.values())
    if retained != selection.kept:
        rule = f"{retained} were retained in {selection.needed} of {selection.runs} runs or more"
        yield Contradiction("selection, capabilities kept", str(selection.kept), rule)


def _budget(publication: Published) -> Iterator[Contradiction]:
    """Yield training that does not fit into the rollouts that it is said to have used."""
    training = publication.training
    least = training.adapters * training.group_size * training.groups_per_step[0] * training.steps[0]
    if least > training.rollouts:
        yield Contradiction(
            "training on tau2-bench",
            f"{training.rollouts:,} rollouts",
            f"{training.adapters} adapters x {training.steps[0]} steps x {training.groups_per_step[0]} groups of "
            f"{training.group_size}, the least stated, are {least:,}",
        )
