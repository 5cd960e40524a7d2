"""The evaluation plays row by row: each arm plays each of its tasks once, whichever stage plays it."""

import shutil
from pathlib import Path

import pandas as pd
import pytest

from captrain.comparison import TRACE, evaluation_rows
from captrain.comparison.arms import Arm, ArmBatch, row_arms, split_batch
from captrain.models import Adapter
from captrain.records import publish_json, publish_text
from captrain.run import Spec, compose_spec

CONF = Path(__file__).parents[2] / "conf"
TASKS = [f"t{number}" for number in range(8)]
PAIR, OTHER = "0.5*a+0.5*b", "0.5*a+0.5*c"
ROUTES = {
    "chosen": ["a", "a", "base", "b", PAIR, PAIR, "base", "base"],
    "classifier": ["b", "b", "b", "b", "b", "b", "b", "b"],
}
CONTROLS = {
    "control:gap": ["a", "base", "c", "c", PAIR, "base", PAIR, "a"],
    "control:random": ["base", "c", "a", OTHER, "base", "c", "base", "b"],
}


def spec(*overrides: str) -> Spec:
    return compose_spec("default", 0, list(overrides), CONF)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of TRACE with adapters a and b, and of controls with one more adapter and two compositions."""
    for name in ("require_trained", "compose"):
        monkeypatch.setattr(f"captrain.comparison.arms.{name}", lambda *_: Adapter("folder", "digest"))
    entry = {"digest": "beef", "path": "adapter", "rollouts": 1, "discarded": 0}
    for stage, names in {**dict.fromkeys(evaluation_rows(), []), "routes": ["a", "b"], "controls": ["c"]}.items():
        publish_json(tmp_path / stage / "index.json", dict.fromkeys(names, entry))
    for stage, columns in {"routes": ROUTES, "controls": CONTROLS}.items():
        publish_text(tmp_path / stage / "routes.csv", pd.DataFrame({"task": TASKS, "kind": "x", **columns}).to_csv())
    publish_json(tmp_path / "routes/compositions.json", {PAIR: {"a": 0.5, "b": 0.5}})
    both = {PAIR: {"a": 0.5, "b": 0.5}, OTHER: {"a": 0.5, "c": 0.5}}
    publish_json(tmp_path / "controls/compositions.json", both)
    shutil.copytree(tmp_path / "routes", tmp_path / "controls" / TRACE)
    return tmp_path


@pytest.mark.parametrize("alternatives", [True, False])
def test_each_routed_task_is_played_once_by_the_base_trace_or_controls(results: Path, alternatives: bool) -> None:
    chosen = spec(f"evaluation.alternatives={alternatives}", f"causality.run={alternatives}")
    played = [
        (arm.name, task)
        for row in evaluation_rows()
        for arm in row_arms(chosen, results, row)
        for task in (TASKS if arm.tasks is None else arm.tasks)
    ]
    columns = [*CONTROLS.values(), *([*ROUTES.values()] if alternatives else [ROUTES["chosen"]])]
    routed = {(arm, task) for column in columns for task, arm in zip(TASKS, column, strict=True)}
    assert len(played) == len({*played}) and routed <= {*played}
    assert not {(arm, task) for arm, task in played if arm in (PAIR, OTHER, "c")} - routed
    assert ({("a", task) for task in TASKS} <= {*played}) == alternatives


@pytest.mark.parametrize(
    ("overrides", "beside", "parts"),
    [
        (["machine.workers=2"], 1, 2),
        (["machine.workers=2"], 5, 1),
        (["machine.workers=8"], 3, 3),
        (["machine=slurm"], 1, 4),
        (["policy=vllm", "machine.workers=2", "machine.vllm.python=python3"], 1, 1),
    ],
)
def test_a_row_of_few_arms_is_divided_among_the_workers(overrides: list[str], beside: int, parts: int) -> None:
    batches = split_batch(ArmBatch((Arm("base"),), Path("base"), spec(*overrides)), beside)
    assert [(batch.number, batch.parts) for batch in batches] == [(number, parts) for number in range(parts)]
