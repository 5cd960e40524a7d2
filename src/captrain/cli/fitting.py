"""Tables on a narrow terminal: no heading, id or number is ever cut.

A table that fits is printed as it is. One that does not loses its borders. If words then fit side by side, in few
lines, its columns wrap between words; else each row is a block, its first cell on a line, the others below it by their
headings.
"""

from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

GAP = 2
"""Spaces between columns without borders."""
ENDLESS = 10_000
TALLEST = 4
"""Lines of a cell, about, beyond which a row is better read as a block."""


@dataclass(frozen=True)
class Widths:
    """Width of a column's longest word, and of its longest line."""

    word: int
    line: int


def fitted(part: RenderableType, console: Console) -> RenderableType:
    """Fit a renderable to the width of the console, tables within groups too."""
    if isinstance(part, Group):
        return Group(*(fitted(inner, console) for inner in part.renderables))
    if not isinstance(part, Table) or part.box is None or not part.show_header:
        return part
    widths = [_widths(column, console) for column in part.columns]
    borders = 3 * len(widths) + 1
    if sum(column.line for column in widths) + borders <= console.width:
        part.width = None
        return _with_folded_notes(part)
    room = console.width - GAP * (len(widths) - 1)
    if sum(column.word for column in widths) <= room:
        shares = _shared(widths, room)
        if all(column.line <= TALLEST * share for column, share in zip(widths, shares, strict=True)):
            return _without_borders(part, shares)
    return _blocks(part)


def _widths(column: Column, console: Console) -> Widths:
    endless = console.options.update(width=ENDLESS)
    sizes = [Measurement.get(console, endless, cell) for cell in (column.header, *column.cells)]
    return Widths(max(size.minimum for size in sizes), max(size.maximum for size in sizes))


def _shared(widths: list[Widths], room: int) -> list[int]:
    """Share the room among columns: each has its longest word at least, what is left over goes to the narrowest wishes
    first."""
    shares, free = [column.word for column in widths], room - sum(column.word for column in widths)
    for index in sorted(range(len(widths)), key=lambda index: widths[index].line - widths[index].word):
        more = min(free, widths[index].line - widths[index].word)
        shares[index] += more
        free -= more
    return shares


def _without_borders(table: Table, shares: list[int]) -> RenderableType:
    table.box, table.padding, table.pad_edge, table.collapse_padding = None, (0, GAP, 0, 0), False, True
    for column, width in zip(table.columns, shares, strict=True):
        column.width, column.overflow = width, "fold"
    table.header_style = "bold underline"
    return _with_folded_notes(table)


def _with_folded_notes(table: Table) -> RenderableType:
    """Fold title and caption to the width of the console instead of that of the table."""
    title, caption = table.title, table.caption
    table.title = table.caption = None
    notes = [_text(note, style) for note, style in ((title, "italic"), (caption, "dim italic")) if note]
    parts: list[RenderableType] = [*notes[: bool(title)], table, *notes[bool(title) :]]
    return Group(*parts) if notes else table


def _blocks(table: Table) -> RenderableType:
    """Lay out each row as a block of its headings and cells."""
    lines: list[RenderableType] = [_text(table.title, "italic")] if table.title else []
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
    return Group(*lines, *([_text(table.caption, "dim italic")] if table.caption else []))


def _text(cell: RenderableType | None, style: str) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell), style)
