"""The whole pipeline over seeds and experiments. Run by `make replicate SEEDS="0 1 2" EXPERIMENTS="default rare"`.

Each experiment with each seed is a point (see `captrain.points`), run in a workspace of its own; stages that two points
share run once. A point that fails is reported and the others go on. At the end the points are gathered in
results/replicates/.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

from captrain import points
from captrain.errors import UserError
from captrain.evaluation import read
from captrain.methods import BASE, BASELINES, TRACE, pairs
from captrain.points import Point
from captrain.records import publish_text
from captrain.spec import Choice

GRPO = "grpo_target"
PLANTED = {"precondition_verification", "record_selection", "multi_step_completion", "argument_precision"}
"""What the demonstrations of the base lack (captrain.base.demonstrations), by the names the analyst gives it."""
ROWS = ("router:", "merged:", "control:")
"""Beginnings of the methods that are summarised beside the base, TRACE and the baselines."""
CONFIDENCE = 0.95
OVERRIDES = ["machine.workers=1"]
"""Points run side by side, each in one process; `machine` is no param, so no stage runs again for it."""


def run_all(wanted: Sequence[Point], root: Path, jobs: int) -> list[Point]:
    """Run all points, `jobs` at a time, with a line for each as it ends; returns those that failed."""
    start, failed = time.monotonic(), list[Point]()
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(points.run, point, root): point for point in wanted}
        for number, future in enumerate(as_completed(running), start=1):
            point = running[future]
            try:
                future.result()
                said = "is whole"
            except UserError as error:
                failed.append(point)
                said = f"FAILED: {error}"
            print(f"[{number}/{len(wanted)}, {time.monotonic() - start:.0f} s] {point.name} {said}", flush=True)
    return failed


def gather(whole: Iterable[Point], root: Path) -> pd.DataFrame:
    """One row a point: pass rates of all methods, rollouts spent, the difference to GRPO on target, what was
    selected."""
    return pd.DataFrame([row_of(point.choice, point.workspace(root) / "results") for point in whole])


def row_of(choice: Choice, results: Path) -> dict[str, Any]:
    """See `gather`."""
    main = read(results / "evaluation", "main").set_index("method")
    pair = read(results / "evaluation", "differences").set_index(["first", "second"]).loc[(TRACE, GRPO)]
    candidates = json.loads((results / "capabilities/selection.json").read_text())["candidates"]
    selected = {one["id"] for one in candidates if one["selected"]}
    rejected = {one["id"] for one in candidates} - selected
    return {
        "experiment": choice.experiment,
        "seed": choice.seed,
        **{str(method): rate for method, rate in main["pass_rate"].items()},
        "rollouts": main.loc[TRACE, "rollouts_spent"],
        "trace-grpo_target": pair["difference"],
        "low": pair["low"],
        "high": pair["high"],
        "planted_selected": len(selected & PLANTED),
        "distractors_selected": len(selected - PLANTED),
        "distractors_rejected": len(rejected - PLANTED),
    }


def summarise(points: pd.DataFrame) -> pd.DataFrame:
    """Mean over seeds with a t interval, for each experiment: pass rates, and differences paired by seed. With one
    seed there is no interval."""
    rows = []
    for experiment, some in points.groupby("experiment", sort=False):
        names = [name for name in some.columns if name in (BASE, TRACE, *BASELINES) or name.startswith(ROWS)]
        quantities = {name: some[name] for name in names}
        both = [(one, other) for one, other in pairs(names) if {one, other} <= {*names}]
        quantities |= {f"{one}-{other}": some[one] - some[other] for one, other in both}
        quantities = {name: known for name, values in quantities.items() if len(known := values.dropna())}
        for quantity, values in quantities.items():
            seeds, half = len(values), np.nan
            if seeds > 1:
                half = student.ppf((1 + CONFIDENCE) / 2, seeds - 1) * values.std(ddof=1) / np.sqrt(seeds)
            mean = values.mean()
            interval = {"mean": mean, "low": mean - half, "high": mean + half}
            rows.append({"experiment": experiment, "quantity": quantity, "seeds": seeds, **interval})
    return pd.DataFrame(rows)


def write(points: pd.DataFrame, summary: pd.DataFrame, folder: Path) -> None:
    """Publish points.csv and summary.csv."""
    for name, frame in (("points", points), ("summary", summary)):
        publish_text(folder / f"{name}.csv", frame.to_csv(index=False, float_format="%.6f", lineterminator="\n"))


def table(summary: pd.DataFrame) -> Table:
    """The summary, differences with their sign."""
    drawn = Table(title="Over seeds", title_justify="left")
    for name in ("experiment", "quantity", "seeds", "mean", f"{CONFIDENCE:.0%} interval"):
        drawn.add_column(name, justify="left" if name in ("experiment", "quantity") else "right")
    for row in summary.to_dict("records"):
        form = "+.3f" if "-" in row["quantity"] else ".3f"
        interval = "" if np.isnan(row["low"]) else f"{row['low']:{form}} to {row['high']:{form}}"
        drawn.add_row(row["experiment"], row["quantity"], str(row["seeds"]), f"{row['mean']:{form}}", interval)
    return drawn


def main() -> int:
    """Run, gather, print; the exit status is 1 if a point failed."""
    root = Path.cwd()
    known = sorted(path.stem for path in (root / "conf/experiment").glob("*.yaml"))
    parser = argparse.ArgumentParser(description="Run the pipeline over seeds and experiments and gather the results.")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--experiments", nargs="+", required=True, choices=known)
    parser.add_argument("--overrides", nargs="*", default=[], help="of every point, such as methods=all")
    parser.add_argument("--jobs", type=int, default=2, help="points at a time, one thread each")
    options = parser.parse_args()
    asked = dict.fromkeys((name, seed) for seed in options.seeds for name in options.experiments)
    overrides = [*OVERRIDES, *options.overrides]
    wanted = [Point(Choice(experiment=name, seed=seed, overrides=overrides)) for name, seed in asked]
    print(f"{len(wanted)} points, {options.jobs} at a time; each writes {points.WORKSPACES}/<point>/{points.LOG}")
    failed = run_all(wanted, root, options.jobs)
    whole = [point for point in wanted if point not in failed]
    if whole:
        gathered = gather(whole, root)
        summary = summarise(gathered)
        write(gathered, summary, root / "results/replicates")
        Console(width=None if os.isatty(1) else 120).print(table(summary))
        print("each point: results/replicates/points.csv")
    if failed:
        print(f"{len(failed)} of {len(wanted)} points failed and are left out; run the same again to go on from there")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
