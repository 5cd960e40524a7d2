"""Routers: which adapters a task is given to, by its opening alone, and which adapters are no route."""

import random
import runpy
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Literal

import pandas as pd
import pytest
from support.needs import further

from captrain.agents.collection import collect
from captrain.agents.local import LocalPolicy
from captrain.agents.policy import ClosedQuestion
from captrain.agents.scripted import ScriptedPolicy, by_the_book
from captrain.benchmarks.loading import load_benchmark
from captrain.benchmarks.servicedesk import DeskEpisode, make_data
from captrain.contract import CheckedEnvironment, RunningEpisode, load_file
from captrain.environments.synthesizer import Brief
from captrain.environments.templates import DEFICITS, TemplateSynthesizer
from captrain.errors import UserError
from captrain.models.lora import composition_name, parse_composition
from captrain.records import Capability, Message, Passport, Rollout, publish, publish_json
from captrain.routing.classifier import ClassifierRouter
from captrain.routing.compositions import BASE, composition_weights, members, route_of
from captrain.routing.gains import adapter_gains, routable
from captrain.routing.gate import GateRouter
from captrain.routing.retrieval import Neighbours, RetrievalRouter
from captrain.routing.router import AskedModel, Example, examples, opening, openings
from captrain.routing.routes import Routes, RoutingEvidence, placebo, random_routes, route_tasks, without_base
from captrain.routing.sets import SetRouter
from captrain.run import compose_spec, publish_spec

CONF = Path(__file__).parents[2] / "conf"
EASY = {"status", "human"}
CHECK, PICK, STEPS, COPY = DEFICITS
OWN = {"check": CHECK, "pick": PICK, "steps": STEPS, "copy": COPY}
COMPARED = ["retrieval", "classifier", "sets", "gate", "top_p"]
REFUND = ("cancel", "return")


def asked(folder: Path) -> AskedModel:
    """A base that acts in this process."""
    composed = compose_spec("smoke", 0, [], CONF)
    return AskedModel.of(composed, folder)


UNASKED = asked(Path("nowhere"))
"""A base that nobody asks."""


def needed(kind: str) -> frozenset[str]:
    """The capabilities that a kind of the embedded benchmark demands, by its name."""
    return frozenset(OWN[part] for part in kind.split("+") if part in OWN)


def pair_examples(count: int = 60) -> list[Example]:
    """Openings of tasks that demand two capabilities at once."""
    wanted = {
        (CHECK, PICK): lambda rng: [(rng.choice(REFUND), "extreme")],
        (PICK, COPY): lambda rng: [("zip", "extreme")],
        (STEPS, COPY): lambda rng: [("zip", "id")] * 2,
        (STEPS, CHECK): lambda rng: [(rng.choice(REFUND), "id"), (rng.choice(REFUND), "id")],
        (STEPS, PICK): lambda rng: [("wrap", "extreme")] * 2,
        (CHECK, COPY): lambda rng: [(rng.choice(REFUND), "id"), ("zip", "id")],
    }
    found = []
    for pair, operations in wanted.items():
        for at in range(count):
            rng = random.Random(f"{pair}{at}")
            data = make_data(rng, "pair", operations(rng), eligible=0.3)
            found.append(Example(opening(DeskEpisode(data).messages), route_of(frozenset(pair))))
    return found


def exact(routes: Sequence[str], kinds: Sequence[str]) -> float:
    """Share of the tasks whose route is exactly the set that they need."""
    return sum(members(route) == needed(kind) for route, kind in zip(routes, kinds, strict=True)) / len(kinds)


def grown(*rates: float, name: str = "a", size: int = 40) -> pd.DataFrame:
    """The history of an adapter, with the pass rate of each step."""
    steps = range(1, len(rates) + 1)
    return pd.DataFrame(
        [
            {"adapter": name, "step": at, "rollouts": at * size, "success": rate}
            for at, rate in zip(steps, rates, strict=True)
        ]
    )


def known_gains(worse: Sequence[str] = (), names: Sequence[str] = DEFICITS) -> pd.DataFrame:
    """Adapters that all gained, but for those that got worse."""
    rows = [(name, -0.1 if name in worse else 0.3) for name in names]
    return pd.DataFrame(rows, columns=["capability", "gain"])


