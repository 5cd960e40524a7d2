"""README: short, its outputs and numbers match the code and the tables, and its links work."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import ROOT, printed_diagnosis

from captrain.records import read_table

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_it_has_at_most_100_lines_and_its_first_screens_have_picture_and_commands() -> None:
    lines = README.splitlines()
    assert len(lines) <= 100
    screens = "\n".join(lines[:45])
    assert "](docs/assets/loop.svg)" in screens and "](results/studies/headline.png)" in README
    assert all(command in screens for command in ("pip install", "captrain diagnose docs/examples", "make repro"))


def test_readme_and_tutorial_quote_what_diagnose_prints_and_a_page_has_all_of_it(tmp_path: Path) -> None:
    printed = printed_diagnosis(tmp_path / "out")
    report = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    quotes = [
        quote
        for name in ("README.md", "docs/diagnose.md")
        for quote in re.findall(r"^```text\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.M | re.S)
    ]
    assert len(quotes) == 3
    assert [quote for quote in quotes if quote not in printed and quote not in report] == []
    assert f"```text\n{printed}\n```" in (ROOT / "docs/reading-diagnosis.md").read_text(encoding="utf-8")


def test_its_lines_of_python_run(committed: Path) -> None:
    [code] = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    absolute = code.replace("docs/examples", str(ROOT / "docs/examples"))
    done = subprocess.run(
        [sys.executable, "-c", absolute], cwd=committed, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "wrong_argument" in done.stdout and "rejection_sft" in done.stdout, done.stderr


def test_its_table_has_the_rates_of_the_committed_run(committed: Path) -> None:
    main = read_table(committed / "results/evaluation/main.csv").set_index("label")
    rows = [line.strip("|").split("|") for line in README.splitlines() if re.match(r"\| [^|]+ \| \.\d{3} \(", line)]
    for label, rate, rollouts, _ in [[cell.strip() for cell in row] for row in rows]:
        row = main.loc[label]
        numbers = [f"{row[name]:.3f}".replace("0.", ".") for name in ("pass_rate", "low", "high")]
        assert rate == "{} ({} to {})".format(*numbers) and rollouts == f"{row.rollouts_spent:,}"
    assert len(rows) == 5


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
