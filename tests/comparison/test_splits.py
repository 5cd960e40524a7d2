"""An evaluation on all splits, which every row of the table declares."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.outcomes import SMALL, outcomes_of, routes_of, run

from captrain.benchmarks import evaluation_tasks, load_benchmark, overlapping_tasks
from captrain.comparison.tables import mark_overlap
from captrain.contract import load_file
from captrain.errors import UserError
from captrain.run import Component, EvaluationSettings

SIZED = """class Environment:
    def size(self, split):
        return {"discovery": 3, "training": 2, "test": 4}[split]
"""


def settings(splits: str) -> EvaluationSettings:
    chosen = {"tasks": 4, "trials": 2, "resamples": 10, "confidence": 0.95, "splits": splits}
    return EvaluationSettings.model_validate(chosen)


def test_all_splits_are_played_and_marked_as_overlapping(letters: Callable[..., Path]) -> None:
    path = letters("sized")
    path.write_text(path.read_text().replace("class Environment:\n", SIZED))
    target = load_file(path)
    alone, whole = (evaluation_tasks(target, settings(splits)) for splits in ("test", "all"))
    assert len(alone) == 4 and whole[:4] == alone and len({task.id for task in whole}) == 4 + 3 + 2
    assert {task.split for task in whole} == {"test"}
    assert [task.id for task in overlapping_tasks(target)] == [task.id for task in whole[4:]]


def test_an_endless_benchmark_cannot_be_evaluated_on_all_splits() -> None:
    desk = Component.model_validate({"_target_": "captrain.benchmarks.servicedesk.ServiceDesk", "mix": "mixed"})
    with pytest.raises(UserError, match="split discovery of .* is endless"):
        evaluation_tasks(load_benchmark(desk), settings("all"))


def test_every_row_says_that_tasks_are_not_held_out() -> None:
    plain = run(outcomes_of(SMALL), routes_of(["base"] * 4))
    marked = mark_overlap(plain, 3, 4)
    assert all(label.endswith(" (3 of 4 tasks not held out)") for label in marked.main["label"])
    assert {*marked.main["overlapping"]} == {3} and "overlapping" not in plain.main
    assert {*marked.differences["overlapping"]} == {3} and "overlapping" not in plain.differences
    assert all("not held out" in text for text in marked.kinds["label"])
