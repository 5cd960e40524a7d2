"""What the paper published, as data beside its source, and what in it does not agree with itself.

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
import yaml
from rich.table import Table

from captrain.evaluation import label, read
from captrain.records import Record

NOT_RUN = "not run here"
WHOLE = "all"
"""The column that is over all tasks of a table."""


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
        """The number of tasks nearest to a printed value."""
        return round(value * self.tasks[column] / 100) if self.unit == "percent" else round(value)

    def printed(self, count: int, column: str) -> float:
        """What a count of tasks prints as."""
        return round(100 * count / self.tasks[column], self.decimals) if self.unit == "percent" else count

    def shown(self, value: float) -> str:
        """As it was printed."""
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


class Selection(Record):
    """How often each candidate was retained in `runs` runs; kept from `needed` on, `kept` of them."""

    source: str
    runs: int
    needed: int
    kept: int
    times: dict[str, int]


class Stated(Record):
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
    """Everything in `published.yaml`."""

    paper: str
    model: str
    tables: dict[str, Rates]
    curves: dict[str, Curve]
    selection: Selection
    stated: list[Stated]
    training: Training


class Claim(NamedTuple):
    """TRACE ahead of another method: tasks that each passed, of how many, once each."""

    table: str
    column: str
    second: str
    tasks: int
    passed: int
    passed_second: int


@dataclass(frozen=True)
class Contradiction:
    """One published number that cannot be, or does not agree with another: where, what is printed, what it is by
    computation."""

    where: str
    printed: str
    computed: str


@cache
def published() -> Published:
    """The published numbers."""
    return Published.model_validate(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()))


def table(root: Path) -> pd.DataFrame:
    """Every published number beside ours.

    Args:
        root: of a project with results.

    Returns:
        What (a table, a curve or the selection), method (or candidate), at (a column or point), published, tasks (of
        the published number), ours (in the same unit), our_tasks; the last two are empty where it was not run here.
    """
    known = published()
    rows = []
    for name, rates in known.tables.items():
        found = _ours(root, rates)
        for method, columns in rates.values.items():
            for column, value in columns.items():
                ours, tasks = found.get((method, column), (None, None))
                rows.append((name, method, column, value, rates.tasks[column], ours, tasks))
    for name, curve in known.curves.items():
        tasks = known.tables[curve.table].tasks[WHOLE]
        for method, points in curve.lines.items():
            rows += [(name, method, str(point), value, tasks, None, None) for point, value in points.items()]
    rows += [("selection", name, "runs", times, None, None, None) for name, times in known.selection.times.items()]
    columns = ["what", "method", "at", "published", "tasks", "ours", "our_tasks"]
    numbers = {"published": float, "ours": float, "tasks": "Int64", "our_tasks": "Int64"}
    return pd.DataFrame(rows, columns=columns).astype(numbers)


def reference(results: Path) -> tuple[str, dict[str, float]]:
    """What was published of the very thing that was measured in `results`: the title of the table, and method -> share
    of all tasks passed. "" and {} where another thing was measured, or no table of passed tasks is of it."""
    for rates in published().tables.values():
        if rates.unit != "mean" and _same(results, rates):
            scale = 100 if rates.unit == "percent" else rates.tasks[WHOLE]
            return rates.title, {method: values[WHOLE] / scale for method, values in rates.values.items()}
    return "", {}


def _same(results: Path, rates: Rates) -> bool:
    """Whether the table's benchmark was played in `results`, with the paper's model."""
    path = results / "spec.yaml"
    spec = yaml.safe_load(path.read_text()) if path.exists() else {}
    model = str((spec.get("base") or {}).get("model") or "").split("@")[0]
    same = all((spec.get("benchmark") or {}).get(key) == value for key, value in rates.benchmark.items())
    return same and model.split("/")[-1] == published().model.split("/")[-1]


def _ours(root: Path, rates: Rates) -> dict[tuple[str, str], tuple[float, int]]:
    """(method, column) -> our number in the table's unit and its tasks; {} where another thing was measured."""
    if not _same(root / "results", rates):
        return {}
    folder = root / "results/evaluation"
    frames = [read(folder, "main").assign(kind=WHOLE), read(folder, "kinds")]
    found = {}
    for row in pd.concat(frames).dropna(subset=["pass_rate"]).to_dict("records"):
        scale = {"percent": 100.0, "count": float(row["tasks"]), "mean": 1.0}[rates.unit]
        value = row["mean_reward"] if rates.unit == "mean" else row["pass_rate"]
        found[str(row["method"]), str(row["kind"])] = (float(value * scale), int(row["tasks"]))
    return found


