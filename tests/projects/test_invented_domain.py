"""A project of an invented domain: the three bad habits of its base are found, and no other."""

import sys
from pathlib import Path

import pytest
import yaml
from support.domains.copies import copy_domain
from support.finished import Captrain

from captrain.capabilities import read_selection
from captrain.projects import init_project
from captrain.records import publish_text

EXPERIMENT = {
    "defaults": [{"override /benchmark": "cellar"}],
    "base": {
        "hidden": 64, "layers": 2, "heads": 2, "steps": 700, "batch": 16, "learning_rate": 1e-2,
        "demonstrations": {"_target_": "components.cellar:Demonstrations"},
    },
    "rollouts": {"tasks": 200},
    "machine": {"workers": 1},
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new project with the cellar in place of the calendar."""
    init_project(tmp_path / "mine", "calendar")
    for name in [name for name in sys.modules if name.partition(".")[0] == "components"]:
        monkeypatch.delitem(sys.modules, name)  # those of another test's project
    monkeypatch.syspath_prepend(tmp_path / "mine")
    copy_domain("cellar", tmp_path / "mine/components")
    publish_text(tmp_path / "mine/conf/benchmark/cellar.yaml", "_target_: components.cellar:Cellar\n")
    experiment = "# @package _global_\n" + yaml.safe_dump(EXPERIMENT)
    publish_text(tmp_path / "mine/conf/experiment/cellar.yaml", experiment)
    publish_text(tmp_path / "mine/params.yaml", yaml.safe_dump({"experiment": "cellar", "seed": 0, "overrides": []}))
    return tmp_path / "mine"


@pytest.mark.needs("minutes")
def test_the_planted_habits_of_a_base_are_selected_and_nothing_else(project: Path, captrain: Captrain) -> None:
    for stage in ("compose", "base", "rollouts", "labels", "capabilities"):
        status, _, err = captrain(project, "run", stage)
        assert status == 0, err
    report = read_selection(project / "results")
    selected = {entry["id"] for entry in report["candidates"] if entry["selected"]}
    assert selected == {"missing_lookup", "wrong_record", "missing_write"}
