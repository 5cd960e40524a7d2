"""The whole pipeline over seeds and experiments. Run by `make replicate SEEDS="0 1 2" EXPERIMENTS="default rare"`.

A point is an experiment with a seed. It runs `dvc repro` in a workspace of its own, .cache/replicates/<point>: the
files that git keeps, as they lie here, with a params.yaml of its own and the DVC cache of this repository, so that a
stage which two points share (the base model of a seed) runs once. A point that is up to date is not run again, one
that fails is reported and the others go on. At the end the points are gathered in results/replicates/.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

from captrain.evaluation import BASE, TRACE, read
from captrain.records import publish_text

GRPO = "grpo_target"
PLANTED = {"precondition_verification", "record_selection", "multi_step_completion", "argument_precision"}
"""What the demonstrations of the base lack (captrain.base.demonstrations), by the names the analyst gives it."""
CONFIDENCE = 0.95
OVERRIDES = ["machine.workers=1"]
"""Points run side by side, each in one process; `machine` is no param, so no stage runs again for it."""
LOCAL = "[core]\n    no_scm = true\n[cache]\n    dir = {cache}\n"


@dataclass(frozen=True)
class Point:
    """An experiment with a seed."""

    experiment: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its workspace."""
        return f"{self.experiment}-{self.seed}"

    def workspace(self, root: Path) -> Path:
        """Where it runs."""
        return root / ".cache/replicates" / self.name


@dataclass(frozen=True)
class Outcome:
    """How a point ended: `failure` is empty unless it failed."""

    point: Point
    seconds: float
    ran: bool
    failure: str = ""


def prepare(point: Point, root: Path) -> Path:
    """Make the workspace, or bring its code up to date; what ran there stays."""
    workspace = point.workspace(root)
    for name in ("conf", "src", "stages"):  # a file that is gone here must not stay there
        shutil.rmtree(workspace / name, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        # Results are the point's own: with those of another run it would look as if it had run.
        if name.startswith(("results/", ".cache/")) or name == "dvc.lock" or not (root / name).is_file():
            continue
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, workspace / name)
    cache = os.path.relpath(root / ".dvc/cache", workspace / ".dvc")
    publish_text(workspace / ".dvc/config.local", LOCAL.format(cache=cache))
    choice = {"experiment": point.experiment, "seed": point.seed, "overrides": OVERRIDES}
    publish_text(workspace / "params.yaml", yaml.safe_dump(choice, sort_keys=False))
    return workspace


def run_point(point: Point, root: Path) -> Outcome:
    """Run a point, unless its results are there and DVC finds nothing changed."""
    start = time.monotonic()
    workspace = prepare(point, root)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DVC_NO_ANALYTICS": "1"}
    # The code that runs is the code that DVC hashes: the workspace's, not the one that is installed.
    env |= {"PYTHONPATH": str(workspace / "src"), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"}
    dvc = [sys.executable, "-m", "dvc"]

    def run(*arguments: str, output: Any = subprocess.DEVNULL) -> int:
        return subprocess.run([*dvc, *arguments], cwd=workspace, env=env, stdout=output, stderr=output).returncode

    if (workspace / "results/evaluation/metrics.json").exists() and run("status", "--quiet") == 0:
        return Outcome(point, time.monotonic() - start, ran=False)
    log = workspace / "log.txt"
    with log.open("w") as file:
        status = run("repro", output=file)
    return Outcome(point, time.monotonic() - start, ran=True, failure=reason(log) if status else "")


def reason(log: Path) -> str:
    """Why a run failed: its error message, or else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("error: ")]
    return (said or lines or ["it said nothing"])[-1]


def next_point(waiting: Sequence[Point], running: Collection[Point], warm: Collection[int]) -> Point | None:
    """The first point that may start: two points of a seed run at once only when one of the seed has run before, so
    that its base model is trained once."""
    busy = {point.seed for point in running}
    return next((point for point in waiting if point.seed in warm or point.seed not in busy), None)


def run_all(points: Sequence[Point], root: Path, jobs: int) -> list[Outcome]:
    """Run all points, `jobs` at a time, with a line for each as it ends."""
    waiting, warm, over = list(points), set[int](), list[Outcome]()
    running: dict[Future[Outcome], Point] = {}
    with ThreadPoolExecutor(jobs) as pool:
        while waiting or running:
            while len(running) < jobs and (point := next_point(waiting, running.values(), warm)):
                waiting.remove(point)
                running[pool.submit(run_point, point, root)] = point
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                outcome = future.result()
                over.append(outcome)
                if not outcome.failure:
                    warm.add(outcome.point.seed)
                print(f"[{len(over)}/{len(points)}] {line(outcome, root)}", flush=True)
    return over


def line(outcome: Outcome, root: Path) -> str:
    """One outcome in one line."""
    if outcome.failure:
        log = (outcome.point.workspace(root) / "log.txt").relative_to(root)
        return f"{outcome.point.name} FAILED after {outcome.seconds:.0f} s: {outcome.failure} (see {log})"
    what = f"ran in {outcome.seconds:.0f} s" if outcome.ran else "was up to date"
    return f"{outcome.point.name} {what}"


def gather(points: Iterable[Point], root: Path) -> pd.DataFrame:
    """One row a point: pass rates of all methods, rollouts spent, the difference to GRPO on target, what was
    selected."""
    return pd.DataFrame([row_of(point, point.workspace(root) / "results") for point in points])


def row_of(point: Point, results: Path) -> dict[str, Any]:
    """See `gather`."""
    main = read(results / "evaluation", "main").set_index("method")
    pairs = read(results / "evaluation", "differences").set_index(["first", "second"])
    pair = pairs.loc[(TRACE, GRPO)]
    candidates = json.loads((results / "capabilities/selection.json").read_text())["candidates"]
    selected = {one["id"] for one in candidates if one["selected"]}
    rejected = {one["id"] for one in candidates} - selected
    names = {method: str(method).removeprefix("bound:").replace(":", "_") for method in main.index}
    return {
        "experiment": point.experiment,
        "seed": point.seed,
        **{names[method]: rate for method, rate in main["pass_rate"].items()},
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
        quantities = {name: some[name] for name in (BASE, GRPO, TRACE)}
        quantities |= {f"{TRACE}-{other}": some[TRACE] - some[other] for other in (GRPO, BASE)}
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
    parser.add_argument("--jobs", type=int, default=2, help="points at a time, one thread each")
    options = parser.parse_args()
    points = list(dict.fromkeys(Point(name, seed) for seed in options.seeds for name in options.experiments))
    print(f"{len(points)} points, {options.jobs} at a time; each writes .cache/replicates/<point>/log.txt")
    outcomes = run_all(points, root, options.jobs)
    failed = {outcome.point for outcome in outcomes if outcome.failure}
    whole = [point for point in points if point not in failed]
    if whole:
        gathered = gather(whole, root)
        summary = summarise(gathered)
        write(gathered, summary, root / "results/replicates")
        Console(width=None if os.isatty(1) else 120).print(table(summary))
        print("each point: results/replicates/points.csv")
    if failed:
        print(f"{len(failed)} of {len(points)} points failed and are left out; run the same again to go on from there")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