def shown(root: Path) -> list[Table]:
    """The tables with ours beside them, and the contradictions, to be printed; curves are left to `table`."""
    known, rows = published(), table(root).to_dict("records")
    drawn = []
    for name, rates in known.tables.items():
        made = Table(title=f"{rates.title}, as published", title_justify="left", caption_justify="left")
        for heading in ("method", *(f"{column}, {tasks} tasks" for column, tasks in rates.tasks.items()), "ours"):
            made.add_column(heading, justify="left" if heading == "method" else "right")
        for method, values in rates.values.items():
            ours = [
                f"{row['at']} {rates.shown(row['ours'])} ({row['our_tasks']} tasks)"
                for row in rows
                if (row["what"], row["method"]) == (name, method) and not pd.isna(row["ours"])
            ]
            cells = [rates.shown(values[column]) for column in rates.tasks]
            made.add_row(label(method), *cells, ", ".join(ours) or NOT_RUN)
        made.caption = f"{known.paper}: {rates.source}"
        drawn.append(made)
    found = Table("where", "printed", "by computation", title="What does not agree", title_justify="left")
    for one in contradictions():
        found.add_row(one.where, one.printed, one.computed)
    return [*drawn, found]


def claims() -> list[Claim]:
    """TRACE against every other row of each table that counts tasks, column by column."""
    return [
        Claim(
            *(name, column, method, rates.tasks[column]),
            passed=rates.count(rates.values["trace"][column], column),
            passed_second=rates.count(values[column], column),
        )
        for name, rates in published().tables.items()
        if rates.unit != "mean"
        for method, values in rates.values.items()
        if method != "trace"
        for column in rates.tasks
    ]


def contradictions() -> list[Contradiction]:
    """What cannot be, or does not agree, in the order of the file."""
    known = published()
    return [*_uncountable(known), *_parts(known), *_ends(known), *_differences(known), *_kept(known), *_budget(known)]


def _uncountable(known: Published) -> Iterator[Contradiction]:
    """Rates that no count of tasks prints as."""
    cells: dict[tuple[str, str, float], list[str]] = {}
    for name, rates in known.tables.items():
        for method, columns in rates.values.items():
            for column, value in columns.items():
                cells.setdefault((name, column, value), []).append(f"{name}, {label(method)}, {column}")
    for name, curve in known.curves.items():
        for method, points in curve.lines.items():
            for point, value in points.items():
                cells.setdefault((curve.table, WHOLE, value), []).append(f"{name}, {label(method)} at {point}")
    for (name, column, value), places in cells.items():
        rates = known.tables[name]
        if rates.unit == "mean" or rates.trials != 1:
            continue
        near = rates.count(value, column)
        if value not in (rates.printed(near, column), *(rates.printed(near + step, column) for step in (-1, 1))):
            exact = value * rates.tasks[column] / 100
            options = " and ".join(
                f"{count} of {rates.tasks[column]} print as {rates.shown(rates.printed(count, column))}"
                for count in (int(exact), int(exact) + 1)
            )
            yield Contradiction("; ".join(places), rates.shown(value), f"no count of tasks: {options}")


