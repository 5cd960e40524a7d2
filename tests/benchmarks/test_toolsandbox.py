"""ToolSandbox: what holds without it, and on an installation named by CAPTRAIN_TOOLSANDBOX_PYTHON."""

import hashlib
import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.scripted import CONF, SPLITS, Make, composed_on, every, interleaved, maker

from captrain.agents.collection import collect, floor_scores
from captrain.agents.scripted import ScriptedPolicy
from captrain.benchmarks import Replay, Worlds, logged_replay, open_worlds
from captrain.benchmarks.pool import WORKERS
from captrain.benchmarks.spoken import MilestoneWorld
from captrain.benchmarks.toolsandbox import family, split_families
from captrain.benchmarks.worlds import MOST_POOLS
from captrain.capabilities.programmatic import ProgrammaticAnalyst
from captrain.contract import CheckedEnvironment, RunningEpisode, tool_call
from captrain.errors import InfrastructureError
from captrain.records import Message, Rollout, Score, Task
from captrain.run import compose_spec

EVERYTHING = bool(os.environ.get("CAPTRAIN_ALL"))
BYE: Message = {"role": "assistant", "content": "I have done what I could."}
installed = pytest.mark.needs("toolsandbox")


@pytest.fixture(scope="module")
def make(request: pytest.FixtureRequest) -> Make:
    return maker(request, "toolsandbox")


def test_variants_of_a_scenario_stay_in_one_split_and_splits_are_disjoint() -> None:
    stems = [
        f"{verb}_{noun}" for verb in ("paint", "wash", "lend", "sell") for noun in ("boat", "bike", "lamp", "door")
    ]
    variants = ("", "_alt", "_wifi_off", "_multiple_user_turn_alt", "_with_key_insufficient_information")
    categories = {stem + variant: "multi" if "multi" in variant else "one" for stem in stems for variant in variants}
    assert {family(name) for name in categories} == set(stems)
    splits = split_families(categories, 0.35, 0.2)
    assert sorted(name for names in splits.values() for name in names) == sorted(categories)
    assert all(len({split for split, names in splits.items() if stem in map(family, names)}) == 1 for stem in stems)
    assert [len(splits[name]) / len(categories) for name in splits] == pytest.approx([0.35, 0.2, 0.45], abs=0.07)
    shuffled = random.Random(1).sample(sorted(categories), len(categories))
    again = split_families({name: categories[name] for name in shuffled}, 0.35, 0.2)
    assert {split: set(names) for split, names in again.items()} == {k: set(v) for k, v in splits.items()}


WITHOUT = """
import importlib, json, sys, types
from importlib.machinery import ModuleSpec

class Any_(type):
    def __getattr__(cls, name): return f"{cls.__name__}.{name}"

class Stand(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return Any_(name, (), {"__init__": lambda self, **given: vars(self).update(given)})

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, Finder, is_package=True) if name.split(".")[0] == "tool_sandbox" else None
    @staticmethod
    def create_module(spec): return Stand(spec.name)
    @staticmethod
    def exec_module(module): pass

sys.meta_path.insert(0, Finder)
worker = importlib.import_module("toolsandbox_worker")
worker.AgentRole.get_available_tools = classmethod(lambda cls: {"good": None})
context = types.SimpleNamespace(get_execution_facing_tool_name=lambda name: name)
worker.get_current_context = lambda: context
episode = object.__new__(worker.ScenarioEpisode)
episode.calls, episode.names = 0, {}
made = [episode.executable(call) for call in json.loads(sys.argv[1])]
worker.REPLIES.write(json.dumps([[one.openai_tool_call_id, one.content] for one in made]))
"""
"""Let the worker rebuild calls, with an empty stand-in for ToolSandbox."""


