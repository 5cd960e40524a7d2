"""A row is declared only in its own module; everything else reads the registry."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from captrain.comparison import (
    PLAYED,
    acting_stages,
    baselines,
    evaluate,
    evaluation_rows,
    headline_methods,
    label,
    spending_stages,
)
from captrain.comparison.baselines.registry import row_modules
from captrain.comparison.tables import EvaluationTables
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.planning import Node
from captrain.planning.estimate import RunEstimate
from captrain.projects.pipeline import shipped_stages
from captrain.records import publish_text
from captrain.reporting.figures import training
from captrain.run import Spec, compose_spec

ROOT = Path(__file__).parents[2]
package = import_module("captrain.comparison.baselines")  # `captrain.comparison.baselines` is also a function
PIPELINE = shipped_stages()
TOY = """
from captrain.comparison.baselines.baseline import DIAGNOSIS
from captrain.comparison.baselines.grpo import GRPOBaseline

BASELINE = GRPOBaseline(
    name="toy", label="a toy", order=9, environments=lambda spec, project: (), rests_on=(DIAGNOSIS,),
    compared_with=("grpo_target",),
)
"""
LEDGER = [
    LedgerEntry(stage="rollouts", purpose="diagnosis", method="trace", rollouts=40),
    LedgerEntry(stage="adapters", purpose="training", method="trace", item="a", rollouts=60),
    LedgerEntry(stage="grpo_target", purpose="training", method="grpo_target", rollouts=100),
]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A further module with a row in the package of baselines."""
    publish_text(tmp_path / "further/toy.py", TOY)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / "further")])
    row_modules.cache_clear()
    baselines.cache_clear()
    yield
    row_modules.cache_clear()
    baselines.cache_clear()
    sys.modules.pop("captrain.comparison.baselines.toy", None)
    if hasattr(package, "toy"):
        delattr(package, "toy")


def evaluated(toy_rollouts: int) -> EvaluationTables:
    arms = {"idle": ("", 0.0), "base": ("", 0.0), "a": ("adapters", 1.0), "toy": ("toy", 1.0)}
    arms["grpo_target"] = ("grpo_target", 0.0)
    rows = [
        (f"t{task}", "any", arm, stage, trial, "passed" if reward else "failed", reward)
        for arm, (stage, reward) in arms.items()
        for task in range(4)
        for trial in range(2)
    ]
    outcomes = pd.DataFrame(rows, columns=["task", "kind", "arm", "stage", "trial", "outcome", "reward"])
    routes = pd.DataFrame({"task": [f"t{task}" for task in range(4)], "kind": "any", "chosen": "a"})
    ledger = [*LEDGER, LedgerEntry(stage="toy", purpose="training", method="toy", rollouts=toy_rollouts)]
    return evaluate(outcomes, routes, ledger, ranked=["a"], controls={}, resamples=50, confidence=0.95, seed=0)


@pytest.mark.usefixtures("toy")
def test_a_new_row_is_in_the_table_with_charges_and_comparisons() -> None:
    evaluation = evaluated(toy_rollouts=60)
    [row] = [row for row in evaluation.main.to_dict("records") if row["method"] == "toy"]
    assert (row["label"], row["pass_rate"], row["rollouts_spent"]) == ("a toy", 1.0, 100)
    [spent] = [row for row in evaluation.costs.to_dict("records") if row["method"] == "toy"]
    assert spent["stages"] == "rollouts toy"
    pairs = {(row["first"], row["second"]) for row in evaluation.differences.to_dict("records")}
    assert {("toy", "base"), ("trace", "toy"), ("toy", "grpo_target")} < pairs
    assert "toy" in evaluation.metrics.pass_rate and "toy" in headline_methods()
    with pytest.raises(UserError, match="TRACE spent 100 rollouts and toy 101: not comparable"):
        evaluated(toy_rollouts=61)


@pytest.mark.usefixtures("toy")
def test_a_new_row_is_drawn_and_planned(tmp_path: Path) -> None:
    rows = [f"{name},40,0.5,0.5,0.5,{name}\n" for name in ("adapters", "grpo_target", "toy")]
    header = "adapter,rollouts,reward,success,informative,stage\n"
    publish_text(tmp_path / "results/evaluation/training.csv", "".join([header, *rows]))
    legends = [legend for part in training(tmp_path / "results").subfigs for legend in part.legends]
    assert "a toy" in [text.get_text() for legend in legends for text in legend.get_texts()]

    estimate = RunEstimate(with_toy(compose_spec("default", 0, [], ROOT / "conf")), Node(), 1)
    [cost] = [cost for cost in estimate.costs() if cost.stage == "toy"]
    assert cost.rollouts == estimate.trace - estimate.diagnosis


def with_toy(spec: Spec) -> Spec:
    """The specification with a section for the toy row."""
    sections = spec.baselines.model_copy(update={"toy": SimpleNamespace(run=True)})
    return spec.model_copy(update={"baselines": sections})


def test_every_row_has_a_section_a_stage_and_a_name_of_its_own() -> None:
    assert set(baselines()) == {name for name, _ in compose_spec("default", 0, [], ROOT / "conf").baselines}
    assert len({label(name) for name in baselines()}) == len(baselines())
    for name, row in baselines().items():
        params = {path: keys for entry in PIPELINE[name]["params"] for path, keys in entry.items()}
        assert {f"baselines.{name}", f"code.{name}"} <= {*params["results/spec.yaml"]}
        for ledger in [f"results/{stage}/ledger.jsonl" for stage in row.rests_on if row.learns_from == "rewards"]:
            assert {ledger, ledger.rpartition("/")[0]} & {*PIPELINE[name]["deps"]}


def test_the_pipeline_evaluates_all_arms_and_draws_all_trainings() -> None:
    assert PLAYED.as_posix() in PIPELINE["comparison"]["deps"]
    assert "results/evaluation" in PIPELINE["figures"]["deps"]
    assert {name for name in PIPELINE if "@" in name} == {f"evaluation@{row}" for row in evaluation_rows()}
    for stage in acting_stages():
        row, folder = ("trace", "routes") if stage == "adapters" else (stage, stage)
        assert f"results/{folder}" in PIPELINE[f"evaluation@{row}"]["deps"]
    assert set(spending_stages()) <= set(PIPELINE)


def test_duplicate_row_names_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_text(tmp_path / "second_adp.py", TOY.replace('"toy"', '"adp"'))
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    row_modules.cache_clear()
    baselines.cache_clear()
    with pytest.raises(ValueError, match="declares row adp, which another module declares, too"):
        baselines()
    sys.modules.pop("captrain.comparison.baselines.second_adp", None)
    delattr(package, "second_adp")
