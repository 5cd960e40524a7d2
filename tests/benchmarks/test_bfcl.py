"""BFCL multi-turn: what holds without it, and on the installation that `captrain benchmark install bfcl` makes."""

import json
import random
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.finished import Captrain
from support.installations import interpreter, needs
from support.planted import selected_causes

from captrain.benchmarks import installing
from captrain.benchmarks.loading import load_benchmark
from captrain.benchmarks.pool import WORKERS
from captrain.config import compose_spec
from captrain.contract import IDLE, Target, tool_call
from captrain.errors import UserError
from captrain.policies.policy import Play
from captrain.policies.scripted import ScriptedPolicy, by_the_book
from captrain.records import Message, Task
from captrain.rollouts.collection import collect

CONF = Path(__file__).parents[2] / "conf"
PYTHON = interpreter("bfcl")
CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
HOSTILE = (
    "__class__", "__init__", "_load_scenario", "eval", "exec", "exit", "kill", "os.system", "open", "", "cd; ls",
    "__import__('os').system('true')",
)  # fmt: skip


def make_benchmark(*overrides: str, python: str = PYTHON) -> Target:
    own = f"+machine.benchmarks.bfcl={{python: '{python}', processes: 2, timeout: 60.0}}"
    composed = compose_spec("default", 0, ["benchmark=bfcl", own, *overrides], CONF)
    return load_benchmark(composed.benchmark, composed.machine)


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    benchmark = make_benchmark()
    yield benchmark
    benchmark.environment.pool.close()  # pyright: ignore[reportAttributeAccessIssue]


def every(target: Target, split: Any) -> list[Task]:
    return target.tasks(split, target.size(split) or 0)


# Without BFCL.


def test_nothing_is_needed_before_a_task_is_asked_for_and_then_the_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        make_benchmark(python="").tasks("test", 1)
    assert "captrain benchmark install bfcl" in raised.value.remedy


def test_shares_that_leave_no_test_are_refused() -> None:
    with pytest.raises(UserError, match="leaves no scenario to test on"):
        make_benchmark("benchmark.discovery=0.7", "benchmark.training=0.3")


