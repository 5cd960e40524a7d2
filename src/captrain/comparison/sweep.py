"""`captrain-sweep`: the pipeline over a grid of settings, as a Hydra app over the same conf/.

    captrain-sweep -m selection.delta=0.1,0.2,0.3 capabilities.count=1,2,4
    captrain-sweep -m +study=rollouts

A study is a grid that conf/study/ keeps, for a figure of scripts/study_figures.py; what is given beside it wins.

Every combination is a point (`points`): the selection of params.yaml with the point's settings on top.
Hydra's launcher says where points run: one after another, `hydra/launcher=joblib` several at once, or
`hydra/launcher=submitit_slurm` each as a Slurm job. At the end the points that are whole are gathered in one table,
results/sweeps/<name>.csv, named by the study or by `hydra.job.name`; it is read from their results, so that running the
same again costs seconds.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from captrain.comparison import points
from captrain.comparison.points import LOCKS, SweepPoint, TableRow, is_execution, point_rows, write_table
from captrain.errors import UserError
from captrain.records import publish_text, read_yaml, refuse_keys
from captrain.run import (
    Choice,
    alternatives,
    conf_layers,
    entry_point,
    exclusive,
    load_choice,
    not_composed,
    searched_conf,
)

JOBS = Path(".cache/sweeps")
"""Hydra's own folders, one for each job; nothing in them is a result."""
FAILURE = "failed.txt"
WHOLE = "whole.txt"
STUDY = "+study"
LAUNCHERS = ("submitit.", "joblib.")
"""Modules whose errors say that a process died."""
HELP = """\
captrain-sweep -m [SETTING=VALUE,VALUE,...] [+study=NAME] [hydra/launcher=joblib|submitit_slurm]

The pipeline over every combination of these settings; params.yaml has what they do not name.

  -m                          run the grid (required)
  selection.delta=0.1,0.2     a setting of conf/ with its values
  +study=NAME                 a grid that conf/study/ keeps
  hydra/launcher=joblib       several points at once: hydra.launcher.n_jobs=2
  hydra/launcher=submitit_slurm   each point as a Slurm job
  hydra.job.name=NAME         names the table, results/sweeps/NAME.csv

Points are made once, share what did not change, and go on where they were cut off. docs: "Sweeps, seeds and Slurm"."""


def settings_of(overrides: Sequence[str]) -> dict[str, str]:
    """Return the settings of a Hydra job, without the study that asks for them: a point is named by its settings alone,
    so that studies share their points."""
    settings = dict(override.split("=", 1) for override in overrides)
    settings.pop(STUDY, None)
    return settings


def point_of(base: Choice, overrides: Sequence[str]) -> SweepPoint:
    """Make the point that a Hydra job stands for: its settings win over those of params.yaml."""
    settings = settings_of(overrides)
    experiment, seed = settings.pop("experiment", base.experiment), int(settings.pop("seed", base.seed))
    keys = {key.lstrip("+") for key in settings}
    inherited = [override for override in base.overrides if override.lstrip("+").split("=", 1)[0] not in keys]
    changes = [f"{key}={value}" for key, value in settings.items()]
    return SweepPoint(Choice(experiment=experiment, seed=seed, overrides=[*inherited, *changes]))


def job(config: Mapping[str, object]) -> None:
    """Run one job of the sweep, wherever the launcher runs it: bring its point up to date, and note how that ended.

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


def gather(jobs: Path, root: Path) -> tuple[list[TableRow], list[str]]:
    """Gather one row for each method of each job whose point is whole (see `point_rows`), the point's settings
    first; and what befell the other jobs."""
    base, rows, failures = load_choice(root / "params.yaml"), list[TableRow](), list[str]()
    folders = sorted((path for path in jobs.glob("*") if path.name.isdigit()), key=lambda path: int(path.name))
    for folder in folders:
        overrides = read_yaml(folder / ".hydra/overrides.yaml", list[str], f"remove {folder}, or run the sweep again")
        point = point_of(base, overrides)
        # By its name, because a job of an earlier sweep may still be out and write here.
        if not (folder / WHOLE).exists() or (folder / WHOLE).read_text() != point.name:
            failure = folder / FAILURE
            failures.append(failure.read_text() if failure.exists() else f"point {point.name} did not come to its end")
            continue
        settings = {key.lstrip("+"): value for key, value in settings_of(overrides).items()}
        varied = {key: value for key, value in settings.items() if not is_execution(f"{key}=")}
        selection = {"experiment": point.choice.experiment, "seed": point.choice.seed, **varied, "point": point.name}
        rows += [{**selection, **row} for row in point_rows(point, root)]
    return rows, failures


def sweep_name(arguments: Sequence[str], root: Path) -> str:
    """Name the sweep: `hydra.job.name`, or else its study.

    Raises:
        UserError: there is no such study.
    """
    settings = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    studies = sorted({path.stem for layer in conf_layers(root / "conf") for path in layer.glob("study/*.yaml")})
    if STUDY in settings and settings[STUDY] not in studies:
        raise UserError(f"there is no study {settings[STUDY]!r}", alternatives(settings[STUDY], studies))
    return settings.get("hydra.job.name") or settings.get(STUDY) or "sweep"


@partial(entry_point, stage=False)
def main() -> None:
    """Run the `captrain-sweep` command; exit status 1 if a point failed.

    Raises:
        UserError: it was not started in the root of a repository, or without -m, or there is no such study, or a
            sweep of this name runs.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(HELP)
        return
    refuse_keys(sys.argv[1:])  # before Hydra writes them into its folders
    root = Path.cwd()
    if not (root / "dvc.yaml").exists():
        raise UserError(f"there is no dvc.yaml in {root.name}/", "run captrain-sweep in the root of the repository")
    if not {"-m", "--multirun"} & set(sys.argv):
        raise UserError("captrain-sweep runs a grid of points", "give -m, or use `dvc repro` for a single one")
    name = sweep_name(sys.argv[1:], root)
    try:
        # Its folders and its table go by the name: of two sweeps the second would take the first one's away.
        with exclusive(root / LOCKS / f"sweep-{name}", wait=False):
            _sweep(name, root)
    except BlockingIOError:
        raise UserError(
            f"a sweep named {name} runs here already", "wait for its end, or give hydra.job.name=<another name>"
        ) from None


def _sweep(name: str, root: Path) -> None:
    """Run the points and write their table; exits with 1 if a point failed.

    Raises:
        UserError: the configuration does not compose.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    jobs = root / JOBS / name
    shutil.rmtree(jobs, ignore_errors=True)
    folders = [f"hydra.sweep.dir={jobs}", "hydra.sweep.subdir=${hydra.job.num}", "hydra.job.chdir=false"]
    sys.argv += [*folders, f"hydra.job.name={name}"]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # without it Hydra prints a traceback of what is ours to say
    status = 0
    try:
        with searched_conf(root / "conf") as conf:
            hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise not_composed(Path("conf"), error) from None
    except Exception as error:
        if not type(error).__module__.startswith(LAUNCHERS):
            raise
        status = 1  # a process or a job of a cluster that died has said nothing, and others may be whole
    rows, failures = gather(jobs, root)
    whole = len({row["point"] for row in rows})
    if whole:
        path = root / "results/sweeps" / f"{name}.csv"
        write_table(rows, path)
        print(f"{whole} points in {path.relative_to(root)}")
    for failure in failures:
        print(failure)
    if failures:
        print(f"{len(failures)} of {whole + len(failures)} points failed; run the same again to go on from there")
        raise SystemExit(1)
    if status:
        raise SystemExit(status)
