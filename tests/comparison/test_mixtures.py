"""Training in several environments: exact budgets, environments in turn, and no collisions of task ids."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.stages import stage
from support.training import ROOT, inside, interrupted, job, kill, passport, project, published

from captrain.comparison.baselines.grpo import MIXED, SINGLE, baseline_job
from captrain.contract import CheckedEnvironment
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.records import Capability, Task, publish
from captrain.run import Spec, compose_spec
from captrain.training.checkpoints import last_checkpoint
from captrain.training.jobs import EnvironmentFile, Job, TrainingEnvironment
from captrain.training.runs import train

pytestmark = pytest.mark.usefixtures("vouched")

Letters = Callable[..., Path]


def entry(stage: str, rollouts: int, item: str = "", method: str = "trace") -> LedgerEntry:
    purpose: Any = {"rollouts": "diagnosis", "environments": "calibration"}.get(stage, "training")
    return LedgerEntry(stage=stage, purpose=purpose, method=method, item=item, rollouts=rollouts)


TRACE = [
    entry("rollouts", 24), entry("environments", 8, "alpha"), entry("environments", 8, "alpha"),
    entry("environments", 9, "beta"), entry("adapters", 40, "alpha"), entry("adapters", 40, "beta"),
    entry("grpo_target", 500, "grpo_target", "grpo_target"),
]  # fmt: skip
RANKED = [Capability(id=name, name=name, description=name) for name in ("gamma", "beta", "alpha")]


def chosen(*overrides: str) -> Spec:
    return compose_spec("smoke", 3, overrides, ROOT / "conf")


def places(letters: Letters, folder: Path) -> tuple[TrainingEnvironment, ...]:
    """Two environments whose tasks have the same ids."""
    found = []
    for name, flat in (("alpha", 0), ("beta", 3)):
        path = letters(name, flat=flat, folder=folder)
        path.write_text(path.read_text().replace(f'f"{name}/', 'f"task/'))
        found.append(
            TrainingEnvironment(name, EnvironmentFile(folder, passport(path)), skip=3 if name == "alpha" else 0)
        )
    return tuple(found)


@pytest.fixture
def both(tiny: Path, letters: Letters, tmp_path: Path) -> Job:
    """A job in two environments: five steps of two groups."""
    return job(tiny, letters(), environments=places(letters, tmp_path), rollouts=40)


def test_environments_take_turns_and_play_their_tasks_in_order(
    both: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, str, str]] = []
    open_ = CheckedEnvironment.open

    def noted(self: CheckedEnvironment, task: Task, key: str = "") -> Any:
        opened.append((self.name, task.id, key))
        return open_(self, task, key)

    monkeypatch.setattr(CheckedEnvironment, "open", noted)
    with inside(tmp_path / "work"):
        one = train(both)
    expected = [(("alpha", "beta")[group % 2], group // 2 + (3 if group % 2 == 0 else 0)) for group in range(10)]
    assert [(name, task) for name, task, _ in opened[::4]] == [(n, f"task/training/{at}") for n, at in expected]
    assert len({key for *_, key in opened}) == len(opened) == one.rollouts == 40
    assert [row.places for row in one.history] == [{"alpha": 1, "beta": 1}] * 5
    card = (tmp_path / "work" / one.folder / "README.md").read_text()
    assert "in the environments `alpha`, `beta`." in card and "| groups of each environment | alpha 5, beta 5 |" in card


def few(letters: Letters, size: int) -> Path:
    """An environment with a limited number of tasks."""
    path = letters()
    known = f"class Environment:\n    def size(self, split):\n        return {size}\n"
    path.write_text(path.read_text().replace("class Environment:", known))
    return path


def test_few_tasks_are_repeated_in_further_trials(
    tiny: Path, letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, str]] = []
    open_ = CheckedEnvironment.open

    def noted(self: CheckedEnvironment, task: Task, key: str = "") -> Any:
        opened.append((task.id, key))
        return open_(self, task, key)

    monkeypatch.setattr(CheckedEnvironment, "open", noted)
    with inside(tmp_path / "work"):
        train(job(tiny, few(letters, 5), skip=2, rollouts=24))
    assert [task for task, _ in opened[::4]] == [f"letters/training/{at}" for at in (2, 3, 4, 2, 3, 4)]
    assert len({key for _, key in opened}) == 24


def test_an_environment_without_tasks_after_calibration_is_rejected(
    tiny: Path, letters: Letters, tmp_path: Path
) -> None:  # fmt: skip
    with inside(tmp_path / "work"), pytest.raises(UserError, match="calibration has spent all 2 training tasks"):
        train(job(tiny, few(letters, 2), skip=2, rollouts=24))


def test_training_in_several_environments_resumes_to_the_identical_adapter(both: Job, tmp_path: Path) -> None:
    from dataclasses import replace

    three = replace(
        both, environments=(*both.environments, replace(both.environments[0], name="again", skip=9)), rollouts=31
    )
    with inside(tmp_path / "undisturbed"):
        whole = train(three)
    with inside(tmp_path / "cut"):
        checkpoints = interrupted(three, 3)
        assert last_checkpoint(checkpoints) is not None
        resumed = train(three)
    assert (resumed.digest, resumed.history) == (whole.digest, whole.history)
    drawn = [row.places for row in whole.history]
    assert drawn == [
        {"alpha": 1, "beta": 1},
        {"again": 1, "alpha": 1},
        {"beta": 1, "again": 1},
        {"alpha": 1, "beta": 1},
    ]


def test_too_few_tasks_are_rejected_before_playing(both: Job, tmp_path: Path) -> None:
    environment = both.environments[1].source
    assert isinstance(environment, EnvironmentFile)
    path = environment.folder / "beta.py"
    path.write_text(path.read_text().replace("range(count)", "range(min(4, count))"))
    few = TrainingEnvironment("beta", EnvironmentFile(tmp_path, passport(path)))
    with inside(tmp_path / "work"), pytest.raises(UserError, match="beta gave 4 tasks .*; 5 were requested"):
        train(Job(**{**vars(both), "environments": (both.environments[0], few)}))


def test_single_trains_with_the_total_minus_diagnosis_and_its_calibration(
    letters: Letters, tmp_path: Path
) -> None:  # fmt: skip
    project = earned(letters, tmp_path, "alpha", "beta")

    def jobs(ranked: list[Capability]) -> list[Job]:
        publish(project / "results/capabilities/capabilities.jsonl", ranked)
        return SINGLE.jobs(chosen(), project, TRACE)

    [one] = jobs(RANKED)
    assert ([place.name for place in one.environments], one.environments[0].skip, one.name) == (["beta"], 3, "single")
    assert (one.rollouts, one.base) == (129 - 24 - 9, project / "artifacts/base")
    [other] = jobs(RANKED[2:])
    assert ([place.name for place in other.environments], other.rollouts) == (["alpha"], 129 - 24 - 16)
    assert jobs(RANKED[:1]) == []


def test_mixed_trains_with_the_total_minus_diagnosis_and_calibration(letters: Letters, tmp_path: Path) -> None:
    project = earned(letters, tmp_path, "beta", "alpha")
    [one] = MIXED.jobs(chosen(), project, TRACE)
    assert [(place.name, place.skip) for place in one.environments] == [("alpha", 3), ("beta", 3)]
    assert one.rollouts == 80 and one.trainer.settings() == chosen().trainer.settings()
    assert MIXED.jobs(chosen(), tmp_path / "nowhere", TRACE) == []
    with pytest.raises(UserError, match="baselines.mixed: no rollouts are left to train with"):
        MIXED.jobs(chosen(), project, TRACE[:4])


def test_untargeted_rows_train_with_the_whole_total(letters: Letters, tmp_path: Path) -> None:
    one = baseline_job("awm", chosen(), tmp_path, places(letters, tmp_path), 129)
    assert (one.name, one.rollouts, [place.name for place in one.environments]) == ("awm", 129, ["alpha", "beta"])


def earned(letters: Letters, tmp_path: Path, *names: str) -> Path:
    """A project whose environments have passports."""
    folder = tmp_path / "results/environments"
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = letters(name, folder=folder)
        path.with_suffix(".passport.json").write_text(passport(path).model_dump_json())
    return tmp_path


def test_disabled_stages_write_empty_files_and_load_nothing(tiny: Path, tmp_path: Path) -> None:
    names = ("grpo_target", "single", "mixed", "solutions")
    folder = project(tmp_path / "project", tiny, more=[f"baselines.{name}.run=false" for name in names])
    code = "import runpy, sys\nfor name in sys.argv[1:]:\n    sys.argv = ['stages/row.py', name]\n"
    code += "    runpy.run_path('stages/row.py', run_name='__main__')\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print('torch' in sys.modules)", *names], cwd=folder, text=True, check=True,
        capture_output=True,
    )  # fmt: skip
    *said, loaded = done.stdout.splitlines()
    lines = [rf"{name} +\d+\.\d s   not run: baselines\.{name}\.run is false" for name in names]
    assert all(re.fullmatch(line, text) for line, text in zip(lines, said, strict=True))
    assert loaded == "False"
    for name in names:
        assert json.loads((folder / f"results/{name}/index.json").read_text()) == {}
        assert (folder / f"results/{name}/ledger.jsonl").read_text() == "" and (folder / "artifacts" / name).is_dir()
        assert (folder / f"results/{name}/history.csv").read_text().count("\n") == 1


@pytest.mark.needs("minutes")
def test_a_killed_stage_of_several_environments_resumes_to_the_identical_adapter(
    tiny: Path, tmp_path: Path, warm: Path
) -> None:
    def made(name: str) -> Path:
        folder = project(tmp_path / name, tiny, "alpha", "beta", more=["baselines.mixed.run=true"])
        spent = {"rollouts": [entry("rollouts", 8)], "environments": [], "adapters": [entry("adapters", 44, "alpha")]}
        for part, entries in spent.items():
            publish(folder / f"results/{part}/ledger.jsonl", entries)
        return folder

    killed, undisturbed = made("killed"), made("undisturbed")
    kill(killed, "mixed", warm)
    assert stage(killed, "mixed") == stage(undisturbed, "mixed") == 0
    assert published(killed, "mixed") == published(undisturbed, "mixed")
    index = json.loads((killed / "results/mixed/index.json").read_text())
    assert list(index) == ["mixed"] and index["mixed"]["rollouts"] == 44
