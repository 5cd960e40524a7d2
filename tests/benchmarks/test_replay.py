"""Replays: in the world of a logged rollout's task, logged calls have the results that the log says."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from support.needs import SHARED
from support.scripted import composed_on

from captrain.benchmarks import Replay, ReplayCall, Replayed, ServiceDesk, World, Worlds, logged_replay, open_worlds
from captrain.benchmarks.replay import Dialogue
from captrain.contract import CheckedEnvironment, tool_call
from captrain.errors import UserError
from captrain.interop import read_logs
from captrain.records import JsonObject, Message, Rollout, Score, Task

ROOT = Path(__file__).parents[2]
DESK_LOG = ROOT / "docs/examples/servicedesk.jsonl"


def failure(environment: str, task: str, data: JsonObject, messages: Sequence[Message] = ()) -> Rollout:
    return Rollout(
        id=task, environment=environment, task=Task(id=f"{environment}/{task}", split="discovery", data=data), trial=0,
        purpose="diagnosis", policy="agent", messages=list(messages), outcome="failed",
        score=Score(reward=0.0, success=False),
    )  # fmt: skip


def opened(worlds: Worlds, rollout: Rollout) -> World:
    world = worlds.of(rollout)
    assert world is not None
    return world


def gold(world: World) -> Replay:
    return Replay(world.reference, world.owed)


def disagreeing(worlds: Worlds, rollouts: Sequence[Rollout]) -> list[str]:
    """Tasks whose world disagrees with the log, or refuses its own reference."""
    wrong: list[str] = []
    for rollout in rollouts:
        world = opened(worlds, rollout)
        logged, reference = world.play([logged_replay(rollout), gold(world)])
        if logged.passed != (rollout.outcome == "passed") or not reference.passed:
            wrong.append(rollout.task.id)
    return wrong


# Without any package.


@pytest.fixture(scope="module")
def desk() -> list[Rollout]:
    return list(read_logs([DESK_LOG]).rollouts)


def test_every_logged_rollout_of_the_desk_gets_its_verdict_again_and_every_reference_passes(
    desk: list[Rollout],
) -> None:
    with open_worlds() as worlds:
        assert disagreeing(worlds, desk) == [] and len(desk) == 80
        results = [(r, opened(worlds, r).play([logged_replay(r)])[0].results) for r in desk[:20]]
    for rollout, replayed in results:
        logged = [message["content"] for message in rollout.messages if message["role"] == "tool"]
        assert list(replayed)[: len(logged)] == logged


def test_replay_finds_the_owed_words_and_the_calls_that_change_something() -> None:
    target = CheckedEnvironment(ServiceDesk(mix="mixed"), "desk", "")
    owed, kinds = Counter[str](), dict[str, set[bool]]()
    with open_worlds(target=target) as worlds:
        for task in target.tasks("training", 60):
            rollout = failure("", task.id, {}).model_copy(update={"environment": target.name, "task": task})
            world = opened(worlds, rollout)
            (played,) = world.play([gold(world)])
            owed.update([" ".join(world.owed)] if task.data["question"] else [])
            assert played.passed and (task.data["question"] or not world.owed)
            for call, changed in zip(world.reference, played.changed, strict=True):
                kinds.setdefault(call.tool, set()).add(changed)
    assert set(owed) <= {"pending", "shipped", "delivered"}
    assert kinds.pop("list_orders") == kinds.pop("get_order") == {False}
    assert set().union(*kinds.values()) == {True} and len(kinds) >= 5


def test_a_repaired_rollout_keeps_its_own_messages_around_the_repair(desk: list[Rollout]) -> None:
    rollout = next(r for r in desk if r.outcome == "failed" and r.task.id.endswith("mixed/discovery/00000"))
    with open_worlds() as worlds:
        world, logged = opened(worlds, rollout), logged_replay(rollout)
        lacking = [call for call in world.reference if call not in logged.calls]
        whole = replace(logged, calls=(*logged.calls, *lacking))
        first, repaired, silent, user = world.play(
            [
                logged,
                whole,
                replace(whole, texts=()),
                replace(whole, calls=(ReplayCall("nod", {}, "user"), *whole.calls)),
            ]
        )
    assert not first.passed and lacking and repaired.passed and repaired.results[: len(logged.calls)] == first.results
    assert silent.parts["closing"] == 1.0, "the dialogue is closed without words"
    assert user.failed[0] and not user.failed[1] and user.passed


def test_trials_of_a_task_share_what_its_reference_shows(desk: list[Rollout], monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(r for r in desk if r.outcome == "failed")
    second = first.model_copy(update={"id": "again", "trial": 1})
    written, write = list[Replay](), Dialogue.messages

    def counted(dialogue: Dialogue, replay: Replay) -> list[Message]:
        written.append(replay)
        return write(dialogue, replay)

    monkeypatch.setattr(Dialogue, "messages", counted)
    with open_worlds() as worlds:
        outcomes: list[tuple[tuple[str, ...], list[Replayed]]] = []
        for rollout in (first, second):
            written.clear()
            world = opened(worlds, rollout)
            outcomes.append((world.owed, world.play([gold(world)])))
            assert bool(written) == (rollout is first)
    assert outcomes[0] == outcomes[1] and outcomes[0][1][0].passed


def test_any_call_can_be_played_and_refusals_are_marked(desk: list[Rollout]) -> None:
    with open_worlds() as worlds:
        world = opened(worlds, desk[0])
        known = ReplayCall("get_order", {"order_id": "#11"})
        (played,) = world.play([Replay((known, ReplayCall("get_order", {"order_id": "#99"}), ReplayCall("fly", {})))])
    assert "status" in json.loads(played.results[0])
    assert played.failed == (False, True, True) and played.changed == (False, False, False)


def test_the_command_that_installs_a_logs_missing_benchmark_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for rollout, name in (
        (failure("tau2/airline", "2", {"kind": "airline", "task": "2"}), "tau2"),
        (failure("chat", "banking-user_task_0", {"kind": "chat", "task": "banking-user_task_0"}), "agentdojo"),
        (failure("bfcl", "multi_turn_base_0", {"task": "multi_turn_base_0"}), "bfcl"),
    ):
        with open_worlds() as worlds:
            assert worlds.of(rollout) is None and worlds.missing == f"captrain benchmark install {name}"
            assert worlds.reference(rollout) == []
    with open_worlds() as worlds:
        assert worlds.of(failure("chat", "a:1", {"kind": "chat"})) is None and not worlds.missing
    with pytest.raises(UserError, match="captrain cannot replay in benchmark 'chess'"):
        open_worlds("chess")


# With the packages.


@pytest.fixture(scope="module")
def worlds_of() -> Iterator[Callable[[str], Worlds]]:
    """Worlds on the installation of a benchmark."""
    with ExitStack() as stack:

        @cache
        def make(name: str) -> Worlds:
            return stack.enter_context(open_worlds(machine=composed_on(name).machine))

        yield make


@pytest.mark.needs("tau2", "shared")
@pytest.mark.parametrize("file", ["gpt-4.1_airline", "gpt-4.1_retail", "gpt-4.1_telecom", "gpt-oss-120b_airline"])
def test_every_logged_rollout_of_tau2_gets_its_verdict_again_and_every_reference_passes(
    worlds_of: Callable[[str], Worlds], file: str
) -> None:
    rollouts = list(read_logs([SHARED / "tau2" / f"{file}_1trial.json"]).rollouts)
    assert disagreeing(worlds_of("tau2"), rollouts) == [] and len(rollouts) >= 20


@pytest.mark.needs("tau2")
def test_a_play_leaves_nothing_behind_and_users_have_their_tools(worlds_of: Callable[[str], Worlds]) -> None:
    tau2 = worlds_of("tau2")
    name = "[mobile_data_issue]data_saver_mode_on[PERSONA:Easy]"
    world = opened(tau2, failure("tau2/telecom", name, {"kind": "telecom", "task": name}))
    assert {call.by for call in world.reference} == {"user"} and world.kinds["toggle_data_saver_mode"] == "write"
    look = ReplayCall("get_data_usage", {"customer_id": "C1001", "line_id": "L1002"})
    idle, fixed, again = world.play([Replay((look,)), gold(world), Replay((look,))])
    assert idle == again and not idle.passed and fixed.passed and set(fixed.changed) == {True}
    shop = opened(tau2, failure("tau2/retail", "0", {"kind": "retail", "task": "0"}))
    assert [replayed.passed for replayed in shop.play([gold(shop), Replay(()), gold(shop)])] == [True, False, True]
    assert not shop.play([replace(gold(shop), ended=False)])[0].passed


@pytest.mark.needs("tau2")
def test_a_task_that_a_log_embeds_overrides_the_installed_one(worlds_of: Callable[[str], Worlds]) -> None:
    tau2 = worlds_of("tau2")
    action = {"action_id": "a", "name": "cancel_reservation", "arguments": {"reservation_id": "EHGLP3"}}
    criteria = {"actions": [action], "communicate_info": ["7"], "reward_basis": ["DB", "COMMUNICATE"]}
    data: JsonObject = {"kind": "airline", "task": "2", "definition": {"evaluation_criteria": criteria}}
    rollout = failure("tau2/airline", "2", data)
    world = opened(tau2, rollout)
    assert [call.tool for call in world.reference] == ["cancel_reservation"] and world.owed == ("7",)
    assert [m.get("informs") for m in tau2.reference(rollout)] == [None, ["7"]]
    graded = {**data, "graded": ["db", "nl_assertion"]}  # by a model, which is not asked here
    assert tau2.of(failure("tau2/airline", "3", graded)) is None


@pytest.mark.needs("agentdojo", "shared")
def test_runs_of_agentdojo_get_their_verdicts_again_and_references(worlds_of: Callable[[str], Worlds]) -> None:
    agentdojo = worlds_of("agentdojo")
    rollouts = list(read_logs([SHARED / "agentdojo" / "gpt-4o-mini.jsonl"]).rollouts)
    # One task was judged in a version that the package no longer has.
    assert disagreeing(agentdojo, rollouts) == ["chat/banking-user_task_14"]
    rollout = next(r for r in rollouts if r.task.id.endswith("travel-user_task_4"))
    assert opened(agentdojo, rollout).owed == ("Montmartre Suites", "4.7", "110-200")
    assert agentdojo.reference(rollout)[-1]["role"] == "assistant" and not rollout.reference


@pytest.mark.needs("bfcl")
def test_gold_of_bfcl_passes_and_calls_in_another_turn_do_not(worlds_of: Callable[[str], Worlds]) -> None:
    bfcl = worlds_of("bfcl")
    for kind, number in product(("base", "miss_func", "miss_param", "long_context"), range(0, 200, 10)):
        name = f"multi_turn_{kind}_{number}"
        world = opened(bfcl, failure("bfcl", name, {"task": name}))
        assert world.play([gold(world)])[0].passed, name
    name = "multi_turn_base_0"
    messages = bfcl.reference(failure("bfcl", name, {"task": name}))
    calls = [message for message in messages if message.get("tool_calls")]
    hasty = [*calls, *({"role": "assistant", "content": "It is done."} for message in messages if message not in calls)]
    rollouts = [failure("bfcl", name, {"task": name}, played).model_copy(update={"id": str(len(str(played)))})
                for played in (messages, hasty)]  # fmt: skip
    played: list[Replayed] = [opened(bfcl, r).play([logged_replay(r)])[0] for r in rollouts]
    assert [replayed.passed for replayed in played] == [True, False]
    late = opened(bfcl, rollouts[0]).reference[-1]
    world = opened(bfcl, failure("bfcl", name, {"task": name}, [m for m in messages if m != calls[-1]]))
    lacking, mended = world.play([replace(gold(world), calls=world.reference[:-1]), gold(world)])
    assert not lacking.passed and mended.passed and tool_call(late.tool, late.arguments)["tool_calls"]
