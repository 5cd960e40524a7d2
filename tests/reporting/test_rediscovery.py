"""Re-discovery in table, figure and report."""

import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from captrain.reporting.pages import build
from captrain.reporting.rediscovery import rediscovered, rediscovery, rediscovery_table

HEAD = "round,capability,selected,gap,gap_low,gap_high,coverage,lacking,passed,failed\n"
BEFORE = "0,copying,True,0.9,0.8,1.0,0.33,0.2,92,148\n0,wording,False,0.1,-0.1,0.3,0.5,0.3,92,148\n"
AFTER = "1,copying,True,0.8,0.5,1.0,0.36,0.03,218,22\n1,wording,False,,,,0.0,0.0,218,22\n"


def results(folder: Path, *rows: str) -> Path:
    (folder / "solutions").mkdir(parents=True)
    (folder / "solutions/rediscovery.csv").write_text(HEAD + "".join(rows))
    return folder


def test_the_table_has_selected_capabilities_before_and_after_training(tmp_path: Path) -> None:
    table = rediscovery_table(results(tmp_path, BEFORE, AFTER))
    console = Console(width=140)
    with console.capture() as text:
        console.print(table)
    lines = [line.strip() for line in text.get().splitlines()]
    before, after = lines.index("base: 92 of 240 passed"), lines.index("after round 1: 218 of 240 passed")
    first, second = (place for place, line in enumerate(lines) if line.startswith("copying"))
    assert before < first < after < second
    assert "0.200" in lines[first] and "0.80 to 1.00" in lines[first] and "0.030" in lines[second]
    assert "wording" not in text.get()


def test_a_capability_has_its_id_and_its_title(tmp_path: Path) -> None:
    rows = (row.replace("copying", "missing_write") for row in (BEFORE, AFTER))
    table = rediscovery_table(results(tmp_path, *rows))
    console = Console(width=80)
    with console.capture() as text:
        console.print(table)
    assert text.get().count("  missing_write (Omitted operation) ") == 2


@pytest.mark.parametrize("rows", [(), (BEFORE,)])
def test_an_agent_that_was_not_diagnosed_again_has_no_table(tmp_path: Path, rows: tuple[str, ...]) -> None:
    folder = results(tmp_path, *rows)
    assert rediscovered(folder) == [] and rediscovery_table(folder) is None


def test_the_figure_shows_every_diagnosis_of_every_selected_capability(tmp_path: Path) -> None:
    figure = rediscovery(results(tmp_path, BEFORE, AFTER, "2,copying,False,0.5,0.1,0.9,0.1,0.01,230,10\n"))
    shares = figure.axes[0]
    assert [np.asarray(line.get_xdata()).tolist() for line in shares.get_lines()] == [[0.2], [0.03], [0.01]]
    assert [text.get_text() for text in shares.get_yticklabels()] == ["copying"]


def test_the_report_has_the_rows_of_the_table(tmp_path: Path) -> None:
    results(tmp_path / "results", BEFORE, AFTER)
    page, *_ = build(tmp_path, tmp_path / "report")
    rows = page.read_text().partition('aria-label="Re-discovery"')[2].partition("</table>")[0]
    texts = [" ".join(re.sub("<[^>]*>", " ", row).split()) for row in rows.split("<tr")[2:]]
    assert texts == [
        'class="head"> copying base, 92 of 240 passed 0.200 0.330 0.900 0.800 to 1.000 selected',
        'class="quiet"> copying after round 1, 218 of 240 passed 0.030 0.360 0.800 0.500 to 1.000 selected',
    ]
