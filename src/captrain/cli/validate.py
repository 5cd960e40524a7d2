"""The command that holds an environment file against the target."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from captrain.cli.console import print_all, project_root


def validate(
    file: Annotated[Path, typer.Argument(help="An environment file.")],
    out: Annotated[Path | None, typer.Option(help="Folder for passport and page; beside the file by default.")] = None,
    sandbox: Annotated[
        Literal["strong", "strong, one layer", "basic"] | None,
        typer.Option(help="Least level of confinement; machine.sandbox by default."),
    ] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Play the base in it, too.")] = False,
) -> None:
    """Make out the passport of any environment file, held against the target (exit status 1 when a check fails)."""
    from captrain.environments import publish_validation, validate_file, validation_report
    from captrain.execution import require_folder

    folder = out or file.parent
    require_folder(folder)
    validation = validate_file(file, project_root(), folder, sandbox, calibrate)
    publish_validation(validation, folder)
    print_all(*validation_report(validation))
    if not validation.passport.passed:
        raise typer.Exit(1)
