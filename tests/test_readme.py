"""The README is short, shows what its commands print, and links to what is there."""

import re
from pathlib import Path

import pytest
from support.pages import ROOT, printed_diagnosis

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_it_has_at_most_150_lines_and_its_first_screen_has_a_picture_and_the_commands() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    screen = "\n".join(lines[:40])
    assert re.search(r"!\[[^]]+\]\(results/figures/\w+\.png\)", screen)
    assert all(command in screen for command in ("make repro", "make test", "captrain diagnose docs/examples/"))


def test_it_shows_what_diagnose_prints_for_the_file_that_ships(tmp_path: Path) -> None:
    printed = printed_diagnosis(tmp_path / "out")
    assert f"```text\n{printed}\n```" in README
    assert f"```text\n{printed}\n```" in (ROOT / "docs/diagnose.md").read_text()
    quoted = re.findall(r"^(?:- \*\*chat/|  > ).*$", (ROOT / "docs/diagnose.md").read_text(), re.MULTILINE)
    report = (tmp_path / "out/report.md").read_text().splitlines()
    assert quoted and all(line in report for line in quoted)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_to_one(page: Path, committed: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    here = committed / page.parent.relative_to(ROOT)
    assert [target for target in targets if not ((page.parent / target).exists() or (here / target).exists())] == []


def test_no_marker_is_left_unfilled() -> None:
    assert [page.name for page in PAGES if "@@" in page.read_text()] == []
