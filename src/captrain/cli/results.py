"""Commands that read results: tables, published numbers, pages, exports."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from captrain.cli.console import print_all, project_root
from captrain.config import find_project


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
    from captrain.reporting import compare_runs, find_run

    root = find_project(Path.cwd()) or Path.cwd()
    print_all(*compare_runs(find_run(first, root), find_run(second, root)))


def published() -> None:
    """Print the paper's numbers beside ours where the same thing was run, and what in them does not agree."""
    from captrain.comparison import published_tables

    print_all(*published_tables(project_root()))


def export(
    files: Annotated[list[Path], typer.Argument(help="Rollouts, JSON lines.")],
    to: Annotated[Literal["inspect", "openai"], typer.Option(help="Inspect logs, or chats in OpenAI's format.")],
    out: Annotated[Path, typer.Option(help="Folder of the logs, or file of the chats.")],
) -> None:
    """Export rollouts for other tools: Inspect evaluation logs, or chat JSONL in OpenAI's format."""
    from captrain.execution import require_folder
    from captrain.interop import export_rollouts

    require_folder(out if to == "inspect" else out.parent)
    print_all(*(str(path) for path in export_rollouts(files, to, out)))


def report(
    out: Annotated[Path, typer.Option(help="Folder of the page; replaced if it holds a report.")] = Path("report"),
) -> None:
    """Write one page that opens from a disk: tables, capabilities, rollouts, thresholds, ledger, provenance."""
    from captrain.execution import require_folder
    from captrain.reporting.pages import build

    require_folder(out)
    pages = build(project_root(), out)
    print_all(f"{out / 'index.html'} ({len(pages)} files)")
