"""The table of routes: every test task, and the arm that each router chooses for it.

The column `chosen` holds the configured router's choice. Other columns hold the choices of the other routers and of
control routers that ignore the task, so that the evaluation compares all of them on the same outcomes. An adapter
without environment must be the only adapter; it then acts on every task. User conversations are routed like test tasks.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import pandas as pd

from captrain.benchmarks import evaluation_tasks, load_benchmark
from captrain.contract import CheckedEnvironment
from captrain.environments import load_environment, read_passports
from captrain.errors import UserError
from captrain.models import composition_name, parse_composition
from captrain.records import (
    Capability,
    Message,
    Rollout,
    Task,
    load,
    publish_json,
    publish_text,
    read_index,
    read_table,
    read_text,
)
from captrain.routing.classifier import ClassifierRouter
from captrain.routing.compositions import BASE, composition_weights, members, route_of_shares
from captrain.routing.gains import adapter_gains, routable
from captrain.routing.gate import GateRouter
from captrain.routing.retrieval import Neighbours, RetrievalRouter, ShareRouter
from captrain.routing.router import OPENINGS, AskedModel, Example, Router, examples, opening, openings
from captrain.routing.sets import SetRouter
from captrain.run import Component, Machine, Spec, build

NEIGHBOURS = 5
"""Number of neighbours for the other routers, if the configured router has no `neighbours` setting."""
TOP_P, WIDE = 0.9, 20
"""Defaults of the `top_p` column: the share that a composition must reach, and the minimum number of neighbours.
The nearest few neighbours usually belong to one capability, so the minimum is high."""


@dataclass(frozen=True)
class RoutingEvidence:
    """The outputs of earlier stages that routers may use.

    Args:
        targets: capability -> its environment, in rank order; only those with an adapter.
        pairs: "a+b" -> the environment that needs both.
        calibration: capability -> rollouts of the base in its environment.
        rollouts: of the base, on the discovery split.
        descriptions: capability -> what it is.
    """

    targets: Mapping[str, CheckedEnvironment]
    pairs: Mapping[str, CheckedEnvironment]
    calibration: Mapping[str, Sequence[Rollout]]
    rollouts: Sequence[Rollout]
    descriptions: Mapping[str, str] = field(default_factory=dict)

    def limited_to(self, names: Sequence[str]) -> "RoutingEvidence":
        """Return the evidence for these capabilities only."""
        return replace(
            self,
            targets={name: target for name, target in self.targets.items() if name in names},
            pairs={pair: target for pair, target in self.pairs.items() if members(pair) <= {*names}},
            calibration={name: rollouts for name, rollouts in self.calibration.items() if name in names},
        )

    def examples(self, router: Router) -> list[Example]:
        """Return the examples that a router learns from, with descriptions and solutions if it shows them."""
        is_detailed = isinstance(router, ClassifierRouter) and router.prompt == "trajectories"
        environments = {**self.targets, **self.pairs}
        return examples(environments, OPENINGS, self.rollouts, self.descriptions if is_detailed else None)


@dataclass(frozen=True)
class Routes:
    """Routes, and the gains behind them.

    table: task, kind, a column for each router, `chosen`, and "control:..." for each control router. The values are
    names of arms. gains: see `captrain.routing.gains`, and `routed`: whether the adapter may be routed to.
    """

    table: pd.DataFrame
    gains: pd.DataFrame

    @property
    def compositions(self) -> dict[str, dict[str, float]]:
        """Return arm -> weight of each capability, for every composition in the table."""
        return composition_weights(map(str, self.table.drop(columns=["task", "kind"]).to_numpy().ravel()))


def route_all(spec: Spec, base: Path, results: Path, artifacts: Path) -> Routes:
    """Route the test split from the outputs of earlier stages.

    Raises:
        UserError: an input is missing or damaged, or adapters with and without environment are mixed.
    """
    evidence, gains = routing_evidence(spec, results, artifacts)
    benchmark = load_benchmark(spec.benchmark, spec.machine)
    tasks = evaluation_tasks(benchmark, spec.evaluation)
    seed = spec.seed if spec.controls.run else None
    return route_tasks(spec.router, AskedModel.of(spec, base), evidence, gains, benchmark, tasks, seed)


def routing_evidence(spec: Spec, results: Path, artifacts: Path) -> tuple[RoutingEvidence, pd.DataFrame]:
    """Read the outputs of earlier stages, and estimate what each adapter has gained (see `adapter_gains`).

    Raises:
        UserError: an input is missing or damaged.
    """
    index = read_index(results / "adapters/index.json")
    passed = read_passports(results / "environments")
    capabilities = load(results / "capabilities/capabilities.jsonl", Capability)
    ranking = [capability.id for capability in capabilities if capability.id in passed]
    adapters = [name for name in ranking if name in index] + sorted(set(index) - set(ranking))
    targets = _targets(results / "environments", spec.machine)
    rollouts = load(artifacts / "environments/calibration.jsonl", Rollout)
    evidence = RoutingEvidence(
        targets={name: targets[name] for name in ranking},
        pairs=_targets(results / "pairs", spec.machine),
        calibration={
            name: [rollout for rollout in rollouts if rollout.environment == targets[name].name] for name in ranking
        },
        rollouts=load(artifacts / "rollouts/discovery.jsonl", Rollout),
        descriptions={capability.id: capability.description for capability in capabilities},
    )
    return evidence, adapter_gains(adapters, evidence.calibration, read_table(results / "adapters/history.csv"))


def _targets(folder: Path, machine: Machine) -> dict[str, CheckedEnvironment]:
    return {name: load_environment(folder, passport, machine) for name, passport in read_passports(folder).items()}


def route_tasks(
    component: Component,
    model: AskedModel,
    evidence: RoutingEvidence,
    gains: pd.DataFrame,
    benchmark: CheckedEnvironment,
    tasks: Sequence[Task],
    controls: int | None = None,
) -> Routes:
    """Route every task by each router.

    Args:
        component: the configured router, whose choices are the column `chosen`.
        model: the base.
        evidence: the outputs of earlier stages.
        gains: see `captrain.routing.gains.adapter_gains`; a row for each adapter.
        benchmark: of the tasks.
        tasks: to be routed.
        controls: seed of the control routers; None leaves out all control columns.

    Raises:
        UserError: an adapter without environment is not the only one.
    """
    router = build(component, Router, model=model)
    adapters = routable(gains, router.gate)
    table = pd.DataFrame({"task": [task.id for task in tasks], "kind": [task.data.get("kind", "") for task in tasks]})
    texts, solved = list[str](), list[Example]()
    if foreign := [name for name in adapters if name not in evidence.targets]:
        if len(adapters) > 1:
            raise UserError(
                f"adapter {foreign[0]} has no environment, but {len(adapters) - 1} others have",
                "run `dvc repro -f adapters`: one trainer leaves all adapters of a run",
            )
        table["chosen"] = foreign[0]
    else:
        texts, solved = openings(benchmark, tasks), evidence.limited_to(adapters).examples(router)
        for name, routes in _columns(router, model, solved, texts, len(adapters)).items():
            table[name] = routes
    if controls is not None:
        table["control:random_router"] = random_routes(tasks, [BASE, *adapters], controls)
        if len(adapters) > 1:
            table["control:placebo"] = placebo(table["chosen"].tolist(), adapters)
        if adapters and not foreign:
            table["control:no_base"] = without_base(router, solved, texts)
    return Routes(table, gains.assign(routed=[name in adapters for name in gains["capability"]]))


def _columns(
    router: Router, model: AskedModel, solved: Sequence[Example], texts: Sequence[str], adapters: int
) -> dict[str, list[str]]:
    """Route all texts by each router with the configured settings. `chosen` holds the configured router's choices.

    There is no `classifier` column if the policy cannot answer questions.
    """
    neighbours: int = getattr(router, "neighbours", NEIGHBOURS)
    columns = {"retrieval": RetrievalRouter(neighbours=neighbours).route(solved, texts)}
    routes: list[str] = []
    if isinstance(router, ClassifierRouter):
        # Asking the base is by far the slowest step, so both columns share its answers.
        shares = router.shares(solved, texts)
        columns["classifier"] = [route_of_shares(row, None) for row in shares]
        routes = [route_of_shares(row, router.p) for row in shares]
    elif model.answers:
        columns["classifier"] = ClassifierRouter(model, neighbours=neighbours).route(solved, texts)
    if adapters > 1:
        sets = router if isinstance(router, SetRouter) else SetRouter()
        columns["sets"] = sets.route(solved, texts)
        gate = router if isinstance(router, GateRouter) else GateRouter(model)
        columns["gate"] = gate.route(solved, texts)
        p = getattr(router, "p", None) or TOP_P
        columns["top_p"] = RetrievalRouter(neighbours=max(neighbours, WIDE), p=p).route(solved, texts)
    return columns | {"chosen": routes or router.route(solved, texts)}


def random_routes(tasks: Sequence[Task], routes: Sequence[str], seed: int) -> list[str]:
    """Draw a route uniformly for each task, seeded by (seed, task id)."""
    return [random.Random(f"{seed}/{task.id}/random_router").choice(list(routes)) for task in tasks]


def placebo(routes: Sequence[str], capabilities: Sequence[str]) -> list[str]:
    """Replace each adapter by the next one in rank order, and the last by the first. Keep the base.

    A composition replaces each member and keeps the weights; it may share members with the chosen route.
    """
    following = dict(zip(capabilities, [*capabilities[1:], capabilities[0]], strict=True))
    return [
        BASE
        if route == BASE
        else composition_name({following[name]: weight for name, weight in parse_composition(route).items()})
        for route in routes
    ]


def without_base(router: Router, solved: Sequence[Example], texts: Sequence[str]) -> list[str]:
    """Route each text to an adapter, never to the base.

    The router sees no example of the base. If it still chooses the base, the adapter of the nearest example acts.

    Args:
        router: the configured one.
        solved: examples. Base examples are dropped; an example of a single capability must remain.
        texts: openings to be routed.
    """
    remaining = [example for example in solved if example.route != BASE]
    if isinstance(router, ShareRouter):
        rows = [{name: row[name] for name in row if name != BASE} for row in router.shares(remaining, texts)]
        routes = [route_of_shares(row, router.p) if row else BASE for row in rows]
    else:
        routes = router.route(remaining, texts)
    nearest = Neighbours([example for example in remaining if len(members(example.route)) < 2], 1)
    return [nearest.of(text)[0][1].route if route == BASE else route for text, route in zip(texts, routes, strict=True)]


def publish_routes(routes: Routes, results: Path) -> None:
    """Write results/routes: routes.csv, compositions.json, gains.csv, and the index of the adapters that routes name.

    The evaluation of TRACE reads nothing else.
    """
    folder = results / "routes"
    publish_text(folder / "index.json", read_text(results / "adapters/index.json"))
    publish_text(folder / "routes.csv", routes.table.to_csv(index=False))
    publish_json(folder / "compositions.json", routes.compositions)
    publish_text(folder / "gains.csv", routes.gains.to_csv(index=False, float_format="%.6f"))


class ConversationRouter:
    """Routes conversations as the configured router routes test tasks.

    A conversation has one opening, so all its turns have the same route. The router keeps no state: equal messages get
    equal routes.

    Args:
        spec: of the run.
        base: folder of the base, for routers that ask it.
        results: folder of the results.
        artifacts: folder of the artifacts.

    Raises:
        UserError: an input is missing or damaged.
    """

    def __init__(self, spec: Spec, base: Path, results: Path, artifacts: Path) -> None:
        evidence, gains = routing_evidence(spec, results, artifacts)
        self.router = build(spec.router, Router, model=AskedModel.of(spec, base))
        adapters = routable(gains, self.router.gate)
        foreign = [name for name in adapters if name not in evidence.targets]
        self.only = foreign[0] if foreign else BASE
        self.examples = [] if foreign or not adapters else evidence.limited_to(adapters).examples(self.router)
        self._index = Neighbours(self.examples, 1) if self.examples else None
        self._route = lru_cache(4096)(self._route_of)

    def choose(self, messages: Sequence[Message]) -> tuple[str, str]:
        """Choose the arm that answers these messages; returns its name and the reason."""
        return self._route(opening(messages))

    def _route_of(self, text: str) -> tuple[str, str]:
        if self._index is None:
            return self.only, "the only one there is"
        [route] = self.router.route(self.examples, [text])
        [(similarity, nearest)] = self._index.of(text)
        nearest_task = f"the nearest known task is of {nearest.route} (similarity {similarity:.2f}): {nearest.text}"
        return route, f"{type(self.router).__name__}; {nearest_task}"
