"""`captrain-sweep`: the pipeline over a grid of settings, as a Hydra app over conf/.

    captrain-sweep -m selection.delta=0.1,0.2,0.3 capabilities.count=1,2,4
    captrain-sweep -m +study=rollouts

A study is a grid in conf/study/, for a figure of scripts/study_figures.py. Settings on the command line win over it.

Every combination is a point (`points`): params.yaml with the point's settings on top. Hydra's launcher runs the points:
one after another by default, several at once with `hydra/launcher=joblib`, each as a Slurm job with
`hydra/launcher=submitit_slurm`. At the end the finished points are gathered in results/sweeps/<name>.csv, named by the
study or by `hydra.job.name`. The table is read from their results, so running the same sweep again takes seconds.
"""

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from captrain.comparison import points
from captrain.comparison.points import LOCKS, SweepPoint, TableRow, is_execution, point_rows, write_table
from captrain.errors import UserError
from captrain.records import counted, publish_text, read_yaml, refuse_keys, refuse_keys_in, require_file_name
from captrain.run import (
    Choice,
    alternatives,
    compose_spec,
    conf_layers,
    entry_point,
    exclusive,
    load_choice,
    not_composed,
    searched_conf,
)

JOBS = Path(".cache/sweeps")
"""Hydra's own folders, one per job; they hold no results."""
FAILURE = "failed.txt"
WHOLE = "whole.txt"
STUDY = "+study"
FOLDER = "hydra.sweep.dir="
LAUNCHERS = ("submitit.", "joblib.")
"""Modules of launchers. An exception from one of them means that a process died."""
QUESTIONS = {"-c", "--cfg", "-i", "--info", "-p", "--package", "-sc", "--shell-completion", "--hydra-help", "--version"}
"""Flags for which Hydra prints information and runs no point."""
HELP = """\
captrain-sweep -m [SETTING=VALUE,VALUE,...] [+study=NAME] [hydra/launcher=joblib|submitit_slurm]

Run the pipeline over every combination of these settings. Other settings are those of params.yaml.

  -m                          run the grid (required)
  selection.delta=0.1,0.2     a setting of conf/ with its values
  +study=NAME                 a grid of conf/study/
  hydra/launcher=joblib       several points at once: hydra.launcher.n_jobs=2
  hydra/launcher=submitit_slurm   each point as a Slurm job
  hydra.job.name=NAME         name of the table, results/sweeps/NAME.csv
  hydra.sweep.dir=FOLDER      folder of Hydra's own files
  --cfg job, --info, --hydra-help, --shell-completion install=bash   as in every Hydra application

Finished points are reused, points share unchanged stages, and interrupted points resume. docs: "Sweeps, seeds and
Slurm"."""


def settings_of(overrides: Sequence[str]) -> dict[str, str]:
    """Return the settings of a Hydra job without its study, so that studies share points."""
    settings = dict(override.split("=", 1) for override in overrides)
    settings.pop(STUDY, None)
    return settings


def point_of(base: Choice, overrides: Sequence[str]) -> SweepPoint:
    """Return the point of a Hydra job. Its settings win over those of params.yaml."""
    settings = settings_of(overrides)
    experiment, seed = settings.pop("experiment", base.experiment), int(settings.pop("seed", base.seed))
    keys = {key.lstrip("+") for key in settings}
    inherited = [override for override in base.overrides if override.lstrip("+").split("=", 1)[0] not in keys]
    changes = [f"{key}={value}" for key, value in settings.items()]
    return SweepPoint(Choice(experiment=experiment, seed=seed, overrides=[*inherited, *changes]))


def job(config: Mapping[str, object]) -> None:
    """Run the point of one Hydra job, and write whether it finished or failed.

    A failure is written and not raised, so other points go on under every launcher.
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
        print(f"{point.name} is finished", flush=True)


def gather(jobs: Path, root: Path) -> tuple[list[TableRow], list[str]]:
    """Gather the rows of every finished point (see `point_rows`), settings first, and the failures of the others."""
    base, rows, failures = load_choice(root / "params.yaml"), list[TableRow](), list[str]()
    for folder in _job_folders(jobs):
        overrides = read_yaml(folder / ".hydra/overrides.yaml", list[str], f"remove {folder}, or run the sweep again")
        point = point_of(base, overrides)
        # Compare the name, because a job of an earlier sweep may still run and write here.
        if not (folder / WHOLE).exists() or (folder / WHOLE).read_text(encoding="utf-8") != point.name:
            failure = folder / FAILURE
            failures.append(
                failure.read_text(encoding="utf-8") if failure.exists() else f"point {point.name} did not finish"
            )
            continue
        settings = {key.lstrip("+"): value for key, value in settings_of(overrides).items()}
        varied = {key: value for key, value in settings.items() if not is_execution(f"{key}=")}
        selection = {"experiment": point.choice.experiment, "seed": point.choice.seed, **varied, "point": point.name}
        rows += [{**selection, **row} for row in point_rows(point, root)]
    return rows, failures


def _job_folders(jobs: Path) -> list[Path]:
    """List Hydra's folders of the points, by number."""
    return sorted((path for path in jobs.glob("*") if path.name.isdigit()), key=lambda path: int(path.name))


