"""The embedded benchmark under its contract: its tasks, its scores, and attempts to fool them."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.scripted import SPLITS

from captrain.benchmarks import servicedesk
from captrain.benchmarks.loading import load_benchmark
from captrain.contract import CheckedEnvironment, tool_call
from captrain.records import Message, Score, Task, digest
from captrain.run.components import Component

MIXES = list(servicedesk.MIXES)
Actions = list[Message]
Data = dict[str, Any]
Found = tuple[CheckedEnvironment, Task]


def desk(mix: str) -> CheckedEnvironment:
    target = "captrain.benchmarks.servicedesk.ServiceDesk"
    return load_benchmark(Component.model_validate({"_target_": target, "mix": mix}))


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call(name: str, *values: str) -> Message:
    return tool_call(name, dict(zip(servicedesk.ARGUMENTS[name], values, strict=True)))


def name_of(message: Message) -> str:
    return message["tool_calls"][0]["function"]["name"] if message.get("tool_calls") else ""


def find(kind: str, fits: Callable[[Data], bool] = lambda data: True, anonymous: bool = False) -> Found:
    """The desk, and its first task that fits."""
    target = desk("mixed")
    return target, next(
        task
        for task in target.tasks("training", 400)
        if task.data["kind"] == kind and task.data["anonymous"] == anonymous and fits(task.data)
    )


def played(target: CheckedEnvironment, task: Task, actions: Actions) -> Score:
    return target.score(task, target.play(task, actions))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("mix", MIXES)
def test_the_reference_solution_passes_every_task_and_ends_the_episode_itself(mix: str, split: Any) -> None:
    target = desk(mix)
    for task in target.tasks(split, 120):
        reference = target.reference(task)
        assert played(target, task, reference) == Score(
            reward=1.0, success=True, parts=dict.fromkeys(("database", "information", "closing"), 1.0)
        )
        episode = target.open(task)
        assert [episode.step(action)[1] for action in reference] == [False] * (len(reference) - 1) + [True]


@pytest.mark.parametrize("mix", MIXES)
def test_splits_share_no_task(mix: str) -> None:
    tasks = {split: desk(mix).tasks(split, 300) for split in SPLITS}
    ids = [task.id for some in tasks.values() for task in some]
    data = [digest(task.data) for some in tasks.values() for task in some]
    assert len(set(ids)) == len(ids) and len(set(data)) == len(data)


def test_the_same_index_gives_the_same_task_in_a_fresh_process_and_for_any_count() -> None:
    code = (
        "from captrain.benchmarks.servicedesk import MIXES, ServiceDesk\n"
        "from captrain.records import digest\n"
        f"print(*[digest(ServiceDesk(mix=m).tasks(s, 50)) for m in MIXES for s in {SPLITS}])"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    here = [desk(mix).environment.tasks(split, 60)[:50] for mix in MIXES for split in SPLITS]
    assert done.stdout.split() == [digest(tasks) for tasks in here]


@pytest.mark.parametrize("mix", MIXES)
def test_kinds_are_as_frequent_as_the_mix_says(mix: str) -> None:
    shares = servicedesk.MIXES[mix]
    assert sum(shares.values()) == pytest.approx(1.0)
    kinds = [task.data["kind"] for task in desk(mix).tasks("test", 3000)]
    assert set(kinds) == set(shares)
    for kind, share in shares.items():
        assert kinds.count(kind) / 3000 == pytest.approx(share, abs=0.025), kind


def test_few_cancellations_and_returns_are_allowed_and_a_tenth_of_the_customers_is_anonymous() -> None:
    data = [task.data for task in desk("mixed").tasks("training", 3000)]
    decisions = [tool for one in data for tool, *_ in servicedesk.expected_writes(one)]
    asked = sum(operation["verb"] in ("cancel", "return") for one in data for operation in one["operations"])
    allowed = decisions.count("cancel_order") + decisions.count("return_order")
    assert allowed / asked == pytest.approx(0.15, abs=0.03) and allowed + decisions.count("deny_request") == asked
    named = [one for one in data if not one["human"]]
    assert sum(one["anonymous"] for one in named) / len(named) == pytest.approx(0.1, abs=0.02)


def other_order(data: Data, order_id: str) -> str:
    return next(order["id"] for order in data["orders"] if order["id"] != order_id)


def twice(actions: Actions, data: Data) -> Actions:
    return [one for action in actions for one in [action] * (2 if name_of(action) in servicedesk.WRITES else 1)]


def extra(actions: Actions, data: Data) -> Actions:
    return [*actions[:-1], call("wrap_order", other_order(data, data["operations"][0]["order"])), actions[-1]]


def elsewhere(actions: Actions, data: Data) -> Actions:
    """Every write goes to another order than the right one."""
    bent = json.loads(json.dumps(actions))
    for action in bent:
        if name_of(action) in servicedesk.WRITES:
            arguments = action["tool_calls"][0]["function"]["arguments"]
            arguments["order_id"] = other_order(data, arguments["order_id"])
    return bent


def one_less(actions: Actions, data: Data) -> Actions:
    return [*actions[:-2], actions[-1]]


def transposed(actions: Actions, data: Data) -> Actions:
    """The zip code is rotated by one digit."""
    operation = data["operations"][0]
    digits = operation["zip"]
    return [*actions[:-2], call("update_zip", operation["order"], digits[1:] + digits[0]), actions[-1]]


def forbidden(actions: Actions, data: Data) -> Actions:
    """The operation is carried out after all else, although the policy forbids it."""
    operation = data["operations"][0]
    return [*actions[:-1], call(servicedesk.TOOL_OF[operation["verb"]], operation["order"]), actions[-1]]


def unchecked(actions: Actions, data: Data) -> Actions:
    return forbidden([actions[0], actions[-1]], data)


def handed_over(actions: Actions, data: Data) -> Actions:
    return [*actions[:-1], call("transfer_to_human")]


def answered(*words: str) -> Callable[[Actions, Data], Actions]:
    return lambda actions, data: [*actions[:-1], say(" ".join(words))]


@pytest.mark.parametrize(
    ("kind", "bend", "part"),
    [
        pytest.param("pick", twice, "database", id="a duplicate write"),
        pytest.param("steps", twice, "database", id="every write twice"),
        pytest.param("check", twice, "database", id="a denial said twice"),
        pytest.param("pick", extra, "database", id="an extra write"),
        pytest.param("check", extra, "database", id="an extra write beside a denial"),
        pytest.param("pick", elsewhere, "database", id="the wrong record"),
        pytest.param("copy", elsewhere, "database", id="the right digits on the wrong record"),
        pytest.param("copy", transposed, "database", id="the wrong digits"),
        pytest.param("steps", one_less, "database", id="the last operation left out"),
        pytest.param("check", forbidden, "database", id="a write after the denial"),
        pytest.param("check", unchecked, "database", id="a write that the policy forbids"),
        pytest.param("status", answered(servicedesk.CLOSING), "information", id="the information withheld"),
        pytest.param("status", answered(*servicedesk.STATUSES), "information", id="every answer at once"),
        pytest.param("status", handed_over, "closing", id="transferred instead of answered"),
        pytest.param("pick", handed_over, "closing", id="done, then transferred"),
        pytest.param("human", answered(servicedesk.CLOSING), "closing", id="answered instead of transferred"),
    ],
)
def test_a_task_is_failed_by(kind: str, bend: Callable[[Actions, Data], Actions], part: str) -> None:
    def fits(data: Data) -> bool:
        if kind == "check":
            return servicedesk.expected_writes(data)[0][0] == "deny_request"
        return kind != "copy" or len(set(data["operations"][0]["zip"])) == 4

    target, task = find(kind, fits)
    reference = target.reference(task)
    assert played(target, task, reference).success
    score = played(target, task, bend(reference, task.data))
    assert (score.reward, score.success, score.parts[part]) == (0.0, False, 0.0)


def test_the_score_needs_the_right_result_and_no_look_up() -> None:
    target, task = find("pick")
    assert played(target, task, [a for a in target.reference(task) if name_of(a) != "list_orders"]).success


def test_an_anonymous_customer_gives_the_number_when_asked_and_leaves_at_anything_else() -> None:
    target, task = find("pick", anonymous=True)
    episode = target.open(task)
    assert task.data["customer"] not in str(episode.messages)
    replies, done = episode.step(say(servicedesk.ASK))
    assert (replies, done) == ([{"role": "user", "content": f"I am customer {task.data['customer']}."}], False)
    assert episode.step(say(servicedesk.ASK)) == ([], True)
    assert target.open(task).step(say("Who is there?")) == ([], True)


def test_asking_again_for_the_number_fails_the_task() -> None:
    target, task = find("pick")
    episode = target.open(task)
    assert f"I am customer {task.data['customer']}." in episode.messages[-1]["content"]
    assert not played(target, task, [say(servicedesk.ASK), *target.reference(task)]).success


INVALID = {"role": "tool", "content": '{"error": "invalid call"}'}


@pytest.mark.parametrize(
    "function",
    [
        pytest.param({"name": "drop_tables", "arguments": {}}, id="an unknown tool"),
        pytest.param({"name": "drop_tables", "arguments": {"?": "#10"}}, id="an unknown tool with an odd argument"),
        pytest.param({"name": "", "arguments": {}}, id="no name"),
        pytest.param({"name": "wrap_order", "arguments": {}}, id="no arguments"),
        pytest.param({"name": "wrap_order", "arguments": None}, id="null for arguments"),
        pytest.param({"name": "wrap_order", "arguments": ["#10"]}, id="a list for arguments"),
        pytest.param({"name": "wrap_order", "arguments": "{"}, id="arguments that are not JSON"),
        pytest.param({"name": "wrap_order", "arguments": '["#10"]'}, id="arguments that are a JSON list"),
        pytest.param({"name": "wrap_order", "arguments": {"order": "#10"}}, id="a misspelt argument"),
        pytest.param({"name": "wrap_order", "arguments": {"order_id": "#99"}}, id="an order that is not there"),
        pytest.param({"name": "wrap_order", "arguments": {"order_id": 10}}, id="a number for a string"),
        pytest.param({"name": "wrap_order", "arguments": {"order_id": ["#10"]}}, id="a list for a string"),
        pytest.param({"name": "wrap_order", "arguments": {"order_id": None}}, id="null for a string"),
        pytest.param({"name": "wrap_order", "arguments": {"order_id": "#10", "gold": "yes"}}, id="one too many"),
        pytest.param({"name": "list_orders", "arguments": {"customer_id": "100"}}, id="another customer"),
        pytest.param({"name": "update_zip", "arguments": {"order_id": "#10", "zip": "12a4"}}, id="letters for digits"),
        pytest.param({"name": "update_zip", "arguments": {"order_id": "#10", "zip": ""}}, id="an empty zip code"),
        pytest.param({"name": "transfer_to_human", "arguments": {"to": "you"}}, id="arguments where none are taken"),
    ],
)
def test_a_call_that_does_not_fit_the_schemas_gets_an_error_and_changes_nothing(function: Data) -> None:
    target, task = find("pick", lambda data: "#10" in [order["id"] for order in data["orders"]])
    message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    replies, done = target.open(task).step(message)
    assert (replies, done) == ([{**INVALID, "name": function["name"]}], False)
    assert played(target, task, [message, *target.reference(task)]).success


def test_arguments_given_as_json_text_count_as_given() -> None:
    target, task = find("copy")
    actions = json.loads(json.dumps(target.reference(task)))
    for action in actions:
        for one in action.get("tool_calls", []):
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
    assert played(target, task, actions).success


def test_the_score_depends_on_the_agents_actions_and_not_on_recorded_results() -> None:
    target, task = find("check")
    honest = target.play(task, target.reference(task))
    failed = target.play(task, unchecked(target.reference(task), task.data))
    for messages, success in ((honest, True), (failed, False)):
        lies = [{**m, "content": '{"ok": true, "reward": 1.0}'} if m["role"] == "tool" else m for m in messages]
        bare = [message for message in messages if message["role"] == "assistant"]
        again = json.loads(json.dumps(messages))
        scores = [target.score(task, some) for some in (messages, lies, bare, again)]
        assert [score.success for score in scores] == [success] * 4 and scores == [scores[0]] * 4


def test_playing_does_not_change_the_task() -> None:
    target, task = find("steps")
    before = digest(task)
    target.play(task, target.reference(task))
    assert digest(task) == before and target.score(task, target.reference(task)).success


def test_two_invalid_calls_are_forgiven_and_a_third_ends_the_episode() -> None:
    target, task = find("pick")
    wrong = call("get_order", "#99")
    assert played(target, task, [wrong, wrong, *target.reference(task)]).success
    episode = target.open(task)
    assert [episode.step(wrong) for _ in range(3)][-1] == ([], True)
    assert not played(target, task, [wrong, wrong, wrong, *target.reference(task)]).success


def test_an_episode_ends_after_its_last_turn_and_later_actions_do_not_count() -> None:
    target, task = find("pick")
    look = call("list_orders", task.data["customer"])
    episode = target.open(task)
    assert [episode.step(look)[1] for _ in range(14)] == [False] * 13 + [True]
    reference = target.reference(task)
    assert played(target, task, [look] * (14 - len(reference)) + reference).success
    late = [look] * (15 - len(reference)) + reference
    assert not target.score(task, late).success
    assert target.score(task, [*reference, call("wrap_order", task.data["orders"][0]["id"])]).success


def test_any_order_of_random_actions_is_answered_and_scored() -> None:
    rng = random.Random(0)
    target = desk("compound")
    for task in target.tasks("training", 60):
        ids = [order["id"] for order in task.data["orders"]]
        actions = []
        for _ in range(16):
            name = rng.choice(list(servicedesk.ARGUMENTS))
            values = [rng.choice([*ids, "#99", task.data["customer"], "1234", ""]) for _ in servicedesk.ARGUMENTS[name]]
            actions.append(rng.choice([call(name, *values), say("Well."), say("")]))
        assert 0.0 <= played(target, task, actions).reward <= 1.0
