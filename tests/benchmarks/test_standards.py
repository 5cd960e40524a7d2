"""Environments of OpenEnv and verifiers as benchmarks: captrain's own, exported and back again, and ones that are not.

What each standard's package runs is in an environment of its own (`make installations`)."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.exported import NAME, make_project
from support.finished import Captrain
from support.installations import interpreter
from support.recorded import record
from support.taught import teach
from support.training import GRPO, inside, moved

from captrain.agents.collection import collect
from captrain.agents.scripted import ScriptedPolicy
from captrain.benchmarks import load_benchmark
from captrain.benchmarks.installing import MARK
from captrain.capabilities.programmatic import ProgrammaticAnalyst
from captrain.contract import CheckedEnvironment, RunningEpisode, tool_call
from captrain.diagnosis.diagnosis import diagnose
from captrain.errors import InfrastructureError, UserError
from captrain.interop import logs_of_rollouts
from captrain.planning.feasibility import UNAIDED
from captrain.projects import export_environment
from captrain.records import Message, Task
from captrain.run import Component, Machine, SelectionSettings, compose_spec
from captrain.training.jobs import Job, TrainingEnvironment
from captrain.training.runs import train

CONF = Path(__file__).parents[2] / "conf"
FOREIGN = Path(__file__).parent / "standards"
EPISODES = {"openenv": 100, "verifiers": 24}
"""Episodes of those recorded; each of verifiers takes its own processes' time twice."""
SETTINGS: dict[str, dict[str, object]] = {
    "openenv": {"source": str(FOREIGN / "numbers")},
    "verifiers": {"taskset": "shop-sums", "folder": str(FOREIGN / "tasksets"), "scale": [0.0, 2.0]},
}
"""Settings of the benchmarks that are none of captrain's."""
PRICES = {"apple": 3, "bread": 4, "cheese": 7, "dates": 5, "eggs": 2}
SPLITS = {split: {"split": split} for split in ("discovery", "training", "test")}
RULE = SelectionSettings(
    delta=0.2, coverage=0.1, agreement=8, confidence=0.95, floor=0.0, resamples=100, ranking="product"
)


def settle(standard: str, **settings: object) -> tuple[Component, Machine]:
    """The benchmark with its settings, and the machine on which the standard's package is installed."""
    installed = f"+machine.benchmarks.{standard}={{python: '{interpreter(standard)}', processes: 1, timeout: 300.0}}"
    required = {"openenv": "benchmark.source=x", "verifiers": "benchmark.taskset=x"}[standard]
    composed = compose_spec("default", 0, [f"benchmark={standard}", installed, required], CONF)
    component = Component.model_validate({**composed.benchmark.model_dump(by_alias=True), **settings})
    return component, composed.machine


def make_target(standard: str, **settings: object) -> CheckedEnvironment:
    return load_benchmark(*settle(standard, **settings))


