"""Commands that read results: tables, published numbers, pages, exports; whether they belong to the code; jobs."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from captrain import comparison, interop, projects, reporting
from captrain.cli.console import print_all, project_root
from captrain.records import plain
from captrain.run import find_project, job_log, jobs_table, require_folder

STATUSES = {"ok": "green", "differs": "red", "note": "yellow"}


def results(
    rollouts: Annotated[
        bool, typer.Option("--spent", help="What each method spent: rollouts, tokens, seconds.")
    ] = False,
) -> None:
    """Pass rates with intervals, paired differences, rollouts spent, and where the figures lie."""
    from captrain.reporting import tables

    print_all(tables.costs(project_root()) if rollouts else tables.results(project_root()))


def compare(
    first: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a project, point of a sweep, or commit.")],
    second: Annotated[str, typer.Argument(metavar="RUN", help="Another.")],
) -> None:
    """Compare two runs: settings that differ, capabilities, pass rates with the interval of their difference."""
    root = find_project(Path.cwd()) or Path.cwd()
    print_all(*reporting.compare_runs(reporting.find_run(first, root), reporting.find_run(second, root)))


def published() -> None:
    """Print the paper's numbers beside ours where the same thing was run, and what in them does not agree."""
    print_all(*comparison.published_tables(project_root()))


def export(
    files: Annotated[list[Path], typer.Argument(help="Rollouts, JSON lines.")],
    to: Annotated[Literal["inspect", "openai"], typer.Option(help="Inspect logs, or chats in OpenAI's format.")],
    out: Annotated[Path, typer.Option(help="Folder of the logs, or file of the chats.")],
) -> None:
    """Export rollouts for other tools: Inspect evaluation logs, or chat JSONL in OpenAI's format."""
    require_folder(out if to == "inspect" else out.parent)
    print_all(*(str(path) for path in interop.export_rollouts(files, to, out)))


def report(
    out: Annotated[Path, typer.Option(help="Folder of the page; replaced if it holds a report.")] = Path("report"),
) -> None:
    """Write one page that opens from a disk: tables, capabilities, rollouts, thresholds, ledger, provenance."""
    from captrain.reporting.pages import build

    require_folder(out)
    pages = build(project_root(), out)
    print_all(f"{out / 'index.html'} ({len(pages)} files)")


def verify(
    complete: Annotated[bool, typer.Option("--all", help="List every file and library behind each line.")] = False,
) -> None:
    """Check that the committed results were made by the committed code, specification and data.

    Exit status: 0 if they were; 1 if anything differs, even within noise; 2 if it cannot be checked.
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
            f"captrain {upgrade.after} is installed and captrain.yaml names {upgrade.before}: {count} stages differ. "
            "They do not run before `captrain upgrade`; `captrain upgrade --dry-run` lists what it makes stale."
        )
    if not verification.holds and not complete:
        print_all("", "`captrain verify --all` lists every file and library")
    if upgrade or not verification.holds:
        raise typer.Exit(1)


def jobs(id: Annotated[str | None, typer.Argument(metavar="ID", help="Print this one's log.")] = None) -> None:
    """List jobs on the cluster: state, node, elapsed, last line, reason; of one, its log."""
    if id:
        print(plain(job_log(project_root(), id)), end="")
    else:
        table = jobs_table(project_root())
        print_all(table if table.row_count else "no job was ever submitted here: machine=slurm submits some")
