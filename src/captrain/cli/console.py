"""Printing, the project's folder and language model options, shared by the commands.

A table that fits the terminal is printed with borders. A wider one loses its borders, and its columns wrap between
words. If that gives many lines, each row becomes a block: the first cell, and below it the other cells after their
headings. No heading, id or number is ever cut.
"""

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from captrain.errors import UserError
from captrain.records import plain, without_secrets
from captrain.run import ModelAccess, find_project

MODEL_PANEL = "Language model"
"""Group of options in the help."""
EndpointVariable = Annotated[
    str,
    typer.Option(help="Environment variable that holds the endpoint's base URL.", rich_help_panel=MODEL_PANEL),
]
KeyVariable = Annotated[str, typer.Option(help="Environment variable that holds the key.", rich_help_panel=MODEL_PANEL)]
Budget = Annotated[
    int | None,
    typer.Option(
        min=1, help="Limit on the tokens that the model reads and writes together.", rich_help_panel=MODEL_PANEL
    ),
]
Prices = Annotated[
    tuple[float, float] | None,
    typer.Option(
        metavar="READ WRITTEN",
        help="Price of a million tokens read and of a million written.",
        rich_help_panel=MODEL_PANEL,
    ),
]
ENDPOINT, KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
GAP = 2
"""Spaces between columns without borders."""
ENDLESS = 10_000
LINE_START = re.compile(r" *(?:\d+\. |- |-> )?")
"""The indentation of a line, with the number or mark of a list."""
TALLEST = 4
"""Largest number of lines of a wrapped cell; taller rows become blocks."""


def project_root() -> Path:
    """Find the project: the nearest folder upwards with dvc.yaml.

    Raises:
        UserError: there is none.
    """
    current = Path.cwd()
    if project := find_project(current):
        return project
    raise UserError(
        f"there is no dvc.yaml in {current.name}/ or above",
        "run captrain in a project; `captrain init DIR` creates one",
    )


class PlainConsole(Console):
    """A console that prints control characters in names, messages and ids as text, so that they change nothing."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See `Console.render`."""
        for segment in super().render(renderable, options):
            is_plain = segment.control or segment.text.isprintable()
            yield segment if is_plain else segment._replace(text=plain(segment.text))


def shown(part: RenderableType) -> RenderableType:
    """Escape control characters and remove keys before the layout: a line break may part a key, and rich drops some
    control characters."""
    if isinstance(part, str):
        return without_secrets(plain(part))
    if isinstance(part, Group):
        return Group(*map(shown, part.renderables))
    if isinstance(part, Table):
        for column in part.columns:
            column.header, column._cells = shown(column.header), [*map(shown, column.cells)]
    return part


def print_all(*parts: RenderableType) -> None:
    """Print tables and lines, one below the other."""
    # A pipe has no width, and rich would fold tables at 80 columns.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    console = PlainConsole(width=width, highlight=False, markup=False, emoji=False)
    for part in parts:
        if not isinstance(part, str):
            console.print(fitted(shown(part), console))
            continue
        for line in without_secrets(plain(part)).split("\n"):
            is_command = line.lstrip().startswith("captrain ")
            console.print(line if is_command else _hung(line, console), soft_wrap=is_command)


def _hung(line: str, console: Console) -> Text:
    """Fold a line at the width of the console, so that its next lines start where its text starts."""
    start = LINE_START.match(line)
    mark = start[0] if start else ""
    folded = Text(line.removeprefix(mark)).wrap(console, max(1, console.width - len(mark)))
    return Text(mark) + Text("\n" + " " * len(mark)).join(folded)


def model_access(endpoint: str, key: str, tokens: int | None, prices: tuple[float, float] | None) -> ModelAccess:
    """Build the settings of a language model from the options of a command.

    Raises:
        UserError: an option is not the name of an environment variable, or a price is negative.
    """
    read_price, write_price = prices or (None, None)
    try:
        return ModelAccess(endpoint=endpoint, key=key, tokens=tokens, input_price=read_price, output_price=write_price)
    except ValidationError as error:  # do not repeat the value: it may be a key
        field = error.errors()[0]["loc"][0]
        if option := {"endpoint": "--endpoint-env", "key": "--key-env"}.get(str(field)):
            problem = f"{option} must be the name of an environment variable"
            raise UserError(problem, "give a name, such as OPENAI_API_KEY") from None
        raise UserError("--prices must be two numbers of 0 or more", "give, for example, --prices 0.4 1.6") from None


def fitted(part: RenderableType, console: Console) -> RenderableType:
    """Fit a renderable, and tables within groups, to the width of the console."""
    if isinstance(part, Group):
        return Group(*(fitted(inner, console) for inner in part.renderables))
    if not isinstance(part, Table) or part.box is None or not part.show_header:
        return part
    # The widths of each column's longest word and longest line.
    endless, words, lines = console.options.update(width=ENDLESS), list[int](), list[int]()
    for column in part.columns:
        sizes = [Measurement.get(console, endless, cell) for cell in (column.header, *column.cells)]
        words.append(max(size.minimum for size in sizes))
        lines.append(max(size.maximum for size in sizes))
    if sum(lines) + 3 * len(lines) + 1 <= console.width:
        part.width = None
        return _with_folded_notes(part)
    # Each column gets its longest word; the free width goes first to columns that need least to avoid wrapping.
    shares, free = [*words], console.width - GAP * (len(words) - 1) - sum(words)
    for index in sorted(range(len(words)), key=lambda index: lines[index] - words[index]):
        more = max(0, min(free, lines[index] - words[index]))
        shares[index] += more
        free -= more
    if free < 0 or any(line > TALLEST * share for line, share in zip(lines, shares, strict=True)):
        return _blocks(part)
    part.box, part.padding, part.pad_edge, part.collapse_padding = None, (0, GAP, 0, 0), False, True
    for column, width in zip(part.columns, shares, strict=True):
        column.width, column.overflow = width, "fold"
    part.header_style = "bold underline"
    return _with_folded_notes(part)


def _with_folded_notes(table: Table) -> RenderableType:
    """Print title and caption as lines of their own, which fold at the width of the console, not of the table."""
    title, caption = _notes(table)
    table.title = table.caption = None
    return Group(*title, table, *caption)


def _notes(table: Table) -> tuple[list[Text], list[Text]]:
    """Return the title and the caption of a table, each as a list that is empty if there is none."""
    title = [_text(table.title, "italic")] if table.title else []
    return title, [_text(table.caption, "dim italic")] if table.caption else []


def _blocks(table: Table) -> RenderableType:
    """Lay out each row as a block of its headings and cells."""
    title, caption = _notes(table)
    lines: list[RenderableType] = [*title]
    headings = [_text(column.header, "").plain.replace("\n", " ") for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        first, *cells = (_text(cell, "") for cell in row)
        lines.append(Text.assemble(first, style="bold"))
        block = Text()
        for heading, cell in zip(headings[1:], cells, strict=True):
            if cell.plain:
                block.append(f"{', ' if block.plain else ''}{heading} ", "dim")
                block.append_text(Text(" ").join(cell.split("\n")))
        if block.plain:
            lines.append(Padding(block, (0, 0, 0, GAP)))
    return Group(*lines, *caption)


def _text(cell: RenderableType | None, style: str) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell), style)