def closed(target: CheckedEnvironment) -> Iterator[CheckedEnvironment]:
    yield target
    target.environment.pool.close()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose environment is exported, with recorded episodes."""
    folder = tmp_path_factory.mktemp("project")
    episodes = record(make_project(folder), max(EPISODES.values()))
    (folder / "episodes.jsonl").write_text("".join(json.dumps(episode) + "\n" for episode in episodes))
    export_environment(NAME, folder, "openenv", folder / "openenv/captrain_wrong_record")
    export_environment(NAME, folder, "verifiers", folder / "verifiers")
    return folder


@pytest.fixture(scope="module")
def numbers() -> Iterator[CheckedEnvironment]:
    yield from closed(make_target("openenv", **SETTINGS["openenv"]))


@pytest.fixture(scope="module")
def shop() -> Iterator[CheckedEnvironment]:
    yield from closed(make_target("verifiers", **SETTINGS["verifiers"]))


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def guesses(target: CheckedEnvironment, task: Task, numbers: Sequence[object]) -> list[Message]:
    return target.play(task, [tool_call("act", {"guess": number}) for number in numbers])


def guess(target: CheckedEnvironment, task: Task) -> list[Message]:
    """The right guess, by trying."""
    number = next(n for n in range(1, 21) if target.score(task, guesses(target, task, [n])).success)
    return [tool_call("act", {"guess": number})]


def sum_up(question: str) -> list[Message]:
    """Every good looked up, and their sum."""
    goods = question.split(": ")[1].split("? ")[0].split(", ")
    looked_up = [tool_call("shop_price", {"good": good}) for good in goods]
    return [*looked_up, say(str(sum(PRICES[good] for good in goods)))]


# Without an installation.


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("scale=[1.0, 1.0]", "is no range"),
        ("turns=0", "benchmark.turns"),
    ],
)
def test_impossible_settings_are_refused(override: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        composed = compose_spec(
            "default", 0, ["benchmark=openenv", "benchmark.source=x", f"benchmark.{override}"], CONF
        )
        load_benchmark(composed.benchmark)


def test_a_plan_says_what_the_standard_has_not_and_refuses_what_could_not_end(
    tmp_path: Path, captrain: Captrain
) -> None:
    (tmp_path / "dvc.yaml").touch()
    (tmp_path / "params.yaml").write_text("experiment: default\nseed: 0\noverrides: []\n")
    (tmp_path / "conf").symlink_to(CONF)
    status, out, error = captrain(tmp_path, "plan", "benchmark=verifiers", "benchmark.taskset=desk")
    said = " ".join(out.split())
    assert "to know: verifiers has no reference solutions" in said and "to know: rewards that a model judges" in said
    assert "finds invalid_call and premature_stop, and what nearly all passed" in said
    assert status == 2 and "no environment can be derived from captrain.benchmarks.verifiers.Verifiers" in error
    assert "is not installed" in error and "captrain benchmark install verifiers" in error


# Out and back in: the rewards are captrain's.


@pytest.mark.parametrize("standard", [pytest.param(name, marks=pytest.mark.needs(name)) for name in SETTINGS])
def test_an_environment_that_went_out_comes_back_with_the_same_rewards(
    standard: str, project: Path, request: pytest.FixtureRequest
) -> None:
    settings: dict[str, object] = {"source": str(project / "openenv/captrain_wrong_record")}
    if standard == "verifiers":
        settings = {"taskset": "captrain-wrong-record", "folder": str(project / "verifiers"), "splits": SPLITS}
    target = make_target(standard, **settings)
    request.addfinalizer(target.environment.pool.close)  # pyright: ignore[reportAttributeAccessIssue]
    episodes = [json.loads(line) for line in (project / "episodes.jsonl").read_text().splitlines()]
    tasks = target.tasks("training", EPISODES[standard])
    assert (target.size("discovery"), target.size("test")) == (1000, 1000)
    assert target.about["source"] and [tool["function"]["name"] for tool in target.tools][:2] == [
        "list_orders",
        "get_order",
    ]
    for task, episode in zip(tasks, episodes, strict=False):
        messages = target.play(task, episode["actions"])
        score = target.score(task, messages)
        assert (score.reward, score.success) == (pytest.approx(episode["score"]["reward"]), episode["score"]["success"])
        spoken = [m["content"] for m in messages if m["role"] == "user"]
        assert spoken == [m["content"] for m in episode["messages"] if m["role"] == "user"]
    assert target.floor(tasks[0]).reward == pytest.approx(0.05)
    assert target.reference(tasks[0]) == []


# What is not captrain's: OpenEnv.


@pytest.mark.needs("openenv")
def test_an_action_of_openenv_is_a_tool_and_a_server_of_one_session_serves_many_episodes(
    numbers: CheckedEnvironment,
) -> None:
    [tool] = numbers.tools
    assert tool["function"]["name"] == "act" and set(tool["function"]["parameters"]["properties"]) == {"guess"}
    assert numbers.size("test") is None and numbers.about["tasks"] == "seeds"
    tasks = numbers.tasks("test", 3)
    episodes = [numbers.open(task) for task in tasks]
    records = [list(episode.messages) for episode in episodes]
    for number in (1, 20, "x", 10):  # each in turn, so that every session is given up
        for episode, messages in zip(episodes, records, strict=True):
            action = tool_call("act", {"guess": number})
            messages += [action, *episode.step(action)[0]]
    for episode in episodes:
        episode.close()
    for task, messages in zip(tasks, records, strict=True):
        hints = [message["content"] for message in messages if message["role"] == "tool"]
        assert hints[:2] == ["It is higher.", "It is lower."] and hints[2].startswith("Error: ")
        numbers.score(task, messages)
    right = [number for number in range(1, 21) if numbers.score(tasks[0], guesses(numbers, tasks[0], [number])).success]
    assert len(right) == 1
    assert numbers.floor(tasks[0]).reward == 0


@pytest.mark.needs("openenv")
def test_splits_of_seeds_have_none_in_common(numbers: CheckedEnvironment) -> None:
    places = {split: {task.data["place"] for task in numbers.tasks(split, 20)} for split in ("discovery", "test")}
    assert not places["discovery"] & places["test"]
    assert numbers.tasks("test", 5) == numbers.tasks("test", 20)[:5]


@pytest.mark.needs("openenv")
def test_tools_of_openenv_are_called_by_name_and_an_agent_that_only_talks_ends(request: pytest.FixtureRequest) -> None:
    target = make_target("openenv", source=str(FOREIGN / "sums"), instructions="Add the numbers.")
    request.addfinalizer(target.environment.pool.close)  # pyright: ignore[reportAttributeAccessIssue]
    assert [tool["function"]["name"] for tool in target.tools] == ["numbers", "answer"]
    [task] = target.tasks("test", 1)
    messages = target.play(task, [tool_call("numbers", {})])
    total = sum(map(int, messages[-1]["content"].split()))
    hostile = [tool_call("step", {}), tool_call("answer", {"total": "many"}), tool_call("answer", {})]
    played = target.play(task, [*hostile, tool_call("answer", {"total": total}), say("never said")])
    assert played[0] == {"role": "system", "content": "Add the numbers."}
    assert target.score(task, played).success and played[-1]["content"] == "Thank you."
    assert not target.score(task, target.play(task, [say("58"), say("never said")])).success


@pytest.mark.needs("openenv")
def test_the_librarys_own_example_is_a_benchmark_too(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    tool = Path(interpreter("openenv")).with_name("openenv")
    subprocess.run([tool, "init", "echo_desk"], cwd=tmp_path, check=True, capture_output=True)
    target = make_target("openenv", source=str(tmp_path / "echo_desk"))
    request.addfinalizer(target.environment.pool.close)  # pyright: ignore[reportAttributeAccessIssue]
    [task] = target.tasks("test", 1)
    assert target.score(task, target.play(task, [tool_call("act", {"message": "hello"})])).reward == 0.5
    messages = target.play(task, [say("a longer message"), say("and one more")])
    with pytest.raises(UserError, match="benchmark.scale"):
        target.score(task, messages)


@pytest.mark.needs("openenv")
@pytest.mark.parametrize(
    ("place", "said"), [("It is {'odd'", "its seeds name none"), ('f"It is {hint}."', "its record is played again")]
)
def test_what_answers_otherwise_each_time_gives_no_score(
    place: str, said: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shutil.copytree(FOREIGN / "numbers", tmp_path / "numbers")
    path = tmp_path / "numbers/server/app.py"
    text = path.read_text()
    assert place in text
    clock = place.replace("It is {", "At {time.time_ns()} it is {")
    path.write_text(text.replace(place, clock).replace("import random", "import random\nimport time"))
    target = make_target("openenv", source=str(path.parents[1]))
    request.addfinalizer(target.environment.pool.close)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises((UserError, InfrastructureError), match=said):
        [task] = target.tasks("test", 1)
        target.score(task, guesses(target, task, [1, 20]))


@pytest.mark.needs("openenv")
def test_check_benchmark_plays_a_server_from_its_folder(tmp_path: Path, captrain: Captrain) -> None:
    made = tmp_path / ".cache/installations/openenv"
    made.mkdir(parents=True)
    for path in Path(interpreter("openenv")).parents[1].iterdir():
        (made / path.name).symlink_to(path)
    (made / MARK).touch()
    command = ("check-benchmark", "captrain.benchmarks.openenv:OpenEnv", f"source={FOREIGN / 'numbers'}")
    status, out, error = captrain(tmp_path, *command, "--tasks", "2", "--limit", "400")
    assert status == 0, out + error
    assert "numbers: keeps the contract" in out and "mean reward of nothing: 0.00 of 6" in out


# What is not captrain's: verifiers.


@pytest.mark.needs("verifiers")
def test_a_taskset_is_divided_and_played_with_its_tools_and_scored_by_its_rewards(shop: CheckedEnvironment) -> None:
    assert [shop.size(split) for split in ("discovery", "training", "test")] == [4, 3, 3]
    tasks = [
        task
        for split in ("discovery", "training", "test")
        for task in shop.tasks(split, 4 if split == "discovery" else 3)
    ]
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


@pytest.mark.needs("verifiers")
def test_a_diagnosis_of_rollouts_in_a_taskset_names_the_mistake_that_was_planted(
    shop: CheckedEnvironment, tmp_path: Path
) -> None:
    """An agent that asks for the same price again and again in every other task, and gives up."""

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
    assert {family.id for family in families} <= {*UNAIDED}, "others need a reference, or ten rollouts to contrast"
    assert {family.id for family in all_rollouts} <= {*UNAIDED, "extra_write"}, "the price that is asked for again"


@pytest.mark.needs("verifiers")
def test_a_taskset_that_is_not_there_or_takes_no_such_config_is_one_message(request: pytest.FixtureRequest) -> None:
    for settings, said in (
        ({"taskset": "chess"}, "chess"),
        (
            {"taskset": "shop-sums", "folder": str(FOREIGN / "tasksets"), "config": {"counts": 1}},
            "does not take its config",
        ),
    ):
        target = make_target("verifiers", **settings)
        request.addfinalizer(target.environment.pool.close)  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises((UserError, InfrastructureError), match=said):
            target.tasks("test", 1)


# Training.


@pytest.mark.parametrize("standard", [pytest.param(name, marks=pytest.mark.needs(name)) for name in SETTINGS])
def test_grpo_trains_on_an_environment_that_is_none_of_captrains(
    standard: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The model has learnt two tasks by heart, how to solve them and how to give up."""
    benchmark, machine = settle(standard, **SETTINGS[standard])
    target = request.getfixturevalue({"openenv": "numbers", "verifiers": "shop"}[standard])
    tasks = target.tasks("training", 2)
    dialogues: list[tuple[Task, list[Message]]] = []
    for task in tasks:
        solution = guess(target, task) if standard == "openenv" else sum_up(target.play(task, [])[0]["content"])
        wrong = [tool_call("act", {"guess": 21})] if standard == "openenv" else solution[:1]
        dialogues += [(task, solution), (task, [*wrong, say("I give up.")])]
    base = teach(target, dialogues, tmp_path / "base", steps=160)
    sampling = {"temperature": 1.0, "max_turns": 4, "max_tokens": 16}
    recipe = {"_target_": "captrain.training.recipe.GRPO", **GRPO, "groups_per_step": 1, "group_size": 8, "epochs": 1}
    job = Job(
        name="target", base=base, rollouts=16, seed=0, machine=machine,
        environments=(TrainingEnvironment("target", benchmark),),
        policy=Component.model_validate({"_target_": "captrain.agents.local.LocalPolicy", **sampling}),
        trainer=Component.model_validate(recipe),
    )  # fmt: skip
    with inside(tmp_path / "work") as work:
        trained = train(job)
    assert (trained.rollouts, trained.errors, trained.discarded) == (16, 0, 0)
    assert [step.rollouts for step in trained.history] == [8, 16]
    assert all(0 < step.reward < 1 for step in trained.history), "some solved it, some gave up"
    assert moved(work / trained.folder) > 1e-3
