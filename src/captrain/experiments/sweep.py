"""`captrain-sweep`: the pipeline over a grid of settings, as a Hydra app over the same conf/.

    captrain-sweep -m selection.delta=0.1,0.2,0.3 capabilities.count=1,2,4
    captrain-sweep -m +study=rollouts

A study is a grid that conf/study/ keeps, for a figure of `captrain.reporting.studies`; what is given beside it wins.

Every combination is a point (`points`): the selection of params.yaml with the point's settings on top.
Hydra's launcher says where points run: one after another, `hydra/launcher=joblib` several at once, or
`hydra/launcher=submitit_slurm` each as a Slurm job. At the end the points that are whole are gathered in one table,
results/sweeps/<name>.csv, named by the study or by `hydra.job.name`; it is read from their results, so that running the
same again costs seconds.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from captrain.config import Choice, alternatives, load_choice
from captrain.errors import UserError
from captrain.execution import entry_point
from captrain.experiments import points
from captrain.experiments.gathering import rows_of, write
from captrain.experiments.points import Point
from captrain.records import publish_text

JOBS = Path(".cache/sweeps")
"""Hydra's own folders, one for each job; nothing in them is a result."""
FAILURE = "failed.txt"
WHOLE = "whole.txt"
STUDY = "+study"


def settings_of(overrides: Sequence[str]) -> dict[str, str]:
    """The settings of a Hydra job, without the study that asks for them: a point is named by its settings alone, so
    that studies share their points."""
    given = dict(override.split("=", 1) for override in overrides)
    given.pop(STUDY, None)
    return given


def point_of(base: Choice, settings: Sequence[str]) -> Point:
    """The point that a Hydra job stands for: its settings win over those of params.yaml."""
    given = settings_of(settings)
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
    point = point_of(load_choice(root / "params.yaml"), run.overrides.task)
    try:
        points.run(point, root)
    except UserError as error:
        publish_text(folder / FAILURE, error.problem)
        print(f"{point.name}: {error}", flush=True)
    else:
        publish_text(folder / WHOLE, point.name)
        print(f"{point.name} is whole", flush=True)


def gather(jobs: Path, root: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for each method of each job whose point is whole (see `gathering.rows_of`), the point's settings first;
    and what befell the other jobs."""
    base, rows, failures = load_choice(root / "params.yaml"), list[dict[str, Any]](), list[str]()
    folders = sorted((path for path in jobs.glob("*") if path.name.isdigit()), key=lambda path: int(path.name))
    for folder in folders:
        settings = yaml.safe_load((folder / ".hydra/overrides.yaml").read_text())
        point = point_of(base, settings)
        # By its name, because a job of an earlier sweep may still be out and write here.
        if not (folder / WHOLE).exists() or (folder / WHOLE).read_text() != point.name:
            failure = folder / FAILURE
            failures.append(failure.read_text() if failure.exists() else f"point {point.name} did not come to its end")
            continue
        given = {key.lstrip("+"): value for key, value in settings_of(settings).items()}
        swept = {key: value for key, value in given.items() if not f"{key}=".startswith(points.EXECUTION)}
        whole = {"experiment": point.choice.experiment, "seed": point.choice.seed, **swept, "point": point.name}
        rows += [{**whole, **row} for row in rows_of(point.choice, point.workspace(root) / "results")]
    return rows, failures


def named(arguments: Sequence[str], conf: Path) -> str:
    """What the sweep is called: `hydra.job.name`, or else its study.

    Raises:
        UserError: there is no such study.
    """
    given = {key: value for key, _, value in (one.partition("=") for one in arguments)}
    known = sorted(path.stem for path in (conf / "study").glob("*.yaml"))
    if STUDY in given and given[STUDY] not in known:
        raise UserError(f"there is no study {given[STUDY]!r}", alternatives(given[STUDY], known))
    return given.get("hydra.job.name") or given.get(STUDY) or "sweep"


@entry_point
def main() -> None:
    """Entry point of the `captrain-sweep` command; exit status 1 if a point failed.

    Raises:
        UserError: it was not started in the root of a repository, or without -m, or there is no such study.
    """
    import hydra

    root = Path.cwd()
    if not (root / "dvc.yaml").exists():
        raise UserError(f"there is no dvc.yaml in {root.name}/", "run captrain-sweep in the root of the repository")
    if not {"-m", "--multirun"} & set(sys.argv):
        raise UserError("captrain-sweep runs a grid of points", "give -m, or use `dvc repro` for a single one")
    name = named(sys.argv[1:], root / "conf")
    jobs = root / JOBS / name
    shutil.rmtree(jobs, ignore_errors=True)
    places = [f"hydra.sweep.dir={jobs}", "hydra.sweep.subdir=${hydra.job.num}", "hydra.job.chdir=false"]
    sys.argv += [*places, f"hydra.job.name={name}"]
    status = None
    try:
        hydra.main(version_base="1.3", config_path=str(root / "conf"), config_name="config")(job)()
    except SystemExit as ended:  # a job of a cluster that died has said nothing, and others may be whole
        status = ended.code
    rows, failures = gather(jobs, root)
    whole = len({row["point"] for row in rows})
    if whole:
        path = root / "results/sweeps" / f"{name}.csv"
        write(rows, path)
        print(f"{whole} points in {path.relative_to(root)}")
    for failure in failures:
        print(failure)
    if failures:
        print(f"{len(failures)} of {whole + len(failures)} points failed; run the same again to go on from there")
        raise SystemExit(1)
    if status:
        raise SystemExit(status)