def _parts(known: Published) -> Iterator[Contradiction]:
    """Wholes that the mean of their parts, weighted by tasks, cannot round to."""
    for name, rates in known.tables.items():
        parts = [column for column in rates.tasks if column != WHOLE]
        if not parts or rates.unit == "count":
            continue
        for method, values in rates.values.items():
            mean = sum(values[part] * rates.tasks[part] for part in parts) / sum(rates.tasks[part] for part in parts)
            # Parts and whole are each rounded, so they may differ by a whole last digit.
            if abs(mean - values[WHOLE]) > 10.0**-rates.decimals:
                yield Contradiction(
                    f"{name}, {label(method)}, {WHOLE}",
                    rates.shown(values[WHOLE]),
                    f"the mean of {' and '.join(parts)}, weighted by tasks, is {mean:.{rates.decimals + 1}f}",
                )


def _ends(known: Published) -> Iterator[Contradiction]:
    """Curves that do not start at the row that they start from, or do not come to their method's own row."""
    for name, curve in known.curves.items():
        rates = known.tables[curve.table]
        starts: dict[float, list[str]] = {}
        for method, points in curve.lines.items() if curve.start else ():
            starts.setdefault(points[min(points)], []).append(label(method))
        for value, methods in starts.items():
            row = rates.values[curve.start or ""]
            if value != row[WHOLE]:
                same = "".join(f"; {rates.shown(value)} is {column}'s" for column in row if row[column] == value)
                yield Contradiction(
                    f"{name}, first point of {', '.join(methods)}",
                    rates.shown(value),
                    f"{label(curve.start or '')}, {WHOLE}, of {curve.table} is {rates.shown(row[WHOLE])}{same}",
                )
        for method, points in curve.lines.items():
            row = rates.values[method][WHOLE]
            if row not in points.values():
                yield Contradiction(
                    f"{name}, {label(method)}",
                    ", ".join(rates.shown(value) for value in points.values()),
                    f"its row of {curve.table}, {rates.shown(row)}, is no point of the curve",
                )


def _differences(known: Published) -> Iterator[Contradiction]:
    """Stated differences that are not those of the counts of tasks."""
    for one in known.stated:
        rates = known.tables[one.table]
        counts = [rates.count(rates.values[method][WHOLE], WHOLE) for method in (one.first, one.second)]
        difference = rates.printed(counts[0] - counts[1], WHOLE)
        if difference != one.difference:
            yield Contradiction(
                f"text, {label(one.first)} over {label(one.second)} on {one.table}",
                rates.shown(one.difference),
                f"{counts[0] - counts[1]} of {rates.tasks[WHOLE]} tasks are {rates.shown(difference)}; what is printed "
                "is the difference of rounded rates",
            )


def _kept(known: Published) -> Iterator[Contradiction]:
    """Candidates retained more often than there were runs, or another number kept than the rule keeps."""
    chosen = known.selection
    for name, times in chosen.times.items():
        if times > chosen.runs:
            yield Contradiction(f"selection, {name}", str(times), f"there were {chosen.runs} runs")
    kept = sum(times >= chosen.needed for times in chosen.times.values())
    if kept != chosen.kept:
        rule = f"{kept} were retained in {chosen.needed} of {chosen.runs} runs or more"
        yield Contradiction("selection, capabilities kept", str(chosen.kept), rule)


def _budget(known: Published) -> Iterator[Contradiction]:
    """Training that does not fit into the rollouts that it is said to have used."""
    said = known.training
    least = said.adapters * said.group_size * said.groups_per_step[0] * said.steps[0]
    if least > said.rollouts:
        yield Contradiction(
            "training on tau2-bench",
            f"{said.rollouts:,} rollouts",
            f"{said.adapters} adapters x {said.steps[0]} steps x {said.groups_per_step[0]} groups of "
            f"{said.group_size}, the least stated, are {least:,}",
        )
