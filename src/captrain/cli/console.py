"""Project and terminal, which all commands share."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from captrain.cli.fitting import fitted
from captrain.config import find_project
from captrain.errors import UserError
from captrain.records import plain


def project_root() -> Path:
    """Find the folder of the project: the nearest one upwards that holds dvc.yaml.

    Raises:
        UserError: there is none.
    """
    current = Path.cwd()
    if project := find_project(current):
        return project
    raise UserError(
        f"there is no dvc.yaml in {current.name}/ or above", "run captrain in a project; `captrain init DIR` begins one"
    )


class PlainConsole(Console):
    """A console on which text of others stays text: what a name, a message or an id holds moves no cursor, changes no
    colour and turns no line around."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See `Console.render`."""
        for segment in super().render(renderable, options):
            is_plain = segment.control or segment.text.isprintable()
            yield segment if is_plain else segment._replace(text=plain(segment.text))


def print_all(*parts: RenderableType) -> None:
    """Print tables and lines, one below the other."""
    # A pipe has no width of its own, and rich would fold tables at 80 columns.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    console = PlainConsole(width=width, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(fitted(part, console))
