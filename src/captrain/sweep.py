"""`captrain-sweep`: the pipeline over a grid of settings, as a Hydra app over the same conf/.

    captrain-sweep -m selection.delta=0.1,0.2,0.3 capabilities.count=1,2,4

Every combination is a point (see `captrain.points`): the selection of params.yaml with the point's settings on top.
Hydra's launcher says where points run: one after another, `hydra/launcher=joblib` several at once, or
`hydra/launcher=submitit_slurm` each as a Slurm job. At the end the points that are whole are gathered in one table,
results/sweeps/<name>.parquet, named by `hydra.job.name`; it is read from their results, so that running the same again
costs seconds.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from captrain import points
from captrain.errors import UserError, entry_point
from captrain.points import Point
from captrain.records import publish_text
from captrain.spec import Choice, choice

JOBS = Path(".cache/sweeps")
"""Hydra's own folders, one for each job; nothing in them is a result."""
FAILURE = "failed.txt"
WHOLE = "whole.txt"


def point_of(base: Choice, settings: Sequence[str]) -> Point:
    """The point that a Hydra job stands for: its settings win over those of params.yaml."""
    given = dict(setting.split("=", 1) for setting in settings)
    experiment, seed = given.pop("experiment", base.experiment), int(given.pop("seed", base.seed))
    kept = [one for one in base.overrides if one.lstrip("+").split("=", 1)[0] not in {key.lstrip("+") for key in given}]
    overrides = [*kept, *(f"{key}={value}" for key, value in given.items())]
    return Point(Choice(experiment=experiment, seed=seed, overrides=overrides))


def job(config: Any) -> None:
    """One job of the sweep, wherever the launcher runs it: bring its point up to date, and note how that ended.

    A point that fails is noted and not raised, so that the others go on under every launcher.
    """
    from hydra.core.hydra_config import HydraConfig

    run = HydraConfig.get()
    root, folder = Path(run.runtime.cwd), Path(run.runtime.output_dir)
    point = point_of(choice(root / "params.yaml"), run.overrides.task)
    try:
        points.run(point, root)
    except UserError as error:
        publish_text(folder / FAILURE, error.problem)
        print(f"{point.name}: {error}", flush=True)
    else:
        publish_text(folder / WHOLE, point.name)
        print(f"{point.name} is whole", flush=True)


def row_of(results: Path) -> dict[str, Any]:
    """What a whole point has come to: its metrics, under dotted names, and what was selected."""
    metrics = json.loads((results / "evaluation/metrics.json").read_text())
    candidates = json.loads((results / "capabilities/selection.json").read_text())["candidates"]
    selected = sorted(one["id"] for one in candidates if one["selected"])
    return {**pd.json_normalize(metrics).iloc[0].to_dict(), "selected": ",".join(selected)}


def gather(jobs: Path, root: Path) -> tuple[pd.DataFrame, list[str]]:
    """One row for each job whose point is whole, its parameters first; and what befell the others."""
    base, rows, failures = choice(root / "params.yaml"), list[dict[str, Any]](), list[str]()
    folders = sorted((path for path in jobs.glob("*") if path.name.isdigit()), key=lambda path: int(path.name))
    for folder in folders:
        settings = yaml.safe_load((folder / ".hydra/overrides.yaml").read_text())
        point = point_of(base, settings)
        # By its name, because a job of an earlier sweep may still be out and write here.
        if not (folder / WHOLE).exists() or (folder / WHOLE).read_text() != point.name:
            failure = folder / FAILURE
            failures.append(failure.read_text() if failure.exists() else f"point {point.name} did not come to its end")
            continue
        given = {key: yaml.safe_load(value) for key, value in (one.split("=", 1) for one in settings)}
        rows.append({**given, "point": point.name, **row_of(point.workspace(root) / "results")})
    return pd.DataFrame(rows), failures


@entry_point
def main() -> None:
    """Entry point of the `captrain-sweep` command; exit status 1 if a point failed.

    Raises:
        UserError: it was not started in the root of a repository, or without -m.
    """
    import hydra

    root = Path.cwd()
    if not (root / "dvc.yaml").exists():
        raise UserError(f"there is no dvc.yaml in {root.name}/", "run captrain-sweep in the root of the repository")
    if not {"-m", "--multirun"} & set(sys.argv):
        raise UserError("captrain-sweep runs a grid of points", "give -m, or use `dvc repro` for a single one")
    named = [one.split("=", 1)[1] for one in sys.argv if one.startswith("hydra.job.name=")]
    name = named[-1] if named else "sweep"
    jobs = root / JOBS / name
    shutil.rmtree(jobs, ignore_errors=True)
    places = [f"hydra.sweep.dir={jobs}", "hydra.sweep.subdir=${hydra.job.num}", "hydra.job.chdir=false"]
    sys.argv += [*places, *([] if named else [f"hydra.job.name={name}"])]
    status = None
    try:
        hydra.main(version_base="1.3", config_path=str(root / "conf"), config_name="config")(job)()
    except SystemExit as ended:  # a job of a cluster that died has said nothing, and others may be whole
        status = ended.code
    table, failures = gather(jobs, root)
    if len(table):
        path = root / "results/sweeps" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table.to_parquet(path, index=False)
        print(f"{len(table)} points in {path.relative_to(root)}")
    for failure in failures:
        print(failure)
    if failures:
        print(f"{len(failures)} of {len(table) + len(failures)} points failed; run the same again to go on from there")
        raise SystemExit(1)
    if status:
        raise SystemExit(status)
