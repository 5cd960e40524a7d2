"""AgentDojo's user tasks, on the installation that `captrain benchmark install agentdojo` makes."""

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from support.installations import interpreter
from support.planted import selected_causes, slipping
from support.scripted import CONF, SPLITS, every, maker, play_hostile_calls

from captrain.agents.collection import collect
from captrain.agents.scripted import ScriptedPolicy
from captrain.benchmarks.pool import WORKERS
from captrain.contract import IDLE, CheckedEnvironment, tool_call
from captrain.planning.assumptions import split_sizes
from captrain.records import Task
from captrain.run import compose_spec

PYTHON = interpreter("agentdojo")
SIZES = {"workspace": 40, "travel": 20, "banking": 16, "slack": 21}
ASKED = """
import json, sys
import agentdojo_worker as worker
from agentdojo.agent_pipeline.base_pipeline_element import BasePipelineElement
from agentdojo.agent_pipeline.ground_truth_pipeline import GroundTruthPipeline
from agentdojo.types import text_content_block_from_string as block

class Silence(BasePipelineElement):
    def query(self, query, runtime, env, messages=(), extra_args={}):
        answer = {"role": "assistant", "content": [block("")], "tool_calls": None}
        return query, runtime, env, [*messages, answer], extra_args

passed = {"gold": [], "silence": []}
for name, suite in worker.SUITES.items():
    for task in suite.user_tasks.values():
        for agent, pipeline in (("gold", GroundTruthPipeline(task)), ("silence", Silence())):
            if suite.run_task_with_pipeline(pipeline, task, None, {}, environment=worker.fresh_world(name))[0]:
                passed[agent].append(f"agentdojo/{name}/{task.ID}")
print(json.dumps(passed), file=worker.REPLIES)
"""
"""Ask AgentDojo's own runner which tasks its ground truth solves, and which pass without an agent."""

REMOVED = """
import agentdojo_worker as worker

episode = worker.Episode("slack/user_task_1")
episode.result("remove_user_from_slack", {"user": "Alice"})
try:
    episode.task.utility("", episode.fresh(), episode.world)
except KeyError as error:
    print(repr(error), file=worker.REPLIES)
"""
"""Ask a task's `utility` after the agent has removed the person that it looks for."""

LOCATED = """
import agentdojo_worker as worker

worker.Episode = None
messages = [{"role": "user", "content": "Something else."}]
print(worker.locate("slack/user_task_1", messages, False), file=worker.REPLIES)
"""
"""Locate a run whose prompt is in no version."""


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest) -> CheckedEnvironment:
    return maker(request, "agentdojo")(processes=2)