def sweep_name(arguments: Sequence[str], root: Path) -> str:
    """Return the name of the sweep: `hydra.job.name`, or its study.

    Raises:
        UserError: the study does not exist, or the name cannot be that of a file.
    """
    settings = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    studies = sorted({path.stem for layer in conf_layers(root / "conf") for path in layer.glob("study/*.yaml")})
    if STUDY in settings and settings[STUDY] not in studies:
        raise UserError(f"there is no study {settings[STUDY]!r}", alternatives(settings[STUDY], studies))
    name = settings.get("hydra.job.name", "").strip("'\"") or settings.get(STUDY) or "sweep"
    return require_file_name(name, "hydra.job.name")


@partial(entry_point, stage=False)
def main() -> None:
    """Run the `captrain-sweep` command; exit status 1 if a point failed.

    Raises:
        UserError: the folder is not the root of a repository, conf/ or a setting holds a key, -m is missing, the study
            does not exist, or a sweep of this name is running.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(HELP)
        return
    root = Path.cwd()
    if not (root / "dvc.yaml").exists():
        raise UserError(f"there is no dvc.yaml in {root.name}/", "run captrain-sweep in the root of the repository")
    if "${" in str(root):
        raise UserError(f"the path {root} holds ${{, which Hydra takes for a setting", "rename the folder")
    # Before Hydra writes them to disk.
    refuse_keys(sys.argv[1:])
    for path in sorted((root / "conf").rglob("*.yaml")):
        refuse_keys_in(read_yaml(path, object, "correct it"))
    if QUESTIONS & {argument.partition("=")[0] for argument in sys.argv[1:]}:
        _hydra_application(root)
        return
    if not {"-m", "--multirun"} & set(sys.argv):
        raise UserError("captrain-sweep runs a grid of points", "add -m, or run `captrain run` for a single point")
    name = sweep_name(sys.argv[1:], root)
    try:
        # Folders and table are named after the sweep, so a second one would overwrite the first.
        with exclusive(root / LOCKS / f"sweep-{name}", wait=False):
            _sweep(name, root)
    except BlockingIOError:
        raise UserError(
            f"a sweep named {name} is already running here", "wait for it, or set hydra.job.name=<another name>"
        ) from None


def _sweep(name: str, root: Path) -> None:
    """Run the points and write their table; exit with status 1 if a point failed.

    Raises:
        UserError: the configuration does not compose.
    """
    overrides = [argument for argument in sys.argv[1:] if re.match(r"\+*[a-z]", argument)]
    folders = [text[len(FOLDER) :].strip("'\"") for text in overrides if text.startswith(FOLDER)]
    jobs = root / (folders[0] if folders else JOBS / name)
    _require_first_point(overrides, root)
    for folder in _job_folders(jobs):
        shutil.rmtree(folder)
    # Relative, because Hydra would parse signs in the folders above.
    sys.argv += [] if folders else [f"{FOLDER}'{JOBS / name}'"]
    sys.argv += ["hydra.sweep.subdir=${hydra.job.num}", "hydra.job.chdir=false", f"hydra.job.name='{name}'"]
    status = 0
    try:
        _hydra_application(root)
    except Exception as error:
        if not type(error).__module__.startswith(LAUNCHERS):
            raise
        status = 1  # a process or a cluster job died; other points may be finished
    rows, failures = gather(jobs, root)
    whole = len({row["point"] for row in rows})
    if whole:
        path = root / "results/sweeps" / f"{name}.csv"
        write_table(rows, path)
        print(f"{counted(whole, 'point')} in {path.relative_to(root)}")
    for failure in failures:
        print(failure)
    if failures:
        print(
            f"{len(failures)} of {counted(whole + len(failures), 'point')} failed; run the same command again to resume"
        )
        raise SystemExit(1)
    if status:
        raise SystemExit(status)


def _require_first_point(overrides: Sequence[str], root: Path) -> None:
    """Check the first point of the grid before Hydra starts, with captrain's messages.

    Raises:
        UserError: a setting is misspelt, or its first value is not valid.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides([*overrides])
    except HydraException as error:
        raise not_composed(Path("conf"), error) from None
    first = list[str]()
    for override in parsed:
        key = str(override.key_or_group)
        if not key.startswith("hydra") and f"+{key}" != STUDY:
            values = override.sweep_string_iterator() if override.is_sweep_override() else [override.get_value_string()]
            first.append(f"{key}={next(iter(values))}")
    choice = point_of(load_choice(root / "params.yaml"), first).choice
    compose_spec(choice.experiment, choice.seed, choice.overrides, root / "conf")


def _hydra_application(root: Path) -> None:
    """Run Hydra's application with the arguments of this process.

    Raises:
        UserError: the configuration does not compose.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    os.environ["HYDRA_FULL_ERROR"] = "1"  # or Hydra prints its own message
    try:
        with searched_conf(root / "conf") as conf:
            hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise not_composed(Path("conf"), error) from None


if __name__ == "__main__":
    from captrain.comparison import sweep

    sweep.main()  # of the importable module, because launchers pickle `job`
