"""Commands that read results: tables, comparisons, exports, the report, verification, and jobs."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from captrain import comparison, interop, projects, reporting
from captrain.cli.console import print_all, project_root
from captrain.records import counted, plain
from captrain.run import find_project, job_log, jobs_table, require_folder

STATUSES = {"ok": "green", "differs": "red", "note": "yellow"}


def results(
    complete: Annotated[
        bool,
        typer.Option("--all", help="Print all rows, differences, rates by kind, the causal test and re-discovery."),
    ] = False,
    spent: Annotated[
        bool, typer.Option("--spent", help="Print the rollouts, tokens and seconds that each row spent.")
    ] = False,
) -> None:
    """Print the rows by pass rate, the differences that matter, and the selected capabilities."""
    from captrain.reporting import tables

    root = project_root()
    print_all(tables.costs(root) if spent else tables.results(root, complete=complete))


def compare(
    first: Annotated[
        str, typer.Argument(metavar="RUN", help="First run: a project's folder, a point of a sweep, or a commit.")
    ],
    second: Annotated[str, typer.Argument(metavar="RUN", help="Second run, named in the same way.")],
) -> None:
    """Compare two runs: their settings, capabilities, and pass rates."""
    root = find_project(Path.cwd()) or Path.cwd()
    print_all(*reporting.compare_runs(reporting.find_run(first, root), reporting.find_run(second, root)))


def published() -> None:
    """Print the paper's numbers, with ours beside them where the same was run."""
    print_all(*comparison.published_tables(project_root()))


def export(
    files: Annotated[list[Path], typer.Argument(help="Files of rollouts in JSON lines.")],
    to: Annotated[Literal["inspect", "openai"], typer.Option(help="Format of the export.")],
    out: Annotated[Path, typer.Option(help="Folder for the logs, or file for the chats.")],
) -> None:
    """Export rollouts as Inspect logs, or as chats in OpenAI's format."""
    require_folder(out if to == "inspect" else out.parent)
    print_all(*(str(path) for path in interop.export_rollouts(files, to, out)))


def report(
    out: Annotated[Path, typer.Option(help="Folder for the page; an old report in it is replaced.")] = Path("report"),
) -> None:
    """Write the report of a run: one page with tables, capabilities and rollouts that opens from disk."""
    from captrain.reporting.pages import build

    require_folder(out)
    root = project_root()
    pages = build(root, out)
    print_all(f"{out / 'index.html'} ({counted(len(pages), 'file')})")
    if not (root / "dvc.lock").exists():
        print_all("No stage has run here yet, so the page has no results. Start with `captrain run`.")


def verify(
    complete: Annotated[bool, typer.Option("--all", help="List every file and library behind each line.")] = False,
) -> None:
    """Check that the committed results were made by the committed code, specification and data.

    The exit status is 0 if they were, 1 if anything differs (even within noise), and 2 if it cannot be checked.
    """
    root = project_root()
    verification, table = reporting.verify(root), Table.grid(padding=(0, 2))
    for one in verification.comparisons:
        table.add_row(Text(one.status, STATUSES[one.status]), one.topic, Text(one.text))
        if complete:
            for detail in one.details:
                table.add_row("", "", Text(f"- {detail}", "dim"))
    print_all(Text(verification.summary, "green" if verification.holds else "red"), "", table)
    if upgrade := projects.pending_upgrade(root):
        count = len(upgrade.changed) + len(upgrade.added) + len(upgrade.removed)
        print_all(
            f"The installed captrain ({upgrade.after}) and captrain.yaml ({upgrade.before}) differ in "
            f"{counted(count, 'stage')}, which cannot run until `captrain upgrade`. `captrain upgrade --dry-run` "
            "lists what it makes stale."
        )
    if not verification.holds and not complete:
        print_all("", "To list every file and library: captrain verify --all")
    if upgrade or not verification.holds:
        raise typer.Exit(1)


def jobs(id: Annotated[str | None, typer.Argument(metavar="ID", help="Print the log of this job.")] = None) -> None:
    """List the jobs on the cluster, or print the log of one."""
    if id:
        print(plain(job_log(project_root(), id)), end="")
    else:
        table = jobs_table(project_root())
        print_all(table if table.row_count else "no jobs were submitted here; machine=slurm submits jobs")
