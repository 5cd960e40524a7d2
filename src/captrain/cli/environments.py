"""The command that takes environments out of the project."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from captrain.cli.console import print_all, project_root


def export_environment(
    name: Annotated[str, typer.Argument(help="Capability of an environment, or an environment file with a passport.")],
    to: Annotated[Literal["openenv", "verifiers", "trl"], typer.Option(help="Whose package.")],
    out: Annotated[Path, typer.Option(help="Folder of the package; new or empty.")],
) -> None:
    """Export an environment as a package that trains elsewhere: OpenEnv, verifiers or TRL."""
    from captrain.execution import require_folder
    from captrain.projects import export_environment

    require_folder(out)
    files = export_environment(name, project_root(), to, out)
    print_all(f"{out}: {len(files)} files; {out / 'README.md'} says how it is used")
