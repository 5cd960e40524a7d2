"""The published numbers: whole, apart from ours, and what in them does not agree by computation."""

from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from captrain.reporting import published as module
from captrain.reporting.published import (
    NOT_RUN,
    Published,
    claims,
    contradictions,
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
    for rates in read_published().tables.values():
        assert set(rates.values) == {"base", "adp", "awm", "grpo_target", "gepa", "single_share", "trace"}
        assert all(set(columns) == set(rates.tasks) for columns in rates.values.values())


def test_the_second_document_s_numbers_are_there_and_are_counts_of_its_tasks(tmp_path: Path) -> None:
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
    assert "A second document" in text and "merged, gain over the base" in text and "680 tasks" in text


def test_nothing_is_ours_where_another_thing_was_run(tmp_path: Path) -> None:
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


def test_another_version_of_the_benchmark_is_another_thing(tau2: Path) -> None:
    spec = tau2 / "results/spec.yaml"
    spec.write_text(spec.read_text().replace("0.2.1-dev", '"1.0"'))
    assert not table(tau2)["ours"].notna().to_numpy().any()


def test_the_printed_tables_say_what_was_not_run_here(tau2: Path) -> None:
    console = Console(width=160, record=True, file=StringIO())
    for part in published_tables(tau2):
        console.print(part)
    text = console.export_text()
    assert NOT_RUN in text and "airline 40.0 (20 tasks)" in text and "arXiv 2604.05336" in text


def test_the_known_contradictions_are_found() -> None:
    found = {(one.place, one.printed_value): one.computed for one in contradictions()}
    (single,) = [why for (where, printed), why in found.items() if printed == "40.3"]
    assert "66 of 164 print as 40.2" in single and "67 of 164 print as 40.9" in single
    (origin,) = [why for (where, printed), why in found.items() if "first point" in where]
    assert "32.9" in origin and "airline" in origin
    assert any(printed == "5,120 rollouts" and "20,480" in why for (_, printed), why in found.items())


def changed(monkeypatch: pytest.MonkeyPatch, edit: dict) -> list[str]:
    """Find the places of contradictions once a published number is another one."""
    data = read_published().model_dump()
    for path, value in edit.items():
        place = data
        *folders, last = path
        for key in folders:
            place = place[key]
        place[last] = value
    altered = Published.model_validate(data)
    monkeypatch.setattr(module, "read_published", lambda: altered)
    return [one.place for one in contradictions()]


def test_a_table_that_agrees_has_no_contradiction_and_each_rule_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [one.place for one in contradictions()]
    edits: dict[tuple[str | int, ...], tuple[object, str]] = {
        ("tables", "tau2", "values", "adp", "airline"): (29.0, "tau2, ADP, airline"),
        ("tables", "tau2", "values", "awm", "all"): (39.6, "tau2, AWM, all"),
        ("curves", "toolsandbox_rollouts", "lines", "gepa", 2560): (0.53, "toolsandbox_rollouts, GEPA"),
        ("selection", "times", "conditional"): (9, "selection, capabilities kept"),
        ("selection", "times", "numerical"): (11, "selection, numerical"),
        ("stated", 3, "difference"): (8.0, "text, TRACE over base on toolsandbox_perfect"),
    }
    for path, (value, where) in edits.items():
        with monkeypatch.context() as patch:
            assert where in [one for one in changed(patch, {path: value}) if one not in before]
    with monkeypatch.context() as patch:
        starts = {("curves", "tau2_rollouts", "lines", name, 0): 32.9 for name in ("grpo_target", "gepa", "trace")}
        assert not [where for where in changed(patch, starts) if where.startswith("tau2_rollouts")]


def test_claims_are_counts_of_tasks() -> None:
    found = {(one.table, one.column, one.second): one for one in claims()}
    assert len(found) == 6 * 3 + 6
    one = found["tau2", "all", "gepa"]
    assert (one.passed, one.passed_second, one.tasks) == (77, 65, 164)
