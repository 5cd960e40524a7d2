"""The published numbers: complete, separate from ours, and their contradictions by computation."""

import re
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from captrain.comparison.published import (
    NOT_RUN,
    published_tables,
    read_published,
    table,
)

EVALUATION = "results/evaluation"


@pytest.fixture
def tau2(tmp_path: Path) -> Path:
    """A project whose results are of the paper's benchmark and model, on fewer tasks."""
    known = read_published()
    (tmp_path / EVALUATION).mkdir(parents=True)
    (tmp_path / "results/spec.yaml").write_text(
        f"base: {{model: {known.model}@abc}}\n"
        "benchmark: {_target_: captrain.benchmarks.tau2.Tau2, version: 0.2.1-dev, max_steps: 50}\n"
    )
    row = {"method": "trace", "pass_rate": 0.5, "mean_reward": 0.5, "tasks": 60}
    pd.DataFrame([row]).to_csv(tmp_path / EVALUATION / "main.csv")
    pd.DataFrame([{**row, "kind": "airline", "pass_rate": 0.4, "tasks": 20}]).to_csv(
        tmp_path / EVALUATION / "kinds.csv"
    )
    return tmp_path


def test_every_table_holds_a_number_for_each_method_and_column() -> None:
    for name, rates in read_published().tables.items():
        if name in ("second_document", "revised_abstract"):
            continue
        assert set(rates.values) == {"base", "adp", "awm", "grpo_target", "gepa", "single_share", "trace"}
        assert all(set(columns) == set(rates.tasks) for columns in rates.values.values())


def test_numbers_of_the_second_document_are_counts_of_its_tasks(tmp_path: Path) -> None:
    rows = table(tmp_path).query("what == 'second_document'").to_dict("records")
    assert [(row["method"], row["at"], row["published"], row["tasks"]) for row in rows] == [
        ("base", "all", 24.3, 680),
        ("trace", "all", 38.4, 680),
        ("merged", "gain over the base", 8.2, 680),
    ]
    assert [round(100 * count / 680, 1) for count in (165, 261)] == [24.3, 38.4]
    console = Console(width=160, record=True, file=StringIO())
    for part in published_tables(tmp_path):
        console.print(part)
    text = console.export_text()
    assert "A second document" in text and "gain over the base, 680" in text


def test_another_benchmark_or_model_has_no_numbers_of_ours(tmp_path: Path) -> None:
    frame = table(tmp_path)
    assert not frame[["ours", "our_tasks"]].notna().to_numpy().any()
    assert frame["published"].notna().to_numpy().all()
    (tmp_path / "results").mkdir()
    (tmp_path / "results/spec.yaml").write_text("base: {model: null}\nbenchmark: {_target_: some.ServiceDesk}\n")
    assert not table(tmp_path)["ours"].notna().to_numpy().any()


def test_ours_stands_beside_the_published_number_with_its_own_tasks(tau2: Path) -> None:
    frame = table(tau2)
    rows = {(row["what"], row["method"], row["at"]): row for row in frame.to_dict("records")}
    airline, whole = rows["tau2", "trace", "airline"], rows["tau2", "trace", "all"]
    assert (airline["published"], airline["tasks"], airline["ours"], airline["our_tasks"]) == (44.0, 50, 40.0, 20)
    assert (whole["ours"], whole["our_tasks"]) == (50.0, 60)
    assert [key for key, row in rows.items() if not pd.isna(row["ours"])] == [
        ("tau2", "trace", "airline"),
        ("tau2", "trace", "all"),
    ]


def test_another_version_of_the_benchmark_does_not_match(tau2: Path) -> None:
    spec = tau2 / "results/spec.yaml"
    spec.write_text(spec.read_text().replace("0.2.1-dev", '"1.0"'))
    assert not table(tau2)["ours"].notna().to_numpy().any()


def test_the_printed_table_says_not_run_here(tau2: Path) -> None:
    console = Console(width=160, record=True, file=StringIO())
    for part in published_tables(tau2):
        console.print(part)
    text = console.export_text()
    assert {rates.version for rates in read_published().tables.values()} == {"1", "July 2026", "another document"}
    for row in (r"TRACE, mixture[ │]+tau2-bench, 164[ │]+15\.3", r"TRACE[ │]+tau2-bench, 164[ │]+14\.1"):
        assert re.search(row, text.partition("version: July 2026")[2].partition("version: ")[0])
    assert NOT_RUN in text and "40.0 (20 tasks)" in text and "arXiv 2604.05336" in text


def test_disagreements_follow_from_the_printed_numbers() -> None:
    publication = read_published()
    tau2, curve = publication.tables["tau2"], publication.curves["tau2_rollouts"].lines
    printed = {row.value for row in publication.disagreements}
    assert {f"{100 * count / 164:.1f}" for count in range(165)}.isdisjoint({"40.3", "24.0"}) and {
        "40.3",
        "24.0",
    } <= printed
    assert tau2.values["single_share"]["all"] == 40.3 and tau2.values["base"]["all"] == 32.9
    assert {points[0] for points in curve.values()} == {24.0} == {tau2.values["base"]["airline"]}
    passed = {method: round(values["all"] * 164 / 100) for method, values in tau2.values.items()}
    for method, stated in (("base", 14.1), ("grpo_target", 9.2), ("gepa", 7.4)):
        assert str(stated) in printed and round(100 * (passed["trace"] - passed[method]) / 164, 1) != stated