@cache
def desk(mix: str = "mixed") -> CheckedEnvironment:
    return load_benchmark(compose_spec("smoke", 0, [f"benchmark.mix={mix}"], CONF).benchmark)


def only_easy(play: RunningEpisode) -> list[Message]:
    """Play as a base that lacks every capability: information and greetings, nothing else."""
    reference = by_the_book(play)
    said = play.messages[-1]["content"]
    return reference if "status" in said or "human" in said else [{"role": "assistant", "content": "No."}]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckedEnvironment]:
    folder = tmp_path_factory.mktemp("environments")
    made = {}
    for name in DEFICITS:
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
    targets: dict[str, CheckedEnvironment], rollouts: list[Rollout]
) -> None:
    known = examples(targets, 30, rollouts)
    passed = [rollout for rollout in rollouts if rollout.outcome == "passed"]
    assert Counter(example.route for example in known) == {**dict.fromkeys(DEFICITS, 30), BASE: len(passed)}
    assert {example.text for example in known if example.route == BASE} == {opening(r.messages) for r in passed}


def test_retrieval_sends_a_template_s_tasks_to_its_own_capability(
    targets: dict[str, CheckedEnvironment], rollouts: list[Rollout]
) -> None:
    router, known = RetrievalRouter(neighbours=5), examples(targets, 100, rollouts)
    for name, target in targets.items():
        unseen = target.tasks("training", 130)[100:]
        routes = router.route(known, openings(target, unseen))
        assert routes.count(name) / len(routes) > 0.95, name


def test_retrieval_sends_what_the_base_passes_to_the_base_and_single_skills_to_theirs(
    targets: dict[str, CheckedEnvironment], rollouts: list[Rollout]
) -> None:
    benchmark = desk("single")
    tasks = benchmark.tasks("test", 200)
    routes = RetrievalRouter(neighbours=5).route(examples(targets, 100, rollouts), openings(benchmark, tasks))
    own = dict(zip(("check", "pick", "steps", "copy"), DEFICITS, strict=True)) | dict.fromkeys(EASY, BASE)
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
    for router in (RetrievalRouter(neighbours=3), ClassifierRouter(asked(tmp_path / "nowhere"), neighbours=3)):
        assert router.route([], ["Hello.", "Cancel order #12."]) == [BASE, BASE]


def test_the_classifier_returns_offered_routes_only_and_always_the_same(
    tiny: Path, targets: dict[str, CheckedEnvironment], rollouts: list[Rollout]
) -> None:
    known, texts = examples(targets, 30, rollouts), openings(desk(), desk().tasks("test", 24))
    routes = ClassifierRouter(asked(tiny), neighbours=6).route(known, texts)
    index = Neighbours(known, 6)
    for text, route in zip(texts, routes, strict=True):
        assert route in {example.route for _, example in index.of(text)} | {BASE}
    assert len(set(routes)) > 1
    assert ClassifierRouter(asked(tiny), neighbours=6).route(known, texts[::-1]) == routes[::-1]


def routed(
    tiny: Path, targets: dict[str, CheckedEnvironment], rollouts: list[Rollout], overrides: Sequence[str] = (),
    count: int = 12, gained: pd.DataFrame | None = None, controls: int | None = None,
) -> Routes:  # fmt: skip
    composed = compose_spec("smoke", 0, ["router.gate=true", *overrides], CONF)
    tasks = desk().tasks("test", count)
    return route_tasks(
        composed.router, asked(tiny), RoutingEvidence(targets, {}, {}, rollouts),
        known_gains(names=[*targets]) if gained is None else gained, desk(), tasks, controls,
    )  # fmt: skip


