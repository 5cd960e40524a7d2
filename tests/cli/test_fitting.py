"""Tables on narrow terminals: nothing is cut."""

import io

import pytest
from rich.console import Console, Group
from rich.table import Table

from captrain.cli.console import fitted

IDS = ("f65a1f1e5351", "servicedesk-mixed/discovery/00000", "a_capability_with_a_rather_long_name")


def printed(part: Table | Group, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(fitted(part, console))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def table_of(*rows: tuple[str, ...], headings: tuple[str, ...]) -> Table:
    table = Table(*headings, title="a title", caption="a caption of the table")
    for row in rows:
        table.add_row(*row)
    return table


def test_a_table_that_fits_keeps_its_borders() -> None:
    text = printed(table_of(("a", "b"), headings=("one", "two")))
    assert "│ a   │ b   │" in text and "a title" in text and "a caption of the table" in text


def test_a_table_that_fits_without_borders_has_one_line_for_each_row() -> None:
    row = ("solutions_routed - rejection_sft", "+0.189", "+0.156 to +0.224", "< 0.001", "no (Holm)")
    text = printed(table_of(row, headings=("difference", "rate", "interval", "p", "distinct")))
    assert [line for line in text.splitlines() if "rejection_sft" in line][0].split() == " ".join(row).split()
    assert "│" not in text


@pytest.mark.parametrize("width", [80, 60, 40])
def test_the_rows_of_a_wide_table_are_blocks_with_complete_ids_and_headings(width: int) -> None:
    headings = ("id", "task", "capability", "leaves reference", "constant groups")
    text = printed(Group(table_of((*IDS, "at call 3", "1,024"), headings=headings)), width)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    words = " ".join(text.split())
    assert all(name in words for name in (*IDS, "leaves reference at call 3", "constant groups 1,024"))
    assert "…" not in text
