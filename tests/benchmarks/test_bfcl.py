"""BFCL multi-turn: what holds without it, and on the installation that `captrain benchmark install bfcl` makes."""

import json
from collections import Counter
from pathlib import Path

import pytest
from support.finished import Captrain
from support.installations import interpreter
from support.planted import selected_causes, slipping
from support.scripted import SPLITS, every, maker, play_hostile_calls

from captrain.agents.collection import collect
from captrain.agents.scripted import ScriptedPolicy
from captrain.benchmarks import installing
from captrain.contract import CheckedEnvironment

PYTHON = interpreter("bfcl")
CATEGORIES = ("base", "miss_func", "miss_param", "long_context")


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest) -> CheckedEnvironment:
    return maker(request, "bfcl")(processes=2)


# Without BFCL.


@pytest.mark.needs("minutes")
def test_a_failed_installation_says_why_and_leaves_nothing_behind(
    tmp_path: Path, captrain: Captrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dvc.yaml").touch()
    status, _, error = captrain(tmp_path, "benchmark", "install", "chess")
    assert status == 2 and "there are bfcl, tau2, agentdojo, openenv, verifiers" in error
    monkeypatch.setitem(installing.PACKAGES, "bfcl", ("--no-index", "bfcl-eval==0"))
    status, _, error = captrain(tmp_path, "benchmark", "install", "bfcl")
    assert status == 2 and "could not be installed" in error and "bfcl-eval==0" in error
    assert not (tmp_path / ".cache/installations/bfcl").exists()


# With it.


@pytest.mark.needs("bfcl")
def test_the_variants_of_a_scenario_are_in_one_split(target: CheckedEnvironment) -> None:
    splits = {split: every(target, split) for split in SPLITS}
    scenarios = {split: {task.id.rsplit("_", 1)[1] for task in tasks} for split, tasks in splits.items()}
    assert sum(map(len, splits.values())) == 800 and sum(map(len, scenarios.values())) == 200
    kinds = Counter(task.data["kind"] for task in splits["test"])
    assert kinds == dict.fromkeys(CATEGORIES, len(scenarios["test"]))
    assert target.about["version"] == "2026.3.23"


@pytest.mark.needs("bfcl")
def test_all_gold_solutions_score_one_and_doing_nothing_scores_nothing(target: CheckedEnvironment) -> None:
    """The gold calls of 800 tasks, played as JSON calls turn by turn and scored from the record."""
    calls = passed = idle = 0
    for task in [task for split in SPLITS for task in every(target, split)]:
        reference = target.reference(task)
        calls += sum(len(message.get("tool_calls", [])) for message in reference)
        passed += target.score(task, target.play(task, json.loads(json.dumps(reference)))).success
        idle += target.floor(task).success
    assert (passed, idle, calls) == (800, 0, 4625)


@pytest.mark.needs("bfcl")
def test_an_episode_offers_the_tools_of_its_task_and_the_user_brings_the_late_ones(
    target: CheckedEnvironment,
) -> None:
    task = next(task for task in every(target, "test") if task.data["kind"] == "miss_func")
    episode = target.open(task)
    opening = {tool["function"]["name"] for tool in episode.tools}
    assert opening < {tool["function"]["name"] for tool in target.tools}
    for tool in target.tools:
        assert tool["function"]["parameters"]["type"] == "object" and '"type": "dict"' not in json.dumps(tool)
    messages = target.play(task, target.reference(task))
    late = [message["content"] for message in messages if "updated some more functions" in (message["content"] or "")]
    assert len(late) == 1
    names = [function["name"] for function in json.loads(late[0].split("\n")[0])]
    assert names and not set(names) & opening
    episode.close()


@pytest.mark.needs("bfcl")
def test_malformed_and_hostile_calls_are_answered_and_never_raise_nor_run(
    target: CheckedEnvironment, tmp_path: Path
) -> None:
    """300 calls of random form. Their record is scored, and afterwards the worker is as before."""
    tasks = every(target, "training")[:: len(every(target, "training")) // 12]
    assert play_hostile_calls(target, tasks, tmp_path / "mark", answered=20) == 25 * len(tasks) >= 300
    assert target.score(tasks[0], target.play(tasks[0], target.reference(tasks[0]))).success


@pytest.mark.needs("bfcl")
@pytest.mark.parametrize(
    ("fault", "expected"), [("last call left out", "missing_write"), ("value with a slip", "wrong_argument")]
)
def test_a_diagnosis_names_the_planted_fault(
    target: CheckedEnvironment, tmp_path: Path, fault: str, expected: str
) -> None:
    """The agent plays gold, except for one mistake in every other task."""
    tasks = [task for task in every(target, "discovery") if task.data["kind"] == "base"]
    even = {task.id for task in tasks if int(task.id.rsplit("_", 1)[1]) % 2 == 0}
    policy = ScriptedPolicy(script=slipping(fault, even))
    rollouts = collect(policy, target, tasks, purpose="diagnosis", seed=0, journals=tmp_path, quiet=True)
    outcomes = Counter(rollout.outcome for rollout in rollouts)
    assert outcomes["failed"] > len(tasks) / 4 and not outcomes["error"]
    assert expected in selected_causes(rollouts)
