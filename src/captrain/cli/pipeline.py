"""Commands about the pipeline: do results belong to the code, and which jobs are on the cluster."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from captrain.cli.console import print_all, project_root
from captrain.records import plain

STATUSES = {"ok": "green", "differs": "red", "note": "yellow"}


def _other_code(root: Path) -> list[str]:
    """Word a line on the captrain that is installed, where it is not the one that the project records."""
    from captrain.projects import pending_upgrade

    upgrade = pending_upgrade(root)
    if upgrade is None:
        return []
    count = len(upgrade.changed) + len(upgrade.added) + len(upgrade.removed)
    return [
        f"captrain {upgrade.after} is installed, of which {count} stages are others than of the {upgrade.before} in "
        "captrain.yaml: none of these runs before `captrain upgrade`; --dry-run says what that makes stale"
    ]


def verify(
    complete: Annotated[bool, typer.Option("--all", help="Every file, parameter and stage behind a finding.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Hash DVC's cache and all outputs anew, too.")] = False,
) -> None:
    """Compare the committed results with the committed code, specification and data, and say why they differ.

    Exit status 0 if they are; 1 if not, be it within noise; 2 if that cannot be told.
    """
    from captrain.reporting import check_integrity
    from captrain.reporting import verify as check

    if deep:
        files, damages = check_integrity(project_root())
        print_all(*damages, f"{files} files hashed, {len(damages)} damaged", "")
        if damages:
            raise typer.Exit(1)
    verification = check(project_root())
    table = Table.grid(padding=(0, 2))
    for finding in verification.findings:
        table.add_row(Text(finding.status, STATUSES[finding.status]), finding.topic, Text(finding.text))
        for detail in finding.details if complete else ():
            table.add_row("", "", Text(f"- {detail}", "dim"))
    if absent := verification.unchecked:
        table.add_row(
            Text("note", "dim"), "not checked", Text(f"outputs in DVC's cache that are not here: {len(absent)}")
        )
        for detail in absent if complete else ():
            table.add_row("", "", Text(f"- {detail}", "dim"))
    lines = _other_code(project_root())
    print_all(Text(verification.summary, "green" if verification.holds else "red"), "", table, *lines)
    if lines and verification.holds:
        raise typer.Exit(1)
    if not verification.holds:
        if not complete:
            print_all("", "`captrain verify --all` lists every file, parameter and stage")
        raise typer.Exit(1)


def jobs(id: Annotated[str | None, typer.Argument(metavar="ID", help="Print this one's log.")] = None) -> None:
    """List jobs on the cluster: state, node, elapsed, last line, reason; of one, its log."""
    from captrain.execution import job_log, jobs_table

    if id:
        print(plain(job_log(project_root(), id)), end="")
    else:
        table = jobs_table(project_root())
        print_all(table if table.row_count else "no job was ever submitted here: machine=slurm submits some")
