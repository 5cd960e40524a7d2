"""Playing a benchmark from Python, and the notebook that shows it."""

import json
from pathlib import Path

import pytest
from support.rooms import Rooms

import captrain
from captrain.agents.scripted import ScriptedPolicy
from captrain.records import Split


def test_a_benchmark_is_played_by_a_policy_and_diagnosed_from_python() -> None:
    rollouts = captrain.play(Rooms, ScriptedPolicy(skill=0.5), tasks=40)
    assert {rollout.outcome for rollout in rollouts} == {"passed", "failed"} and len(rollouts) == 40
    found = captrain.diagnose(rollouts)
    assert len(found.causes) > 0 and len(found.rollouts) == 40
    assert captrain.play(Rooms(), ScriptedPolicy(skill=0.5), tasks=40) == rollouts


def test_every_cell_of_the_notebook_runs_with_the_shown_output() -> None:
    cells = json.loads((Path(__file__).parents[2] / "docs/play.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    shown = list[str]()
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        *body, last = "".join(cell["source"]).split("\n")
        exec("\n".join(body), names)
        shown.append(repr(eval(last, names)))
        assert shown[-1] == "".join(cell["outputs"][0]["data"]["text/plain"])
    assert len(shown) == 2


@pytest.mark.parametrize("split", ["discovery", "training", "test"])
def test_every_split_can_be_played(split: Split) -> None:
    [rollout] = captrain.play(Rooms(busy=2), ScriptedPolicy(), tasks=1, split=split)
    assert (rollout.outcome, rollout.task.split) == ("passed", split)