def test_the_code_of_a_call_holds_only_our_id_an_existing_tool_and_values(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    calls: list[dict[str, Any]] = [
        {"id": f"x = 1\n{code}\n#", "function": {"name": "good", "arguments": {"a": f"'); {code}; ('", code: code}}},
        {"id": 7, "function": {"name": f"good(); {code}; print", "arguments": {}}},
        {"id": "a", "function": {"name": "good", "arguments": f"{{{code}"}},
        {"id": "a", "function": {"name": "good", "arguments": [code]}},
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps(calls)], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(WORKERS), "CAPTRAIN_CLOCK": "2026-01-15T10:00:00"},
    )  # fmt: skip
    made = json.loads(done.stdout)
    assert [own for own, _ in made] == ["call_1", "call_2", "call_3", "call_4"]
    taken: list[dict[str, Any]] = []
    exec(made[0][1], {"good": lambda **arguments: taken.append(arguments)})
    assert taken == [calls[0]["function"]["arguments"]]
    for _, text in made[1:]:
        with pytest.raises(ValueError, match="there is no tool|are not JSON|are not an object"):
            exec(text, {"good": lambda **arguments: None})
    assert not mark.exists()


ANSWERING = (
    WITHOUT.partition("worker.AgentRole")[0]
    + """
def asked(query):
    try:
        return worker.answered(worker.KeptAnswer("https://stocks", {"X-RapidAPI-Key": "none"}, {"query": query}).json())
    except Exception as error:
        try: worker.answered(None)
        except OSError as fault: return f"{type(error).__name__}, then {fault}"

worker.REPLIES.write(json.dumps([asked(query) for query in json.loads(sys.argv[1])]))
"""
)


def test_a_kept_answer_is_given_and_a_missing_one_fails_the_request_and_not_the_tool(tmp_path: Path) -> None:
    for query, text in {"Apple": '{"answer": "AAPL"}', "Pear": "{"}.items():
        name = hashlib.sha256(json.dumps(["https://stocks", {"query": query}], sort_keys=True).encode()).hexdigest()
        (tmp_path / f"{name[:16]}.json").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", ANSWERING, '["Apple", "Pear", "Plum"]'], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(WORKERS), "CAPTRAIN_CLOCK": "2026-01-15T10:00:00", "CAPTRAIN_ANSWERS": str(tmp_path)},
    )  # fmt: skip
    kept, broken, absent = json.loads(done.stdout)
    assert kept == "AAPL" and "JSONDecodeError, then" in broken and "is no kept answer: remove it" in broken
    assert absent.endswith("https://stocks did not answer: RAPID_API_KEY is not set, and no answer is kept")


@pytest.fixture(scope="module")
def target(make: Make) -> CheckedEnvironment:
    return make(processes=2)


def everything(target: CheckedEnvironment) -> list[Task]:
    return [task for split in SPLITS for task in every(target, split)]


def chance_calls(task: Task, tools: Sequence[dict[str, Any]], count: int = 4) -> list[Message]:
    """Random calls that fit the schemas, then a last message."""
    rng = random.Random(task.id)
    values = {"string": "Bread", "number": 3.0, "integer": 3, "boolean": True}
    actions = []
    for _ in range(count):
        function = rng.choice(list(tools))["function"]
        properties = function["parameters"].get("properties", {})
        arguments = {name: values.get(one.get("type"), "Bread") for name, one in properties.items()}
        actions.append(tool_call(function["name"], arguments))
    return [*actions, BYE]


@installed
def test_there_are_129_scenarios_of_which_28_ask_outside_services(target: CheckedEnvironment) -> None:
    environment: Any = target.environment
    assert Counter(entry["category"] for entry in environment._scenarios.values()) == {
        "single_tool_call": 19,
        "multiple_tool_call": 54,
        "multiple_user_turn": 28,
        "insufficient_information": 28,
    }
    assert len(environment.not_runnable) == len(target.about["not_runnable"]) == 28
    tasks = everything(target)
    assert len(tasks) == len({task.id for task in tasks}) == 101
    assert not {task.data["task"] for task in tasks} & set(environment.not_runnable)
    assert all(task.data["milestones"] for task in tasks)


