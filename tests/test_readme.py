"""README: short, its outputs and numbers match the code and the tables, and its links work."""

import re
from pathlib import Path

import pytest
from support.pages import ROOT, printed_diagnosis

from captrain.records import read_table

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_it_has_at_most_100_lines_and_its_first_screen_has_the_headline_and_the_commands() -> None:
    lines = README.splitlines()
    assert len(lines) <= 100
    screen = "\n".join(lines[:20])
    assert "](results/studies/headline.png)" in screen
    assert all(
        command in screen for command in ("pip install", "captrain diagnose YOUR.jsonl", "make repro", "make test")
    )


def test_it_begins_what_diagnose_prints_for_the_file_that_ships_and_the_page_has_all_of_it(tmp_path: Path) -> None:
    printed = printed_diagnosis(tmp_path / "out")
    [quoted] = re.findall(r"^```text\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert printed.startswith(quoted) and "What to fix first" in quoted
    assert f"```text\n{printed}\n```" in (ROOT / "docs/diagnose.md").read_text()
    quotes = re.findall(r"^(?:- \*\*chat/|  > ).*$", (ROOT / "docs/diagnose.md").read_text(), re.MULTILINE)
    report = (tmp_path / "out/report.md").read_text().splitlines()
    assert quotes and all(line in report for line in quotes)


def test_its_counts_of_runs_are_those_of_the_table_of_replications(committed: Path) -> None:
    points = read_table(committed / "results/replicates/headline/points.csv")
    rates = points.pivot_table(index=["experiment", "seed"], columns="method", values="pass_rate")
    spent = points.pivot_table(index=["experiment", "seed"], columns="method", values="rollouts_spent").loc["default"]
    strongest = rates[["grpo_target", "grpo_untuned", "rejection_sft", "adp", "warm_grpo"]].max(axis=1)
    ahead, behind = (rates["solutions_routed"] > strongest).sum(), (rates["trace"] < rates["rejection_sft"]).sum()
    text = " ".join(README.split())
    assert f"ahead of the strongest baseline in {ahead} of {len(rates)} runs" in text
    assert f"behind rejection fine-tuning in {behind} of {len(rates)} runs" in text
    assert spent["solutions_routed"].mean() < spent["rejection_sft"].mean() / 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_to_one(page: Path, committed: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    here = committed / page.parent.relative_to(ROOT)
    assert [target for target in targets if not ((page.parent / target).exists() or (here / target).exists())] == []


def test_no_marker_is_left_unfilled() -> None:
    assert [page.name for page in PAGES if "@@" in page.read_text()] == []
