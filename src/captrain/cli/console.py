"""What all commands share: the project that they are about, and the terminal."""

import os
import sys
from pathlib import Path

from rich.console import Console, RenderableType

from captrain.cli.fitting import fitted
from captrain.config import find_project
from captrain.errors import UserError


def project_root() -> Path:
    """The folder of the project: the nearest one upwards that holds dvc.yaml.

    Raises:
        UserError: there is none.
    """
    current = Path.cwd()
    if project := find_project(current):
        return project
    raise UserError(
        f"there is no dvc.yaml in {current.name}/ or above", "run captrain in a project; `captrain init DIR` begins one"
    )


def print_all(*parts: RenderableType) -> None:
    """Print tables and lines, one below the other."""
    # A pipe has no width of its own, and rich would fold tables at 80 columns.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(fitted(part, console))
