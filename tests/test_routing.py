"""Routers: which adapter a task is given to, by its opening alone."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from captrain import spec
from captrain.benchmarks import load_benchmark
from captrain.contract import Target, load_file
from captrain.environments import Brief
from captrain.environments.templates import FAMILIES, TemplateSynthesizer
from captrain.policies import Play
from captrain.policies.scripted import ScriptedPolicy, by_the_book
from captrain.records import Capability, Message, Rollout
from captrain.rollouts import collect
from captrain.routing import (
    BASE,
    ClassifierRouter,
    Example,
    Neighbours,
    RetrievalRouter,
    examples,
    opening,
    openings,
    route_tasks,
)

CONF = Path(__file__).parents[1] / "conf"
EASY = {"status", "human"}


@cache
def desk(mix: str = "mixed") -> Target:
    return load_benchmark(spec.compose("smoke", 0, [f"benchmark.mix={mix}"], CONF).benchmark)


def only_easy(play: Play) -> list[Message]:
    """What a base does that lacks every capability: information and greetings, nothing else."""
    reference = by_the_book(play)
    said = play.messages[-1]["content"]
    return reference if "status" in said or "human" in said else [{"role": "assistant", "content": "No."}]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    folder = tmp_path_factory.mktemp("environments")
    made = {}
    for name in FAMILIES:
        path = folder / f"{name}.py"
        path.write_text(
            TemplateSynthesizer().synthesize(Brief(Capability(id=name, name=name, description="."), []), [])
        )
        made[name] = load_file(path)
    return made


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> list[Rollout]:
    journals = tmp_path_factory.mktemp("journals")
    found = collect(
        ScriptedPolicy(script=only_easy), desk(), desk().tasks("discovery", 120), purpose="diagnosis", seed=0,
        journals=journals, quiet=True,
    )  # fmt: skip
    assert {rollout.task.data["kind"] for rollout in found if rollout.outcome == "passed"} == EASY
    return found


def test_an_opening_is_what_the_user_says_before_the_first_turn() -> None:
    messages = [
        {"role": "system", "content": "Rules."},
        {"role": "user", "content": "Hello."},
        {"role": "user", "content": "Cancel #12."},
        {"role": "assistant", "content": "Who are you?"},
        {"role": "user", "content": "Customer 7."},
    ]
    assert opening(messages) == "Hello. Cancel #12."


def test_examples_are_openings_of_every_environment_and_of_passed_rollouts_only(
    targets: dict[str, Target], rollouts: list[Rollout]
) -> None:
    known = examples(targets, 30, rollouts)
    passed = [rollout for rollout in rollouts if rollout.outcome == "passed"]
    assert Counter(example.route for example in known) == {**dict.fromkeys(FAMILIES, 30), BASE: len(passed)}
    assert {example.text for example in known if example.route == BASE} == {opening(r.messages) for r in passed}


def test_retrieval_sends_a_template_s_tasks_to_its_own_capability(
    targets: dict[str, Target], rollouts: list[Rollout]
) -> None:
    router, known = RetrievalRouter(neighbours=5), examples(targets, 100, rollouts)
    for name, target in targets.items():
        unseen = target.tasks("training", 160)[100:]
        routes = router.route(known, openings(target, unseen))
        assert routes.count(name) / len(routes) > 0.95, name


def test_retrieval_sends_what_the_base_passes_to_the_base_and_single_skills_to_theirs(
    targets: dict[str, Target], rollouts: list[Rollout]
) -> None:
    benchmark = desk("single")
    tasks = benchmark.tasks("test", 200)
    routes = RetrievalRouter(neighbours=5).route(examples(targets, 100, rollouts), openings(benchmark, tasks))
    own = dict(zip(("check", "pick", "steps", "copy"), FAMILIES, strict=True)) | dict.fromkeys(EASY, BASE)
    right: Counter[str] = Counter()
    for task, route in zip(tasks, routes, strict=True):
        right[task.data["kind"]] += route == own[task.data["kind"]]
    asked = Counter(task.data["kind"] for task in tasks)
    assert set(asked) == set(own)
    assert all(right[kind] / count > 0.9 for kind, count in asked.items()), (right, asked)


def test_numbers_do_not_decide_a_route() -> None:
    known = [Example("I am customer 12. wrap order #34.", "wrap"), Example("Cancel the order #56 now.", "cancel")]
    router = RetrievalRouter(neighbours=1)
    assert router.route(known, ["I am customer 56. wrap order #56.", "Cancel the order #34 now."]) == ["wrap", "cancel"]


def test_several_near_examples_outvote_one_that_is_nearer() -> None:
    known = [Example("wrap it", "one"), *[Example("wrap it up", "other")] * 3]
    assert Neighbours(known, 1).of("wrap it")[0][1].route == "one"
    assert RetrievalRouter(neighbours=1).route(known, ["wrap it"]) == ["one"]
    assert RetrievalRouter(neighbours=4).route(known, ["wrap it"]) == ["other"]


def test_without_examples_every_task_goes_to_the_base(tmp_path: Path) -> None:
    for router in (RetrievalRouter(neighbours=3), ClassifierRouter(tmp_path / "nowhere", neighbours=3)):
        assert router.route([], ["Hello.", "Cancel order #12."]) == [BASE, BASE]


def test_the_classifier_returns_offered_routes_only_and_always_the_same(
    tiny: Path, targets: dict[str, Target], rollouts: list[Rollout]
) -> None:
    known, texts = examples(targets, 30, rollouts), openings(desk(), desk().tasks("test", 24))
    routes = ClassifierRouter(tiny, neighbours=6).route(known, texts)
    index = Neighbours(known, 6)
    for text, route in zip(texts, routes, strict=True):
        assert route in {example.route for _, example in index.of(text)} | {BASE}
    assert len(set(routes)) > 1
    assert ClassifierRouter(tiny, neighbours=6).route(known, texts[::-1]) == routes[::-1]


@pytest.mark.parametrize("chosen", ["retrieval", "classifier"])
def test_every_task_gets_one_row_with_the_route_of_each_router(
    chosen: str, tiny: Path, targets: dict[str, Target], rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClassifierRouter, "route", lambda self, examples, openings: [f"{len(self.model.name)}"] * 30)
    component: Any = spec.compose("smoke", 0, [f"router={chosen}", "router.neighbours=5"], CONF).router
    tasks = desk().tasks("test", 30)
    table = route_tasks(component, tiny, targets, rollouts, desk(), tasks)
    assert list(table.columns) == ["task", "kind", "retrieval", "classifier", "chosen"]
    assert list(table["task"]) == [task.id for task in tasks]
    assert list(table["kind"]) == [task.data["kind"] for task in tasks]
    assert list(table["chosen"]) == list(table[chosen])
    assert {*table["retrieval"]} == {*FAMILIES, BASE} and {*table["classifier"]} == {"4"}


def test_without_capabilities_every_task_goes_to_the_base(tiny: Path, rollouts: list[Rollout]) -> None:
    component = spec.compose("smoke", 0, [], CONF).router
    table = route_tasks(component, tiny, {}, rollouts, desk(), desk().tasks("test", 3))
    assert {*table["retrieval"], *table["classifier"], *table["chosen"]} == {BASE}
