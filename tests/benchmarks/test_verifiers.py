"""Tasksets of verifiers as benchmarks: captrain's own environment, exported and read back, and a foreign one."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.exported import NAME, make_project
from support.finished import Captrain
from support.installations import interpreter
from support.recorded import record
from support.scripted import CONF, SPLITS, Make, composed_on, maker
from support.taught import teach
from support.training import GRPO, inside, moved

from captrain.agents.collection import collect
from captrain.agents.scripted import ScriptedPolicy
from captrain.benchmarks.installing import MARK
from captrain.capabilities.programmatic import ProgrammaticAnalyst
from captrain.contract import CheckedEnvironment, RunningEpisode, tool_call
from captrain.diagnosis.diagnosis import diagnose
from captrain.errors import InfrastructureError, UserError
from captrain.interop import logs_of_rollouts
from captrain.planning.feasibility import UNREFERENCED
from captrain.projects import export_environment
from captrain.records import Message, Task
from captrain.run import Component, SelectionSettings
from captrain.training.jobs import Job, TrainingEnvironment
from captrain.training.runs import train

TASKSETS = Path(__file__).parent / "tasksets"
SHOP = ("benchmark.taskset=shop-sums", f"benchmark.folder={TASKSETS}", "benchmark.scale=[0.0,2.0]")
PRICES = {"apple": 3, "bread": 4, "cheese": 7, "dates": 5, "eggs": 2}
EPISODES = 24
RULE = SelectionSettings(
    delta=0.2, coverage=0.1, agreement=8, confidence=0.95, floor=0.0, resamples=100, ranking="product"
)
installed = pytest.mark.needs("verifiers")


@pytest.fixture(scope="module")
def make(request: pytest.FixtureRequest) -> Make:
    return maker(request, "verifiers")


@pytest.fixture(scope="module")
def shop(make: Make) -> CheckedEnvironment:
    return make(*SHOP)


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def sum_up(question: str) -> list[Message]:
    """Look up every good, and answer with the sum."""
    goods = question.split(": ")[1].split("? ")[0].split(", ")
    looked_up = [tool_call("shop_price", {"good": good}) for good in goods]
    return [*looked_up, say(str(sum(PRICES[good] for good in goods)))]


# Without verifiers.


def test_a_plan_reports_what_verifiers_lacks_and_refuses_what_cannot_work(tmp_path: Path, captrain: Captrain) -> None:
    (tmp_path / "dvc.yaml").touch()
    (tmp_path / "params.yaml").write_text("experiment: default\nseed: 0\noverrides: []\n")
    (tmp_path / "conf").symlink_to(CONF)
    status, out, error = captrain(tmp_path, "plan", "benchmark=verifiers", "benchmark.taskset=desk")
    said = " ".join(out.split())
    assert "note: verifiers has no reference solutions" in said and "note: rewards judged by a model" in said
    assert "finds invalid_call and premature_stop, and what nearly all passed" in said
    assert status == 2 and "no environment can be derived from captrain.benchmarks.verifiers.Verifiers" in error
    assert "is not installed" in error and "captrain benchmark install verifiers" in error


# With verifiers.


@installed
def test_an_exported_environment_read_back_gives_the_same_rewards(tmp_path: Path, make: Make) -> None:
    episodes = record(make_project(tmp_path), EPISODES)
    export_environment(NAME, tmp_path, "verifiers", tmp_path / "verifiers")
    splits = ", ".join(f"{split}: {{split: {split}}}" for split in SPLITS)
    place = ("benchmark.taskset=captrain-wrong-record", f"benchmark.folder={tmp_path / 'verifiers'}")
    target = make(*place, f"+benchmark.splits={{{splits}}}")
    tasks = target.tasks("training", EPISODES)
    assert (target.size("discovery"), target.size("test")) == (1000, 1000)
    names = [tool["function"]["name"] for tool in target.tools]
    assert target.about["source"] and names[:2] == ["list_orders", "get_order"]
    for task, episode in zip(tasks, episodes, strict=True):
        messages = target.play(task, json.loads(json.dumps(episode["actions"])))
        score = target.score(task, messages)
        assert (score.reward, score.success) == (pytest.approx(episode["score"]["reward"]), episode["score"]["success"])
        spoken = [m["content"] for m in messages if m["role"] == "user"]
        assert spoken == [m["content"] for m in episode["messages"] if m["role"] == "user"]
    assert target.floor(tasks[0]).reward == pytest.approx(0.05)
    assert target.reference(tasks[0]) == []


@installed
def test_check_benchmark_plays_a_taskset_from_its_folder(tmp_path: Path, captrain: Captrain) -> None:
    made = tmp_path / ".cache/installations/verifiers"
    made.mkdir(parents=True)
    for path in Path(interpreter("verifiers")).parents[1].iterdir():
        (made / path.name).symlink_to(path)
    (made / MARK).touch(exist_ok=True)
    settings = ("taskset=shop-sums", f"folder={TASKSETS}", "scale=[0.0,2.0]")
    command = ("check-benchmark", "captrain.benchmarks.verifiers:Verifiers", *settings)
    status, out, error = captrain(tmp_path, *command, "--tasks", "2", "--limit", "400")
    assert status == 0, out + error
    assert "shop-sums: keeps the contract" in out and "mean reward of nothing: 0.00 of 6" in out


@installed
def test_a_taskset_is_divided_and_played_with_its_tools_and_scored_by_its_rewards(shop: CheckedEnvironment) -> None:
    sizes = {split: shop.size(split) or 0 for split in SPLITS}
    assert sizes == {"discovery": 4, "training": 3, "test": 3}
    tasks = [task for split in SPLITS for task in shop.tasks(split, sizes[split])]
    assert len({task.data["place"] for task in tasks}) == 10
    [tool] = shop.tools
    assert tool["function"]["name"] == "shop_price"
    task = next(task for task in tasks if task.data["place"] == "tasks/0")
    actions = [
        tool_call("shop_price", {"good": "apple"}),
        tool_call("shop_price", {"god": "bread"}),
        tool_call("cash", {}),
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": 7, "arguments": "{"}}]},
        say("7"),
    ]
    messages = shop.play(task, actions)
    results = [message["content"] for message in messages if message["role"] == "tool"]
    assert results[0] == "3" and results[1].startswith("Error") and results[2] == "Error: there is no tool cash"
    score = shop.score(task, messages)
    assert (score.reward, score.success) == (1.0, True)
    assert score.parts == {"right": 1.0, "looked_up": 4.0}
    assert shop.score(task, shop.play(task, [say("8")])).reward == 0 == shop.floor(task).reward


@installed
def test_a_reward_outside_the_scale_is_one_message(make: Make) -> None:
    target = make(*SHOP, "benchmark.scale=[0.0,1.0]")
    [task] = target.tasks("test", 1)
    record = target.play(task, sum_up(target.play(task, [])[0]["content"]))
    with pytest.raises(UserError, match="benchmark.scale"):
        target.score(task, record)


@installed
def test_a_diagnosis_of_rollouts_in_a_taskset_names_the_planted_mistake(
    shop: CheckedEnvironment, tmp_path: Path
) -> None:
    """In every other task the agent asks for the same price six times and gives up."""

    def script(play: RunningEpisode) -> Sequence[Message]:
        solution = sum_up(play.messages[0]["content"])
        return [*solution[:1] * 6, say("I cannot tell.")] if int(play.key.split("/")[-2]) % 2 else solution

    policy = ScriptedPolicy(script=script)
    tasks = shop.tasks("discovery", 4)
    rollouts = collect(policy, shop, tasks, purpose="diagnosis", seed=0, trials=3, journals=tmp_path, quiet=True)
    assert {rollout.outcome for rollout in rollouts} == {"passed", "failed"}
    report = diagnose(logs_of_rollouts(rollouts), RULE, runs=10, count=4, seed=0).report
    assert report is not None and "loop" in [candidate["id"] for candidate in report["candidates"]]
    few, all_rollouts = rollouts[:9], ProgrammaticAnalyst().propose([rollouts], shop.tools)[0]
    [families] = ProgrammaticAnalyst().propose([few], shop.tools)
    assert {family.id for family in families} <= {*UNREFERENCED}, "others need a reference, or ten rollouts to contrast"
    assert {family.id for family in all_rollouts} <= {*UNREFERENCED, "loop"}, "the price that is asked for again"


@installed
@pytest.mark.parametrize(
    ("setting", "said"),
    [("benchmark.taskset=chess", "chess"), ("+benchmark.config={counts: 1}", "does not take its config")],
)
def test_a_missing_taskset_or_a_wrong_config_is_one_message(setting: str, said: str, make: Make) -> None:
    with pytest.raises((UserError, InfrastructureError), match=said):
        make(*SHOP, setting).tasks("test", 1)


@installed
def test_grpo_trains_on_a_foreign_environment(tmp_path: Path, shop: CheckedEnvironment) -> None:
    """The model has memorised two tasks: how to solve them, and how to give up."""
    settings = composed_on("verifiers", *SHOP)
    dialogues: list[tuple[Task, list[Message]]] = []
    for task in shop.tasks("training", 2):
        solution = sum_up(shop.play(task, [])[0]["content"])
        dialogues += [(task, solution), (task, [solution[0], say("I give up.")])]
    base = teach(shop, dialogues, tmp_path / "base", steps=160)
    sampling = {"temperature": 1.0, "max_turns": 4, "max_tokens": 16}
    recipe = {"_target_": "captrain.training.recipe.GRPO", **GRPO, "groups_per_step": 1, "group_size": 8, "epochs": 1}
    job = Job(
        name="target", base=base, rollouts=16, seed=0, machine=settings.machine,
        environments=(TrainingEnvironment("target", settings.benchmark),),
        policy=Component.model_validate({"_target_": "captrain.agents.local.LocalPolicy", **sampling}),
        trainer=Component.model_validate(recipe),
    )  # fmt: skip
    with inside(tmp_path / "work") as work:
        trained = train(job)
    assert (trained.rollouts, trained.errors, trained.discarded) == (16, 0, 0)
    assert [step.rollouts for step in trained.history] == [8, 16]
    assert all(0 < step.reward < 1 for step in trained.history), "some solved it, some gave up"
    assert moved(work / trained.folder) > 1e-3
