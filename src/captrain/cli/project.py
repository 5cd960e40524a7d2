"""Commands for your own project: create, run and upgrade it, check and install benchmarks."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from captrain import benchmarks, planning, projects
from captrain.cli.console import print_all, project_root
from captrain.errors import UserError
from captrain.records import parse_yaml

FIRST_ROWS = ("evaluation@base", "evaluation@trace")
"""Stages that `captrain run` runs first."""


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder.")] = Path("."),
    benchmark: Annotated[
        Literal["calendar"] | None, typer.Option(help="Add this small example benchmark with its test.")
    ] = None,
) -> None:
    """Create a project: a DVC repository with captrain's stages and a conf/ folder for your settings."""
    names = projects.init_project(folder, benchmark)
    entry = "" if folder.resolve() == Path.cwd() else f"`cd {folder}`, then "
    print_all(*map(str, names), "", f"project created: {entry}`captrain plan` and `captrain run`")


def run(
    stage: Annotated[str | None, typer.Argument(help="Run only this stage, even if it is up to date.")] = None,
) -> None:
    """Run the pipeline, or resume it: print a forecast, a line for each finished stage, and the results.

    It prints the rows of the base and of TRACE before the baselines run. `dvc repro` runs the same stages.
    """
    root = project_root()
    os.chdir(root)
    if stage is not None:
        projects.run_stage(root, stage)
        return
    from captrain.reporting import tables

    projects.prepare_dvc(root)
    stages = planning.stale_stages(root)
    if "compose" in stages:  # what is stale behind it depends on what it writes
        projects.run_pipeline(root, ["compose"])
        stages = planning.stale_stages(root)
    if stages:
        print_all(planning.forecast_run(root, stages))
        skipped = planning.skipped_stages(root, stages)
        projects.number_stages([stage for stage in stages if stage not in skipped], skipped)
        if {*FIRST_ROWS} & {*stages}:
            projects.run_pipeline(root, FIRST_ROWS)
            if "comparison" in planning.stale_stages(root):
                print_all("", tables.first_table(root), "", "The baselines follow.", "")
        projects.run_pipeline(root)
    print_all(tables.results(root))


def upgrade(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the stages that become stale, and change nothing.")
    ] = False,
) -> None:
    """Upgrade the project to the installed captrain, and list the stages that become stale."""
    change = projects.upgrade_project(project_root(), dry=dry_run)
    if not change.is_needed:
        print_all(f"captrain {change.after}: the project is up to date")
        return
    lines = [f"captrain {change.before} -> {change.after}"]
    for title, names in (
        ("stale, because their code differs", change.changed),
        ("new", change.added),
        ("removed", change.removed),
        ("after these, stale only if their inputs change", change.behind),
    ):
        if names:
            lines.append(f"{title}: {', '.join(names)}")
    lines.append("nothing was changed" if dry_run else "upgraded; `dvc repro` brings the results up to date")
    print_all(*lines)


def check_benchmark(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:CLASS", help="Class of the benchmark, importable from here.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE...", help="Settings of the benchmark: arguments of its constructor."),
    ] = None,
    tasks: Annotated[int, typer.Option(min=2, help="Number of tasks to check in each split.")] = 20,
    limit: Annotated[float, typer.Option(min=0.1, help="Seconds that one method call may take.")] = 10.0,
) -> None:
    """Check that a benchmark keeps the contract, and print each problem with its file and line.

    The exit status is 1 if there are problems.
    """
    pairs = [setting.partition("=") for setting in settings or []]
    if wrong := [key for key, equals, _ in pairs if not equals]:
        raise UserError(f"{wrong[0]!r} is not of the form key=value", "write, for example, theirs=0.5")
    sys.path.insert(0, os.getcwd())
    values = {key: parse_yaml(value, object, f"the value of {key}", "write it as in YAML") for key, _, value in pairs}
    report = projects.check_benchmark(target, values, tasks=tasks, limit=limit)
    print_all(*(f"{key}: {value}" for key, value in report.facts.items()))
    if report.problems:
        print_all("", *(str(problem) for problem in report.problems))
        raise typer.Exit(1)
    print_all(f"{report.facts['name']}: keeps the contract")


benchmark = typer.Typer(no_args_is_help=True)


@benchmark.callback()
def group() -> None:
    """Install a benchmark of others, such as tau2 or bfcl."""


@benchmark.command()
def install(
    name: Annotated[
        str, typer.Argument(help="Name: bfcl, tau2, agentdojo, verifiers, or openenv (it runs exported packages).")
    ],
    packages: Annotated[
        list[str] | None, typer.Argument(help="Further packages to install, as pip names them.")
    ] = None,
) -> None:
    """Install a benchmark in an environment of its own, below .cache/installations."""
    python = benchmarks.install_benchmark(name, project_root(), packages or [])
    print_all(f"{name}: {python}" if name == "openenv" else f"{name}: {python}; choose it with benchmark={name}")