@pytest.mark.parametrize("chosen", further(["retrieval", "gate", "classifier", "sets"], 2))
def test_every_task_gets_one_row_with_the_route_of_each_router(
    chosen: str, tiny: Path, targets: dict[str, CheckedEnvironment], rollouts: list[Rollout]
) -> None:
    table = routed(tiny, targets, rollouts, [f"router={chosen}"]).table
    tasks = desk().tasks("test", 12)
    assert list(table.columns) == ["task", "kind", *COMPARED, "chosen"]
    assert list(table["task"]) == [task.id for task in tasks]
    assert list(table["kind"]) == [task.data["kind"] for task in tasks]
    assert list(table["chosen"]) == list(table[chosen])
    assert list(table["sets"]) != list(table["retrieval"])


def test_the_classifier_reads_what_capabilities_are_and_how_the_nearest_tasks_were_solved(
    tiny: Path, targets: dict[str, CheckedEnvironment], rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[ClosedQuestion] = []
    ask = LocalPolicy.answer_scores

    def noted(self: LocalPolicy, asked: Sequence[ClosedQuestion]) -> list[list[float]]:
        questions.extend(asked)
        return ask(self, asked)

    monkeypatch.setattr(LocalPolicy, "answer_scores", noted)
    spec = compose_spec("smoke", 0, ["router=classifier", "router.prompt=trajectories", "router.characters=60"], CONF)
    described = {name: f"It can do the {name}." for name in DEFICITS}
    known, tasks = RoutingEvidence(targets, {}, {}, rollouts, described), desk().tasks("test", 6)
    table = route_tasks(
        spec.router, AskedModel.of(spec, tiny), known, known_gains(names=[*targets]), desk(), tasks
    ).table  # fmt: skip
    assert len(questions) == 6 and list(table["chosen"]) == list(table["classifier"])
    for question, text in zip(questions, openings(desk(), tasks), strict=True):
        [message] = question.messages
        prompt = message["content"]
        assert prompt.endswith(f"Task: {text}\nAnswer:") and len(question.answers) >= 2
        offered = [name for name in DEFICITS if f"({described[name]})" in prompt]
        assert len(offered) == len(question.answers) - 1 and "\ncall " in prompt
        solutions = [block.split("\n", 1)[1].rsplit("\nAnswer", 1)[0] for block in prompt.split("Task: ")[1:-1]]
        assert solutions and all(len(solution.partition("\n\nWhich")[0]) <= 60 for solution in solutions)


def test_a_policy_without_a_model_leaves_the_classifier_out_and_is_refused_where_it_is_the_router(
    tiny: Path, targets: dict[str, CheckedEnvironment], rollouts: list[Rollout]
) -> None:
    known, tasks = RoutingEvidence(targets, {}, {}, rollouts), desk().tasks("test", 4)
    for router in ("retrieval", "classifier"):
        spec = compose_spec("smoke", 0, ["policy=scripted", f"router={router}"], CONF)
        model, gains = AskedModel.of(spec, tiny), known_gains(names=[*targets])
        if router == "classifier":
            with pytest.raises(UserError, match="ScriptedPolicy does not run here"):
                route_tasks(spec.router, model, known, gains, desk(), tasks)
        else:
            columns = list(route_tasks(spec.router, model, known, gains, desk(), tasks).table.columns)
            assert "classifier" not in columns and "retrieval" in columns


def test_with_one_adapter_there_is_nothing_to_compose(
    tiny: Path, targets: dict[str, CheckedEnvironment], rollouts: list[Rollout]
) -> None:
    routes = routed(tiny, {CHECK: targets[CHECK]}, rollouts)
    assert list(routes.table.columns) == ["task", "kind", "retrieval", "classifier", "chosen"]
    assert {*routes.table["chosen"]} <= {CHECK, BASE} and routes.compositions == {}


def test_without_capabilities_every_task_goes_to_the_base(tiny: Path, rollouts: list[Rollout]) -> None:
    for router in ("retrieval", "classifier", "sets", "gate"):
        table = routed(tiny, {}, rollouts, [f"router={router}"], 3, known_gains(names=[])).table
        assert {*table["retrieval"], *table["classifier"], *table["chosen"]} == {BASE}


def test_every_arm_of_several_capabilities_is_listed_with_its_weights(
    tiny: Path, targets: dict[str, CheckedEnvironment], rollouts: list[Rollout]
) -> None:
    routes = routed(tiny, targets, rollouts, ["router.neighbours=15", "router.p=1.0"], 16, controls=0)
    arms = {arm for column in routes.table.columns[2:] for arm in routes.table[column]}
    assert routes.compositions.keys() == arms - {BASE, *DEFICITS} and routes.compositions
    for arm, weights in routes.compositions.items():
        assert weights == parse_composition(arm) and {*weights} <= {*DEFICITS}
    assert {*routes.table["chosen"]} & routes.compositions.keys()
    assert {*routes.table["retrieval"]} <= {*DEFICITS, BASE}


def test_an_adapter_that_got_worse_is_no_route_unless_the_gate_is_open(
    tiny: Path, targets: dict[str, CheckedEnvironment], rollouts: list[Rollout]
) -> None:
    for gate in (True, False):
        routes = routed(tiny, targets, rollouts, [f"router.gate={str(gate).lower()}"], 20, known_gains([COPY]), 0)
        for column in routes.table.columns[2:]:
            acting = {name for route in routes.table[column] for name in members(route)}
            assert (COPY in acting) != gate, column
        assert list(routes.gains["routed"]) == [name != COPY or not gate for name in DEFICITS]


def test_an_adapter_of_no_environment_acts_on_every_task_and_is_the_only_one(
    tiny: Path, targets: dict[str, CheckedEnvironment], rollouts: list[Rollout]
) -> None:
    for router in ("retrieval", "sets"):
        routes = routed(tiny, targets, rollouts, [f"router={router}"], 5, known_gains(names=["ramp"]))
        assert list(routes.table.columns) == ["task", "kind", "chosen"] and {*routes.table["chosen"]} == {"ramp"}
    with pytest.raises(UserError, match="ramp has no environment"):
        routed(tiny, targets, rollouts, gained=known_gains(names=[*DEFICITS, "ramp"]))


def test_routers_that_know_nothing_are_there_only_when_controls_are_wanted(
    tiny: Path, targets: dict[str, CheckedEnvironment], rollouts: list[Rollout]
) -> None:
    table = routed(tiny, targets, rollouts, controls=3).table
    assert [name for name in table.columns if name.startswith("control:")] == [
        "control:random_router",
        "control:placebo",
        "control:no_base",
    ]
    assert list(table["control:placebo"]) == placebo(list(table["chosen"]), DEFICITS)
    assert list(table["control:random_router"]) == random_routes(desk().tasks("test", 12), [BASE, *DEFICITS], 3)
    assert "control:placebo" not in routed(tiny, {CHECK: targets[CHECK]}, rollouts, controls=3).table


def test_a_router_without_the_base_gives_every_task_to_an_adapter_and_agrees_where_an_adapter_was_chosen() -> None:
    words_of = {"copy": "a", "check": "b", "greet": BASE}
    things = ("order", "refund", "address")
    known = [Example(f"{word} the {thing}", route) for word, route in words_of.items() for thing in things]
    texts = ["copy the order", "check the refund", "greet the address"]
    for router in (RetrievalRouter(neighbours=3), RetrievalRouter(neighbours=9, p=0.9), SetRouter(most=2)):
        routes = without_base(router, known, texts)
        assert BASE not in routes
    routes = without_base(RetrievalRouter(neighbours=3), known, texts)
    assert routes[:2] == RetrievalRouter(neighbours=3).route(known, texts)[:2] == ["a", "b"]


def test_the_random_router_draws_each_route_as_often_and_by_seed_and_task_alone() -> None:
    tasks = desk().tasks("test", 1000)
    routes = random_routes(tasks, ["base", "a", "b", "a+b"], 1)
    assert all(190 < count < 310 for count in Counter(routes).values()) and len({*routes}) == 4
    assert random_routes(tasks[::-1], ["base", "a", "b", "a+b"], 1) == routes[::-1]
    assert random_routes(tasks, ["base", "a", "b", "a+b"], 2) != routes


def test_a_placebo_exchanges_every_adapter_for_the_next_by_rank() -> None:
    routes = ["c", "a", "base", "b", "a+c", "0.6*a+0.4*b"]
    assert placebo(routes, ["c", "a", "b"]) == ["a", "b", "base", "c", "a+b", "0.6*b+0.4*c"]


@pytest.fixture(scope="module")
def single(targets: dict[str, CheckedEnvironment], rollouts: list[Rollout]) -> list[Example]:
    return examples(targets, 100, rollouts)


class TestGate:
    """The trained gate."""

    # The states are those of a model that was not trained, which tell less than words do.
    @pytest.mark.parametrize(("embedding", "bar"), further([("words", 0.9), ("states", 0.7)]))
    def test_a_task_of_one_environment_gets_its_adapter_and_an_easy_one_none(
        self,
        embedding: Literal["words", "states"],
        bar: float,
        tiny: Path,
        targets: dict[str, CheckedEnvironment],
        rollouts: list[Rollout],
    ) -> None:  # fmt: skip
        known, gate = examples(targets, 40, rollouts), GateRouter(asked(tiny), embedding=embedding)
        for name, target in targets.items():
            weights = gate.weights(known, openings(target, target.tasks("training", 50)[40:]))
            assert mean(row[name] for row in weights) > 0.7, name
        benchmark = desk("single")
        tasks = [task for task in benchmark.tasks("test", 120) if task.data["kind"] in EASY]
        routes = gate.route(known, openings(benchmark, tasks))
        assert routes.count(BASE) / len(routes) > bar

    def test_pairs_teach_it_to_weigh_both(self, single: list[Example]) -> None:
        tasks = [task for task in desk("compound").tasks("test", 200) if len(needed(task.data["kind"])) == 2]
        texts, kinds = openings(desk("compound"), tasks), [task.data["kind"] for task in tasks]
        shares = []
        for known in (single, [*single, *pair_examples()]):
            weights = GateRouter(UNASKED).weights(known, texts)
            shares.append(
                mean(min(row[name] for name in needed(kind)) for row, kind in zip(weights, kinds, strict=True))
            )
        assert shares[0] < 0.25 < 0.35 < shares[1]

    def test_weights_are_shares_in_tenths_of_which_the_base_takes_its_own(self) -> None:
        gate = GateRouter(UNASKED, floor=0.2)
        assert gate.composed({"a": 0.62, "b": 0.28, BASE: 0.1}) == "0.7*a+0.3*b"
        assert gate.composed({"a": 0.45, "b": 0.1, BASE: 0.45}) == "0.5*a"
        assert gate.composed({"a": 0.1, "b": 0.05, BASE: 0.85}) == BASE
        assert gate.composed({"a": 0.95, "b": 0.03, BASE: 0.02}) == "a"
        crowd = {name: 0.125 for name in "abcdefgh"}
        assert gate.composed(crowd) == "a"  # none reaches the floor: the first of the heaviest

    def test_an_adapter_at_another_weight_is_an_arm_of_its_own_to_be_played(self) -> None:
        assert composition_weights(["0.5*a", "a", BASE, "0.3*a+0.3*b"]) == {
            "0.5*a": {"a": 0.5},
            "0.3*a+0.3*b": {"a": 0.3, "b": 0.3},
        }

    def test_routes_depend_on_the_opening_alone(self, tiny: Path, single: list[Example]) -> None:
        texts = openings(desk(), desk().tasks("test", 20))
        for gate, known in ((GateRouter(UNASKED), single), (GateRouter(asked(tiny), embedding="states"), single[::8])):
            routes = gate.route(known, texts)
            assert gate.route(known, texts[::-1]) == routes[::-1]
            assert gate.route(known, texts[5:9]) == routes[5:9]

    def test_nothing_known_or_only_passed_tasks_give_the_base(self) -> None:
        assert GateRouter(UNASKED).route([], ["Wrap it."]) == [BASE]
        assert GateRouter(UNASKED).route([Example("Hello.", BASE)] * 3, ["Wrap it."]) == [BASE]


class TestSets:
    """The set router."""

    @pytest.mark.parametrize(("mix", "bar"), [("single", 0.95), ("mixed", 0.9), ("rare", 0.95), ("compound", 0.75)])
    def test_with_pairs_it_finds_the_right_set(self, mix: str, bar: float, single: list[Example]) -> None:
        tasks = desk(mix).tasks("test", 300)
        kinds = [task.data["kind"] for task in tasks]
        routes = SetRouter().route([*single, *pair_examples()], openings(desk(mix), tasks))
        assert exact(routes, kinds) > bar
        assert all(len(members(route)) <= 2 for route in routes)

    def test_without_pairs_it_finds_single_capabilities_and_never_one_that_is_not_needed(
        self, single: list[Example]
    ) -> None:
        for mix, bar in (("single", 0.95), ("compound", 0.1)):
            tasks = desk(mix).tasks("test", 200)
            routes = SetRouter().route(single, openings(desk(mix), tasks))
            kinds = [task.data["kind"] for task in tasks]
            assert exact(routes, kinds) > bar
            wrong = [members(route) - needed(kind) for route, kind in zip(routes, kinds, strict=True)]
            assert sum(map(bool, wrong)) / len(wrong) < 0.05

    def test_three_act_together_where_three_are_allowed(self, single: list[Example]) -> None:
        tasks = [task for task in desk("compound").tasks("test", 200) if task.data["kind"] == "check+pick+copy"]
        known, texts = [*single, *pair_examples()], openings(desk("compound"), tasks)
        assert {len(members(route)) for route in SetRouter(most=2).route(known, texts)} == {2}
        three = [members(route) for route in SetRouter(most=3).route(known, texts)]
        assert {CHECK, PICK, COPY} in three and all(route <= {CHECK, PICK, COPY} for route in three)
        assert all(len(members(route)) == 1 for route in SetRouter(most=1).route(known, texts))

    def test_routes_depend_on_the_opening_alone(self, single: list[Example]) -> None:
        texts = openings(desk(), desk().tasks("test", 50))
        routes = SetRouter().route(single, texts)
        assert SetRouter().route(single, texts[::-1]) == routes[::-1]
        assert SetRouter().route(single, texts[10:20]) == routes[10:20]

    def test_nothing_known_or_only_passed_tasks_give_the_base(self) -> None:
        assert SetRouter().route([], ["Wrap it."]) == [BASE]
        assert SetRouter().route([Example("Hello.", BASE)] * 3, ["Wrap it."]) == [BASE]

    def test_one_capability_without_a_passed_task_is_every_task_s_route(self) -> None:
        assert SetRouter().route([Example("Wrap it.", "wrap")], ["Wrap it.", "Hello."]) == ["wrap", "wrap"]

    def test_a_task_that_speaks_for_no_set_gets_the_likeliest_unless_none_is_likelier(self) -> None:
        assert SetRouter().likeliest({BASE: 0.1, "a": 0.3, "b": 0.4}) == "b"
        assert SetRouter().likeliest({BASE: 0.9, "a": 0.3, "b": 0.1}) == BASE


class TestTopP:
    """The smallest set of adapters whose shares reach p."""

    KNOWN = [Example("wrap it up", "a")] * 3 + [Example("wrap it now", "b")] * 2 + [Example("hello there", BASE)] * 5

    def test_the_smallest_set_that_reaches_p_is_weighted_by_its_shares(self) -> None:
        for p, route in ((0.5, "a"), (0.7, "0.6*a+0.4*b"), (1.0, "0.6*a+0.4*b")):
            assert RetrievalRouter(neighbours=5, p=p).route(self.KNOWN, ["wrap it"]) == [route], p
        assert RetrievalRouter(neighbours=5).route(self.KNOWN, ["wrap it"]) == ["a"]

    def test_where_the_base_has_the_largest_share_no_adapter_acts(self) -> None:
        router = RetrievalRouter(neighbours=10, p=1.0)
        assert router.route(self.KNOWN, ["hello there", "quite another thing"]) == [BASE, BASE]

    def test_pairs_are_no_neighbours(self) -> None:
        pairs = [Example("wrap it", "a+b")] * 9
        assert RetrievalRouter(neighbours=5).route([*pairs, *self.KNOWN], ["wrap it"]) == ["a"]
        assert RetrievalRouter(neighbours=5).route(pairs, ["wrap it"]) == [BASE]

    def test_the_classifier_composes_by_the_probabilities_of_its_letters(self, tiny: Path) -> None:
        known = [Example(f"wrap it {way}", name) for way, name in (("up", "a"), ("now", "b"), ("here", "c"))] * 2
        texts = ["wrap it", "wrap it now", "wrap", "wrap it here and now"]
        router = ClassifierRouter(asked(tiny), neighbours=6)
        routes = ClassifierRouter(asked(tiny), neighbours=6, p=1.0).route(known, texts)
        for shares, best, route in zip(router.shares(known, texts), router.route(known, texts), routes, strict=True):
            assert sum(shares.values()) == pytest.approx(1) and best == max(shares, key=lambda name: shares[name])
            able = {name: share for name, share in shares.items() if name != BASE}
            weights = parse_composition(route) if route != BASE else {}
            assert (route == BASE) == (best == BASE)
            for name, weight in weights.items():
                assert weight == pytest.approx(able[name] / sum(able.values()), abs=0.1)
        assert any(route != BASE for route in routes)


class TestGains:
    """Gains of adapters in their own environments."""

    def test_a_gain_is_the_last_steps_pass_rate_less_the_base_s(self, rollouts: list[Rollout]) -> None:
        some = [*[one for one in rollouts if one.outcome == "passed"][:5], *rollouts[:0]]
        failed = [one for one in rollouts if one.outcome == "failed"][:14]
        error = rollouts[0].model_copy(update={"outcome": "error", "score": None})
        history = grown(0.1, 0.9, 0.2, 0.3, 0.1, 0.2, 0.6, 0.8)
        [row] = adapter_gains(["a"], {"a": [*some, *failed, error]}, history).to_dict("records")
        assert (row["base_rollouts"], row["last_rollouts"]) == (19, 80)
        assert row["base"] == pytest.approx(5 / 19) and row["last"] == pytest.approx(0.7)
        assert row["gain"] == pytest.approx(0.7 - 5 / 19)
        # Newcombe's method 10 by hand: Wilson limits of both shares, and the distances to them.
        low, high = wilson(56, 80), wilson(5, 19)
        below = ((0.7 - low[0]) ** 2 + (high[1] - 5 / 19) ** 2) ** 0.5
        above = ((low[1] - 0.7) ** 2 + (5 / 19 - high[0]) ** 2) ** 0.5
        assert row["low"] == pytest.approx(row["gain"] - below) and row["high"] == pytest.approx(row["gain"] + above)

    def test_only_what_is_known_to_have_gained_nothing_is_gated(self, rollouts: list[Rollout]) -> None:
        half = [one for one in rollouts if one.outcome == "passed"][:4]
        half += [one for one in rollouts if one.outcome == "failed"][:4]
        history = pd.concat([grown(0.9, 0.4, name="worse"), grown(0.1, 0.5, name="level"), grown(0.1, 0.6)])
        names = ["worse", "level", "a", "ramp"]
        found = adapter_gains(names, dict.fromkeys(names[:3], half), history)
        assert routable(found, gate=True) == ["a", "ramp"] and routable(found, gate=False) == names
        assert list(found["capability"]) == names and pd.isna(found["gain"].iloc[3])


def wilson(passed: int, count: int, z: float = 1.959963984540054) -> tuple[float, float]:
    rate, centre = passed / count, passed / count + z * z / (2 * count)
    half = z * (rate * (1 - rate) / count + z * z / (4 * count**2)) ** 0.5
    return (centre - half) / (1 + z * z / count), (centre + half) / (1 + z * z / count)


class TestStage:
    """The stage, over results that lie as the stages before leave them."""

    PAIR = f"{COPY}+{PICK}"

    @pytest.fixture
    def home(
        self, tmp_path: Path, tiny: Path, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
    ) -> Path:  # fmt: skip
        monkeypatch.chdir(tmp_path)
        results, artifacts = tmp_path / "results", tmp_path / "artifacts"
        for folder, names in (("environments", DEFICITS), ("pairs", [self.PAIR])):
            for name in names:
                path = results / folder / f"{name}.py"
                path.parent.mkdir(parents=True, exist_ok=True)
                wanted = Brief(Capability(id=name, name=name, description="."), [])
                path.write_text(TemplateSynthesizer().synthesize(wanted, []))
                passport = Passport(
                    capability=name, environment=load_file(path).fingerprint, attempt=0, passed=True, trusted=True,
                    calibration_tasks=4, checks=[],
                )  # fmt: skip
                publish_json(path.with_suffix(".passport.json"), passport)
        ranked = [Capability(id=name, name=name, description=".") for name in (PICK, CHECK, COPY, STEPS)]
        publish(results / "capabilities/capabilities.jsonl", ranked)
        publish(artifacts / "rollouts/discovery.jsonl", rollouts)
        played = [
            one
            for name in DEFICITS
            for target in [load_file(results / f"environments/{name}.py")]
            for one in collect(
                ScriptedPolicy(skill=0.5), target, target.tasks("training", 4), purpose="calibration", seed=0,
                trials=4, journals=tmp_path / "journals", quiet=True,
            )
        ]  # fmt: skip
        publish(artifacts / "environments/calibration.jsonl", played)
        publish_json(results / "adapters/index.json", {name: {"digest": name, "path": ""} for name in DEFICITS})
        history = pd.concat([grown(0.5, 1.0 if name != STEPS else 0.0, name=name) for name in DEFICITS])
        history.to_csv(results / "adapters/history.csv", index=False)
        (artifacts / "base").symlink_to(tiny)
        return tmp_path

    def play(self, home: Path, *overrides: str, mix: str = "compound") -> pd.DataFrame:
        chosen = ["evaluation.tasks=20", f"benchmark.mix={mix}", *overrides]
        publish_spec(compose_spec("smoke", 0, chosen, CONF), home / "results/spec.yaml")
        runpy.run_path(str(CONF.parent / "stages/routes.py"), run_name="__main__")
        return pd.read_csv(home / "results/routes/routes.csv", keep_default_na=False)

    def test_it_routes_by_sets_with_pairs_and_leaves_out_what_gained_nothing(self, home: Path) -> None:
        table = self.play(home, "router=sets", "controls.run=true")
        columns = ["task", "kind", *COMPARED, "chosen", "control:random_router", "control:placebo", "control:no_base"]
        assert list(table.columns) == columns
        both = table[table["kind"] == "pick+copy"]
        assert len(both) and {*both["chosen"]} == {composition_name({COPY: 1.0, PICK: 1.0})}
        assert not any(STEPS in members(arm) for column in columns[2:] for arm in table[column])
        gained = pd.read_csv(home / "results/routes/gains.csv")
        assert list(gained["capability"]) == [PICK, CHECK, COPY, STEPS]
        assert list(gained["routed"]) == [True, True, True, False]
        assert list(gained["base_rollouts"]) == [16] * 4 and list(gained["last_rollouts"]) == [40] * 4
        before = {path.name: path.read_bytes() for path in (home / "results/routes").iterdir()}
        assert before.keys() == {"routes.csv", "compositions.json", "gains.csv", "index.json"}
        self.play(home, "router=sets", "controls.run=true")
        assert before == {path.name: path.read_bytes() for path in (home / "results/routes").iterdir()}

    def test_controls_that_are_not_wanted_are_not_there_and_pairs_may_be_missing(self, home: Path) -> None:
        for path in (home / "results/pairs").iterdir():
            path.unlink()
        table = self.play(home, mix="single")
        assert list(table.columns) == ["task", "kind", *COMPARED, "chosen"]
        assert list(table["chosen"]) == list(table["retrieval"])

    def test_an_adapter_of_a_ramp_acts_on_every_task(self, home: Path) -> None:
        publish_json(home / "results/adapters/index.json", {"ramp": {"digest": "d", "path": ""}})
        grown(0.5, 0.6, name="ramp").to_csv(home / "results/adapters/history.csv", index=False)
        assert {*self.play(home)["chosen"]} == {"ramp"}