@installed
def test_the_floor_is_the_measured_one(target: CheckedEnvironment) -> None:
    """On the 101 scenarios that can be played; doing nothing in the 28 others scores 0: 26 of 129 are perfect."""
    scores = [score for score in floor_scores(target, everything(target)).values() if score is not None]
    assert sum(score.success for score in scores) == 26
    assert sum(score.reward for score in scores) / 129 == pytest.approx(0.2016, abs=1e-3)


@installed
def test_a_score_can_be_computed_again_from_the_record_in_another_process(
    target: CheckedEnvironment, make: Make
) -> None:
    other = make()
    for task in everything(target)[:: 1 if EVERYTHING else 9]:
        record = target.play(task, chance_calls(task, target.open(task).tools))
        first = target.score(task, record)
        assert first == target.score(task, record) == other.score(task, record)
        # The replay gets the same answers as the episode, except for memory addresses in error messages.
        again = other.play(task, [message for message in record if message["role"] == "assistant"])
        assert re.sub("0x[0-9A-F]+", "0x", repr(again)) == re.sub("0x[0-9A-F]+", "0x", repr(record))


@installed
def test_tasks_and_scores_do_not_depend_on_the_day(
    target: CheckedEnvironment, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    other = make()
    assert everything(other) == everything(target)
    assert make("benchmark.clock='2025-07-01T08:00:00'").about["clock"] != target.about["clock"]


@installed
def test_what_a_model_writes_is_never_executed(target: CheckedEnvironment, tmp_path: Path) -> None:
    task = everything(target)[0]
    mark = tmp_path / "executed"
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    episode = target.open(task)
    name = episode.tools[0]["function"]["name"]
    hostile: list[dict[str, Any]] = [
        {"id": f"x = 1\n{code}\n#", "function": {"name": name, "arguments": {}}},
        {"id": {"a": code}, "function": {"name": name, "arguments": {}}},
        {"id": "a", "function": {"name": f"{name}(); {code}; print", "arguments": {}}},
        {"id": "a", "function": {"name": "print", "arguments": {"x": code}}},
        {"id": "a", "function": {"name": name, "arguments": {f"x={code}, y": 1}}},
        {"id": "a", "function": {"name": name, "arguments": {"x": f"'); {code}; ('"}}},
        {"id": "a", "function": {"name": name, "arguments": f"{{{code}"}},
        {"id": "a", "function": {"name": name, "arguments": "[1]"}},
        {"id": "a", "function": {}},
    ]
    record = [*episode.messages]
    for at, call in enumerate(hostile):
        action = {"role": "assistant", "content": "", "tool_calls": [call]}
        replies, done = episode.step(action)
        assert not done and [reply["role"] for reply in replies] == ["tool"]
        assert at < 2 or replies[0]["error"] is True  # the first two are good calls under a bad id
        record += [action, *replies]
    replies, done = episode.step(BYE)
    assert done
    target.score(task, [*record, BYE, *replies])
    episode.close()
    assert not mark.exists()


@installed
def test_scenarios_that_ask_outside_services_are_played_with_kept_answers_and_a_missing_one_is_no_failure(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAPID_API_KEY", raising=False)
    url, params = "https://real-time-finance-data.p.rapidapi.com/search", {"query": "Apple"}
    name = hashlib.sha256(json.dumps([url, params], sort_keys=True).encode()).hexdigest()[:16]
    answer = {"data": {"stock": [{"name": "Apple Inc", "symbol": "AAPL:NASDAQ", "price": 231.5}]}}
    (tmp_path / f"{name}.json").write_text(json.dumps({"url": url, "params": params, "answer": answer}))
    target = make(f"benchmark.answers={tmp_path}")
    assert target.about["not_runnable"] == {} and len(everything(target)) == 129
    (task,) = [one for one in everything(target) if one.id == "toolsandbox/find_stock_symbol_with_company_name"]
    told: Message = {"role": "assistant", "content": "The stock symbol of Apple is AAPL."}
    record = target.play(task, [tool_call("search_stock", {"query": "Apple"}), told])
    assert "AAPL" in next(message["content"] for message in record if message["role"] == "tool")
    assert target.score(task, record).reward > 0.5 > target.floor(task).reward
    with pytest.raises(InfrastructureError, match="did not answer: RAPID_API_KEY is not set, and no answer is kept"):
        target.play(task, [tool_call("search_stock", {"query": "Pear"}), told])
    assert target.score(task, record).reward > 0.5


@installed
def test_an_agent_that_says_nothing_ends_its_episode_and_is_scored(target: CheckedEnvironment) -> None:
    task = everything(target)[0]
    record = target.play(task, [{"role": "assistant", "content": ""}])
    assert record[-1] == {"role": "assistant", "content": ""}
    assert target.score(task, record) == target.floor(task)


@installed
def test_thirty_two_interleaved_episodes_in_one_worker_equal_one_after_another(make: Make) -> None:
    target = make()
    tasks = (everything(target) * 2)[:32]
    actions = [chance_calls(task, target.open(task).tools, 3) for task in tasks]
    alone = [target.play(task, some) for task, some in zip(tasks, actions, strict=True)]
    assert interleaved(target, tasks, actions) == alone


@installed
def test_rollouts_are_collected_and_their_milestones_labelled(target: CheckedEnvironment, tmp_path: Path) -> None:
    def script(play: RunningEpisode) -> list[Message]:
        return [tool_call(play.tools[0]["function"]["name"], {}), BYE]

    tasks = target.tasks("discovery", 6)
    rollouts = collect(
        ScriptedPolicy(script=script), target, tasks, purpose="diagnosis", seed=0, journals=tmp_path, quiet=True
    )
    assert all(rollout.outcome != "error" and rollout.score for rollout in rollouts)
    analyst = ProgrammaticAnalyst()
    (proposed,) = analyst.propose([rollouts], target.tools)
    found = {one.id for one in proposed}
    assert found & {"missing_write", "wrong_argument", "missing_information", "undue_compliance"}
    assert json.loads(rollouts[0].model_dump_json())["task"]["data"]["world"]["benchmark"] == "toolsandbox"


def logged_at(clock: str) -> Rollout:
    task = Task(id="toolsandbox/wifi_off", split="discovery", data={"world": {"clock": clock}})
    return Rollout(
        id=clock, environment="toolsandbox", task=task, trial=0, purpose="diagnosis", policy="log", messages=[BYE],
        outcome="failed", score=Score(reward=0.0, success=False),
    )  # fmt: skip


def test_a_logs_clock_that_is_no_instant_and_too_many_clocks_open_no_worker() -> None:
    machine = compose_spec("default", 0, ["machine.benchmarks.toolsandbox.python=/nowhere/python"], CONF).machine
    with open_worlds(machine=machine) as worlds:
        for clock in ("yesterday", "2026-01-15T10:00:00\0"):
            assert worlds.of(logged_at(clock)) is None and "is no instant" in worlds.trouble
        for second in range(MOST_POOLS + 2):
            assert worlds.of(logged_at(f"2026-01-15T10:00:{second:02}")) is None
        assert f"more than {MOST_POOLS} kinds of workers" in worlds.trouble


def test_random_ids_of_a_world_are_no_sign_of_another_instant() -> None:
    ids = itertools.count()

    def replay(operation: str, dialogues: list[list[Message]], **_: object) -> dict[str, Any]:
        runs = [[(f"message {next(ids)}", False, None), ("14:05", False, None)] for _ in dialogues]
        return {"replayed": [{"calls": calls, "parts": {}, "passed": False} for calls in runs]}

    pool: Any = SimpleNamespace(call=replay)
    calls = [tool_call("send_message", {}), tool_call("get_time", {})]
    for time, is_here in (("14:05", True), ("15:05", False)):
        answers = [{"role": "tool", "content": content} for content in ("message 77", time)]
        logged = [calls[0], answers[0], calls[1], answers[1]]
        assert MilestoneWorld(pool, {}, logged, [], {}).returns(logged) is is_here
        assert not MilestoneWorld(pool, {}, logged, [], {}).returns(logged[:2])


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with open_worlds(machine=composed_on("toolsandbox").machine) as opened:
        yield opened


def rollout_of(
    target: CheckedEnvironment, task: Task, actions: Sequence[Message], *, environment: str = "toolsandbox"
) -> Rollout:
    messages = target.play(task, actions)
    score = target.score(task, messages)
    return Rollout(
        id=f"{task.id} {len(str(messages))}", environment=environment, task=task, trial=0, purpose="diagnosis",
        policy="script", messages=messages, outcome="passed" if score.success else "failed", score=score,
    )  # fmt: skip


@installed
def test_a_rollout_is_replayed_to_its_verdict_and_milestones_give_references_that_pass(
    target: CheckedEnvironment, worlds: Worlds
) -> None:
    tasks = everything(target)[:: 1 if EVERYTHING else 16]
    unknown = 0
    for task in tasks:
        for count in (0, 4):
            rollout = rollout_of(target, task, chance_calls(task, target.open(task).tools, count))
            world = worlds.of(rollout)
            if world is None:
                assert worlds.trouble.startswith("no calls are known that meet all milestones")
                unknown += count == 0
                continue
            assert rollout.score is not None
            gold = Replay(world.reference, world.owed)
            replayed, *ideal = world.play([logged_replay(rollout), gold, gold])
            assert (replayed.parts, replayed.passed) == (rollout.score.parts, rollout.score.success), task.id
            assert [played.passed for played in ideal] == [True, True], task.id
    assert 0 < unknown < len(tasks) / 2


@installed
def test_missing_calls_are_added_to_a_rollout_and_added_words_are_a_message_of_their_own(
    target: CheckedEnvironment, worlds: Worlds
) -> None:
    (task,) = [task for task in everything(target) if task.id == "toolsandbox/wifi_off"]
    world = worlds.of(rollout := rollout_of(target, task, [BYE]))
    assert world is not None and world.owed == ("Wifi is turned off",)
    assert world.kinds["set_wifi_status"] == "write" and [call.tool for call in world.reference] == ["set_wifi_status"]
    logged = logged_replay(rollout)
    texts = (*logged.texts, *world.owed)
    mended, silent, idle = world.play(
        [Replay(world.reference, texts), Replay(world.reference, logged.texts), Replay((), texts)]
    )
    assert [mended.passed, silent.passed, idle.passed] == [True, False, False] and mended.changed == (True,)


@installed
def test_a_rollout_with_other_results_elsewhere_opens_no_world_and_the_reason_is_named(
    target: CheckedEnvironment, worlds: Worlds
) -> None:
    (task,) = [task for task in everything(target) if task.data["task"] == "get_wifi"]
    rollout = rollout_of(target, task, [tool_call("get_wifi_status", {}), BYE])
    bare = task.model_copy(update={"data": {"task": "get_wifi"}})
    same = rollout.model_copy(update={"id": "same", "task": bare})
    assert worlds.of(same) is not None and worlds.trouble == ""
    changed = [{**m, "content": "False"} if m["role"] == "tool" else m for m in rollout.messages]
    assert worlds.of(same.model_copy(update={"id": "other", "messages": changed})) is None
    assert "played at another instant" in worlds.trouble
    other = task.model_copy(update={"data": {**task.data, "world": {**task.data["world"], "sources": "0"}}})
    assert worlds.of(rollout.model_copy(update={"id": "old", "task": other})) is None
    assert "another ToolSandbox" in worlds.trouble