def run_there(code: str) -> str:
    """Run code in AgentDojo's environment, beside the worker; return its output."""
    done = subprocess.run([PYTHON, "-c", code], cwd=WORKERS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def task_named(target: CheckedEnvironment, name: str) -> Task:
    return next(task for split in SPLITS for task in every(target, split) if task.id == f"agentdojo/{name}")


@pytest.mark.needs("agentdojo")
def test_each_suite_is_divided_in_the_same_shares_and_combined_tasks_stay_with_their_parts(
    target: CheckedEnvironment,
) -> None:
    splits = {split: every(target, split) for split in SPLITS}
    kinds = {split: Counter(task.data["kind"] for task in tasks) for split, tasks in splits.items()}
    assert sum(kinds.values(), Counter()) == SIZES and len({t.id for tasks in splits.values() for t in tasks}) == 97
    assert all(set(count) == set(SIZES) for count in kinds.values())
    assert {split: len(tasks) for split, tasks in splits.items()} == {"discovery": 43, "training": 25, "test": 29}
    assert split_sizes(compose_spec("default", 0, ["benchmark=agentdojo"], CONF).benchmark) == {
        split: len(tasks) for split, tasks in splits.items()
    }
    split_of = {task.data["task"]: split for split, tasks in splits.items() for task in tasks}
    scenarios: dict[str, set[str]] = {}
    for entry in target.environment.pool.call("list_tasks")["tasks"]:  # pyright: ignore[reportAttributeAccessIssue]
        scenarios.setdefault(entry["scenario"], set()).add(split_of[entry["id"]])
    assert len(scenarios) == 75 and all(len(shared) == 1 for shared in scenarios.values())
    assert split_of["slack/user_task_17"] == split_of["slack/user_task_0"] == split_of["slack/user_task_2"]
    assert target.about["version"] == "0.1.35" and target.about["tasks"] == "v1.2.2"


@pytest.mark.needs("agentdojo")
def test_all_gold_solutions_and_doing_nothing_score_as_agentdojo_itself_says(target: CheckedEnvironment) -> None:
    """The gold calls of 97 tasks, played as JSON calls through the worker and scored from the record."""
    asked = {agent: set(names) for agent, names in json.loads(run_there(ASKED)).items()}
    tasks = [task for split in SPLITS for task in every(target, split)]
    gold = {task.id: json.loads(json.dumps(target.reference(task))) for task in tasks}
    passed = {task.id for task in tasks if target.score(task, target.play(task, gold[task.id])).success}
    idle = {task.id for task in tasks if target.floor(task).success}
    calls = sum(len(message.get("tool_calls", [])) for messages in gold.values() for message in messages)
    assert passed == asked["gold"] and idle == asked["silence"]
    assert (len(passed), len(idle), calls) == (97, 5, 339)


@pytest.mark.needs("agentdojo")
def test_an_episode_has_the_tools_of_its_suite_and_the_same_calls_always_see_the_same(
    target: CheckedEnvironment,
) -> None:
    task = task_named(target, "workspace/user_task_0")
    episode = target.open(task)
    assert {tool["function"]["name"] for tool in episode.tools} < {tool["function"]["name"] for tool in target.tools}
    assert episode.messages[0]["role"] == "system" and "Emma Johnson" in episode.messages[0]["content"]
    episode.close()
    assert all(tool["function"]["parameters"]["type"] == "object" for tool in target.tools)
    assert "$ref" not in json.dumps(target.tools)
    actions = [tool_call("create_file", {"filename": "a.txt", "content": "b"})]
    first, second = (target.play(task, actions) for _ in range(2))
    assert first == second and "2025-01-01 12:00:00" in json.dumps(first)


@pytest.mark.needs("agentdojo")
def test_a_text_that_looks_like_a_list_is_read_as_one_and_never_run(target: CheckedEnvironment, tmp_path: Path) -> None:
    mail = {"recipients": "['a@b.com']", "subject": "s", "body": "b"}
    attack = f"[__import__('pathlib').Path({str(tmp_path / 'mark')!r}).touch()]"
    task = task_named(target, "workspace/user_task_0")
    messages = target.play(
        task, [tool_call("send_email", mail), tool_call("send_email", {**mail, "recipients": attack})]
    )
    answers = [message["content"] for message in messages if message["role"] == "tool"]
    assert "a@b.com" in answers[0] and answers[1].startswith("ValidationError")
    assert not (tmp_path / "mark").exists()


@pytest.mark.needs("agentdojo")
def test_messages_beyond_agentdojos_own_limit_are_not_answered(target: CheckedEnvironment) -> None:
    task = task_named(target, "slack/user_task_0")
    messages = target.play(task, [tool_call("get_channels", {})] * 15 + [tool_call("get_webpage", {"url": "x"})] * 2)
    assert [message["role"] for message in messages].count("tool") == 15 and messages[-1]["role"] == "assistant"
    assert target.score(task, messages).reward == 0.0


@pytest.mark.needs("agentdojo")
def test_a_utility_that_looks_for_what_the_agent_removed_is_a_failure_and_no_fault(
    target: CheckedEnvironment,
) -> None:
    task = task_named(target, "slack/user_task_1")
    actions = [tool_call("remove_user_from_slack", {"user": "Alice"}), IDLE]
    assert run_there(REMOVED) == "KeyError('Alice')\n"
    assert target.score(task, target.play(task, actions)).reward == 0.0


@pytest.mark.needs("agentdojo")
def test_a_run_with_another_prompt_is_in_no_version() -> None:
    assert run_there(LOCATED) == "{'version': None}\n"


@pytest.mark.needs("agentdojo")
def test_malformed_and_hostile_calls_are_answered_and_never_raise_nor_run(
    target: CheckedEnvironment, tmp_path: Path
) -> None:
    """300 calls of random form. Afterwards the worker and its worlds are as before."""
    tasks = every(target, "training")[::2][:12]
    assert play_hostile_calls(target, tasks, tmp_path / "mark", answered=16) == 300
    assert target.score(tasks[0], target.play(tasks[0], target.reference(tasks[0]))).success


@pytest.mark.needs("agentdojo")
def test_a_diagnosis_names_the_planted_fault(target: CheckedEnvironment, tmp_path: Path) -> None:
    """The agent plays gold, except that it leaves the last call out in every other task."""
    tasks = every(target, "discovery")
    policy = ScriptedPolicy(script=slipping("last call left out", {task.id for task in tasks[::2]}))
    rollouts = collect(policy, target, tasks, purpose="diagnosis", seed=0, journals=tmp_path, quiet=True)
    outcomes = Counter(rollout.outcome for rollout in rollouts)
    assert outcomes["failed"] >= 10 and not outcomes["error"]
    assert selected_causes(rollouts) == ["missing_write"]