def test_an_installation_that_fails_says_why_and_leaves_none_behind(
    tmp_path: Path, captrain: Captrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dvc.yaml").touch()
    status, _, error = captrain(tmp_path, "benchmark", "install", "chess")
    assert status == 2 and "there are bfcl, tau2, openenv, verifiers" in error
    monkeypatch.setitem(installing.PACKAGES, "bfcl", ("--no-index", "bfcl-eval==0"))
    status, _, error = captrain(tmp_path, "benchmark", "install", "bfcl")
    assert status == 2 and "could not be installed" in error and "bfcl-eval==0" in error
    assert not (tmp_path / ".cache/installations/bfcl").exists()


# With it.


@needs("bfcl")
def test_the_variants_of_a_scenario_lie_in_one_split(target: Target) -> None:
    splits = {split: every(target, split) for split in ("discovery", "training", "test")}
    scenarios = {split: {task.id.rsplit("_", 1)[1] for task in tasks} for split, tasks in splits.items()}
    assert sum(map(len, splits.values())) == 800 and sum(map(len, scenarios.values())) == 200
    kinds = Counter(task.data["kind"] for task in splits["test"])
    assert kinds == dict.fromkeys(CATEGORIES, len(scenarios["test"]))
    assert target.about["version"] == "2026.3.23"


@needs("bfcl")
def test_all_gold_solutions_score_one_and_doing_nothing_scores_nothing(target: Target) -> None:
    """800 tasks of gold calls as JSON calls, played turn by turn through the worker and scored from the record."""
    calls = passed = idle = 0
    for split in ("discovery", "training", "test"):
        for task in every(target, split):
            reference = target.reference(task)
            messages = target.play(task, json.loads(json.dumps(reference)))
            calls += sum(len(message.get("tool_calls", [])) for message in reference)
            passed += target.score(task, messages).success
            idle += target.floor(task).success
    assert (passed, idle, calls) == (800, 0, 4625)


@needs("bfcl")
def test_an_episode_shows_the_tools_of_its_task_and_brings_the_late_ones_in_the_users_turn(target: Target) -> None:
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


@needs("bfcl")
def test_malformed_and_hostile_calls_are_answered_and_never_raise_nor_run(target: Target, tmp_path: Path) -> None:
    """300 calls of random form; the record that they leave is scored, and the worker is the same one afterwards."""
    rng, seen = random.Random(0), 0
    mark = tmp_path / "mark"
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    values: Sequence[Any] = (
        None, [], "{", "[]", "1", "x" * 200_000, "[" * 5000, {"a": deep}, deep, 10**400, float("1e300"), {"": 1},
        {"self": 1},
        {"path": f"__import__('pathlib').Path({str(mark)!r}).touch()"}, {"file_name": "../../etc/passwd"}, {"a": {}},
    )  # fmt: skip
    tasks = every(target, "training")[:: len(every(target, "training")) // 12]
    for task in tasks:
        episode = target.open(task)
        messages = list(episode.messages)
        names = [tool["function"]["name"] for tool in episode.tools]
        for number in range(25):
            name: Any = rng.choice([*names, *HOSTILE, None, 7, ["cd"], {"cd": 1}])
            arguments = rng.choice(values)
            call: Any = {"id": rng.choice(["a", 5, None]), "function": {"name": name, "arguments": arguments}}
            action: Message = {"role": "assistant", "content": rng.choice(["", None]), "tool_calls": [call]}
            replies, over = episode.step(action)
            messages += [action, *replies]
            seen += 1
            if over:
                assert number >= 19, "twenty steps in a turn are allowed"
                episode = target.open(task)
        assert target.score(task, messages).reward == 0.0
    assert seen == 25 * len(tasks) >= 300 and not mark.exists()
    assert target.score(tasks[0], target.play(tasks[0], target.reference(tasks[0]))).success


@needs("bfcl")
def test_a_call_has_seconds_of_cpu_and_not_of_the_clock() -> None:
    """A machine that is busy with something else decides no score."""
    lines = [
        "import time, bfcl_worker as worker",
        "worker.PATIENCE = 0.2",
        "with worker.patience():",
        "    time.sleep(0.5)",
        "try:",
        "    with worker.patience():",
        "        while True: pass",
        "except TimeoutError:",
        "    raise SystemExit(7)",
    ]
    assert subprocess.run([PYTHON, "-c", "\n".join(lines)], cwd=WORKERS, timeout=120).returncode == 7


@needs("bfcl")
@pytest.mark.parametrize("fault", ["last call left out", "value with a slip"])
def test_a_diagnosis_names_the_fault_that_was_planted(target: Target, tmp_path: Path, fault: str) -> None:
    """An agent that plays gold, but for every other task, in which it makes one mistake."""

    def faulty(play: Play) -> Sequence[Message]:
        reference = by_the_book(play)
        task = play.key.split("/")[2] if "bfcl/" in play.key else play.key
        if int(task.rsplit("_", 1)[1]) % 2:
            return reference
        places = [index for index, message in enumerate(reference) if message.get("tool_calls")]
        at = places[-1]
        if fault == "last call left out":
            return [*reference[:at], *reference[at + 1 :]]
        for index in reversed(places):
            function = reference[index]["tool_calls"][0]["function"]
            texts = {name: value for name, value in function["arguments"].items() if isinstance(value, str)}
            if texts:
                slipped = {**function["arguments"], **{name: f"{value}x" for name, value in texts.items()}}
                return [*reference[:index], tool_call(function["name"], slipped), *reference[index + 1 :]]
        return [IDLE]

    tasks = [task for task in every(target, "discovery") if task.data["kind"] == "base"]
    policy = ScriptedPolicy(script=faulty)
    rollouts = collect(policy, target, tasks, purpose="diagnosis", seed=0, journals=tmp_path, quiet=True)
    failed = [rollout for rollout in rollouts if rollout.outcome == "failed"]
    assert len(failed) > len(tasks) / 4 and not [rollout for rollout in rollouts if rollout.outcome == "error"]
    expected = {"last call left out": "missing_write", "value with a slip": "wrong_argument"}[fault]
    assert expected in selected_causes(rollouts)
