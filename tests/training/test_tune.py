"""The search for GRPO's settings on the target: its tasks, its candidates and its counts."""

import csv
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.scripts import SCRIPTS, load_script
from support.training import POLICY, ROOT, inside

from captrain.contract import CheckedEnvironment
from captrain.records import Task
from captrain.run import Spec, compose_spec, publish_spec

SETTINGS = [(4, 2, 1, 1e-2, "constant", None), (4, 1, 2, 1e-2, "linear", 0.28), (2, 2, 1, 1e-2, "linear", None)]


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> ModuleType:
    """The script with small settings."""
    monkeypatch.syspath_prepend(SCRIPTS)  # a script finds its neighbours where it lies
    module = load_script("tune_grpo")
    for name, value in {"ROLLOUTS": 8, "TASKS": 6, "GRID": SETTINGS, "RUNGS": {0: 2, 1: 1}}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(sys.modules["judging"], "FIRST", 50)
    monkeypatch.setattr(module, "base_of", lambda spec, seed: project_of(tiny, seed))
    return module


def project_of(tiny: Path, seed: int) -> Path:
    """Make a project with a base for a seed, in the working folder."""
    folder = Path(f"project{seed}/artifacts")
    if not (folder / "base").exists():
        folder.mkdir(parents=True)
        (folder / "base").symlink_to(tiny)
    return folder.parent


def small() -> Spec:
    settings = [f"policy.{key}={value}" for key, value in POLICY.items()]
    return compose_spec("smoke", 0, [*settings, "trainer.rank=2", "machine.workers=1"], ROOT / "conf")


def test_the_search_halves_its_candidates_and_never_plays_the_test_split(
    tune: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Task] = []
    open_ = CheckedEnvironment.open

    def remember(self: CheckedEnvironment, task: Task, key: str = "") -> Any:
        opened.append(task)
        return open_(self, task, key)

    monkeypatch.setattr(CheckedEnvironment, "open", remember)
    passes = tune.passes
    # Rates of the candidates in playing order: the second is the best, the first the worst.
    rates = iter([0.0, 1.0, 0.5, 1.0, 0.5])

    def ranked(*arguments: Any) -> Any:
        return np.full_like(passes(*arguments), next(rates))

    monkeypatch.setattr(tune, "passes", ranked)
    with inside(tmp_path):
        publish_spec(small(), Path("results/spec.yaml"))
        tune.main()
        rows = list(csv.DictReader(Path("results/studies/grpo_tuning.csv").read_text(encoding="utf-8").splitlines()))
    assert [(row["rung"], row["seeds"], row["group_size"], row["schedule"], row["kept"]) for row in rows] == [
        ("1", "0", "4", "linear", "True"), ("1", "0", "2", "linear", "True"), ("1", "0", "4", "constant", "False"),
        ("2", "0 1", "4", "linear", "True"), ("2", "0 1", "2", "linear", "False"),
    ]  # fmt: skip
    assert {task.split for task in opened} == {"training"}
    trained, judged = ([task for task in opened if (int(task.id[-5:]) >= 50) is late] for late in (False, True))
    # This model earns nothing, so all candidates of a seed give one adapter, which is played once.
    assert (len(trained), len(judged)) == (5 * 8, 2 * 6 * 2) and {int(task.id[-5:]) for task in judged} == {
        *range(50, 56)
    }
    assert [int(row["search_rollouts"]) for row in rows] == [3 * 20] * 3 + [5 * 20] * 2
    assert all(float(row["low"]) <= float(row["pass_rate"]) <= float(row["high"]) for row in rows)
