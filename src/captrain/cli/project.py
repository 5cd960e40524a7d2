"""Commands about a project of the user's own: begun, run, brought to another version of captrain; its benchmarks."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from captrain import benchmarks, planning, projects
from captrain.cli.console import print_all, project_root
from captrain.errors import UserError
from captrain.records import parse_yaml


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty.")] = Path("."),
    benchmark: Annotated[
        Literal["calendar"] | None, typer.Option(help="Begin with this small benchmark, complete, with its test.")
    ] = None,
) -> None:
    """Begin a project: a DVC repository whose stages are captrain's, and whose conf/ holds what you change."""
    names = projects.init_project(folder, benchmark)
    entry = "" if folder.resolve() == Path.cwd() else f"`cd {folder}`, then "
    print_all(*map(str, names), "", f"a project is begun: {entry}`captrain plan` and `dvc repro`")


def run(
    stage: Annotated[str | None, typer.Argument(help="One stage, stale or not: what `dvc repro` calls.")] = None,
) -> None:
    """Run the pipeline: what it will take, a line for each stage that ends, the results. `dvc repro` runs the same."""
    root = project_root()
    os.chdir(root)
    if stage is not None:
        projects.run_stage(root, stage)
        return
    from captrain.reporting import tables

    if stages := planning.stale_stages(root):
        print_all(planning.forecast_run(root, stages))
        projects.run_pipeline(root)
    print_all(tables.results(root))


def upgrade(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what is stale, and change nothing.")] = False,
) -> None:
    """Take over the installed captrain: says which stages it makes stale."""
    change = projects.upgrade_project(project_root(), dry=dry_run)
    if not change.is_needed:
        print_all(f"captrain {change.after}: nothing to take over")
        return
    lines = [f"captrain {change.before} -> {change.after}"]
    for title, names in (
        ("stale, their code differs", change.changed),
        ("new", change.added),
        ("gone", change.removed),
        ("behind these, run again only if what they read comes out different", change.behind),
    ):
        if names:
            lines.append(f"{title}: {', '.join(names)}")
    lines.append("nothing was changed" if dry_run else "taken over; `dvc repro` brings the results up to date")
    print_all(*lines)


def check_benchmark(
    target: Annotated[str, typer.Argument(metavar="MODULE:CLASS", help="The class, importable from here.")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Of its constructor.")] = None,
    tasks: Annotated[int, typer.Option(min=2, help="Tasks of each split.")] = 20,
    limit: Annotated[float, typer.Option(min=0.1, help="Seconds for one call of one method.")] = 10.0,
) -> None:
    """Hold a benchmark to the contract: says what is wrong, by line (exit status 1 then)."""
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


benchmark = typer.Typer(help="Benchmarks of others: install.", no_args_is_help=True)


@benchmark.callback()
def group() -> None:
    """Install benchmarks of others, each in an environment of its own."""


@benchmark.command()
def install(
    name: Annotated[str, typer.Argument(help="bfcl, tau2, agentdojo, verifiers, or openenv (to run exports in).")],
    packages: Annotated[list[str] | None, typer.Argument(help="What else goes into it, as pip names it.")] = None,
) -> None:
    """Make the environment of a benchmark below .cache/installations, where its workers find it."""
    python = benchmarks.install_benchmark(name, project_root(), packages or [])
    print_all(f"{name}: {python}" if name == "openenv" else f"{name}: {python}; choose it with benchmark={name}")
