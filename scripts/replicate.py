"""The whole pipeline over seeds and experiments. Run by `make replicate SEEDS="0 1 2" EXPERIMENTS="default rare"`.

Each experiment with each seed is a point (see `captrain.comparison`) with a workspace of its own. A stage that two
points share runs once. If a point fails, the script reports it and goes on. At the end the points are gathered in
results/replicates/, or in its subfolder NAME. With --join, earlier points stay.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from captrain.comparison import (
    CONFIDENCE,
    GRPO,
    ComparisonRow,
    SweepPoint,
    TableRow,
    differences_over_seeds,
    grouped,
    headline_methods,
    point_rows,
    points,
    rates_over_seeds,
    read_rows,
    supervision,
    versus,
    write_table,
)
from captrain.errors import UserError
from captrain.records import require_file_name
from captrain.run import Choice, entry_point

WORDS = ("experiment", "method", "learns from", "reading")
"""Columns of the printed table that contain words."""
OVERRIDES = ["machine.workers=1"]
"""Points run side by side with one process each. It is no param, so no stage runs again because of it."""


def run_all(grid: Sequence[SweepPoint], root: Path, jobs: int) -> list[SweepPoint]:
    """Run all points, `jobs` at a time, print a line as each ends, and return the failed ones."""
    start, failed = time.monotonic(), list[SweepPoint]()
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(points.run, point, root): point for point in grid}
        for number, future in enumerate(as_completed(running), start=1):
            point = running[future]
            try:
                future.result()
                outcome = "is whole"
            except UserError as error:
                failed.append(point)
                outcome = f"FAILED: {error}"
            print(f"[{number}/{len(grid)}, {time.monotonic() - start:.0f} s] {point.name} {outcome}", flush=True)
    return failed


def gather(whole: Iterable[SweepPoint], root: Path) -> list[TableRow]:
    """Return one row per point and method."""
    return [row for point in whole for row in point_rows(point, root)]


def joined(rows: Sequence[TableRow], earlier: Sequence[TableRow]) -> list[TableRow]:
    """Add the earlier rows of other points, sorted by seed and in the order of the experiments."""
    new = {(row["experiment"], row["seed"]) for row in rows}
    union = [*(row for row in earlier if (row["experiment"], row["seed"]) not in new), *rows]
    order = [*dict.fromkeys(row["experiment"] for row in union)]
    return sorted(union, key=lambda row: (row["seed"], order.index(row["experiment"])))


def table(rates: Sequence[ComparisonRow], differences: Sequence[ComparisonRow]) -> Table:
    """Make a table of mean pass rates and differences to GRPO on the target."""

    def interval(low: float, high: float, form: str) -> str:
        return "" if np.isnan(low) else f"{low:{form}} to {high:{form}}"

    summary, heading = Table(title="Over seeds", title_justify="left"), f"{CONFIDENCE:.0%} interval"
    for name in (
        "experiment",
        "method",
        "learns from",
        "seeds",
        "mean",
        heading,
        "to GRPO on target",
        heading,
        "reading",
    ):
        summary.add_column(name, justify="left" if name in WORDS else "right")
    for experiment, methods in grouped(rates, "experiment").items():
        to_grpo = versus(grouped(differences, "experiment").get(experiment, []), GRPO)
        for row in (row for row in methods if row["method"] in headline_methods()):
            cells = [row["label"], supervision(row["method"]) or "", str(row["seeds"]), f"{row['pass_rate']:.3f}"]
            cells.append(interval(row["low"], row["high"], ".3f"))
            if difference := to_grpo.get(row["method"]):
                bounds = interval(difference.low, difference.high, "+.3f")
                cells += [f"{difference.mean:+.3f}", bounds, difference.reading]
            summary.add_row(experiment, *cells)
    return summary


def selections(rows: Sequence[ComparisonRow]) -> list[str]:
    """Count the points of each experiment by their selected capabilities, most frequent first."""
    lines = []
    for experiment, members in grouped(rows, "experiment").items():
        by_seed = {row["seed"]: row["selected"] for row in members}
        for selected, count in Counter(by_seed.values()).most_common():
            names = selected.replace(" ", ", ") or "nothing"
            lines.append(f"{experiment}: selected in {count} of {len(by_seed)} points: {names}")
    return lines


def folder_name(text: str) -> str:
    """Return a valid folder name, or ""."""
    try:
        return require_file_name(text, "--name") if text else text
    except UserError as error:
        raise argparse.ArgumentTypeError(error.problem) from None


@partial(entry_point, stage=False)
def main() -> None:
    """Run, gather and print; exit with 1 if a point failed."""
    root = Path.cwd()
    experiments = sorted(path.stem for path in (root / "conf/experiment").glob("*.yaml"))
    parser = argparse.ArgumentParser(description="Run the pipeline over seeds and experiments and gather the results.")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--experiments", nargs="+", required=True, choices=experiments)
    parser.add_argument("--overrides", nargs="*", default=[], help="of every point, such as methods=all")
    parser.add_argument("--name", type=folder_name, default="", help="of a folder in results/replicates/")
    parser.add_argument("--join", action="store_true", help="to the points that NAME has, made alike")
    parser.add_argument("--jobs", type=int, default=2, help="points at a time, one thread each")
    options = parser.parse_args()
    folder = root / "results/replicates" / options.name
    earlier = read_rows(folder / "points.csv") if options.join else []
    pairs = dict.fromkeys((name, seed) for seed in options.seeds for name in options.experiments)
    overrides = [*OVERRIDES, *options.overrides]
    grid = [SweepPoint(Choice(experiment=name, seed=seed, overrides=overrides)) for name, seed in pairs]
    print(f"{len(grid)} points, {options.jobs} at a time; each writes {points.WORKSPACES}/<point>/{points.LOG}")
    failed = run_all(grid, root, options.jobs)
    whole = [point for point in grid if point not in failed]
    if whole:
        rows = joined(gather(whole, root), earlier)
        rates, differences = rates_over_seeds(rows), differences_over_seeds(rows)
        for name, frame in (("points", rows), ("summary", rates), ("differences", differences)):
            write_table(frame, folder / f"{name}.csv")
        Console(width=None if os.isatty(1) else 140).print(table(rates, differences))
        print(*selections(rows), sep="\n")
        print(f"every method and difference: results/replicates/{options.name}; `make figures` draws them")
    if failed:
        print(f"{len(failed)} of {len(grid)} points failed and are left out; run the same again to go on from there")
        sys.exit(1)


if __name__ == "__main__":
    main()
