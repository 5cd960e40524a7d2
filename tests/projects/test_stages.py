"""Train a tiny base that can act in a user's benchmark."""

import sys
from pathlib import Path

import pytest

from captrain.models import Chat
from captrain.projects import init_project
from captrain.run import BaseModelSettings, Component
from captrain.training import train_base

SIZE = {"hidden": 16, "layers": 1, "heads": 1, "steps": 2, "batch": 2, "learning_rate": 1e-3, "weight_decay": 0.0}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    init_project(tmp_path / "mine", "calendar")
    for name in [name for name in sys.modules if name.partition(".")[0] == "components"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path / "mine")
    return tmp_path / "mine"


def test_the_tiny_base_is_trained_on_the_demonstrations_of_a_benchmark_of_the_users(project: Path) -> None:
    from components.calendar_desk import CalendarDesk  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer

    component = Component.model_validate({"_target_": "components.calendar_desk:Demonstrations", "habit": 0.5})
    summary = train_base(BaseModelSettings(**SIZE, demonstrations=component), 0, project / "artifacts/base")
    assert summary["steps"] == 2 and (project / "artifacts/base/model.safetensors").exists()
    tokenizer = AutoTokenizer.from_pretrained(project / "artifacts/base")
    desk = CalendarDesk()
    [task] = desk.tasks("test", 1)
    dialogue = [*desk.open(task).messages, *desk.reference(task)]
    tokens = Chat(tokenizer, desk.tools).prompt(dialogue)
    assert len(tokens) < 80, "texts that recur are a token each"
