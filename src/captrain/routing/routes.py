"""The table of routes: every test task, and the arm that each router chooses for it.

The configured router's choice is `chosen`; what other routers and routers that know nothing would have chosen stands
beside it, so that the evaluation compares them on the same outcomes. An adapter of no environment is the only one
there is, acts on every task, and leaves a router nothing to choose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from captrain.benchmarks import evaluation_tasks, load_benchmark
from captrain.config import Component, Machine, Spec, build
from captrain.contract import Target
from captrain.environments import load_environment, read_passports
from captrain.errors import UserError
from captrain.records import Capability, Rollout, Task, load, publish_json, publish_text, read_index, read_table
from captrain.routing.bounds import placebo, random_routes, without_base
from captrain.routing.classifier import ClassifierRouter
from captrain.routing.compositions import BASE, composition_weights, members, route_of_shares
from captrain.routing.gains import adapter_gains, routable
from captrain.routing.gate import EMBEDDING, FLOOR, Embedding, GateRouter
from captrain.routing.neighbours import ShareRouter
from captrain.routing.retrieval import RetrievalRouter
from captrain.routing.router import OPENINGS, AskedModel, Example, Router, examples, openings
from captrain.routing.sets import SetRouter
from captrain.routing.turns import TurnRouter

NEIGHBOURS = 5
"""Neighbours of routers that run for comparison, where the configured one has no such setting."""
TOP_P, WIDE = 0.9, 20
"""Share that compositions reach which are there for comparison, where the configured router composes none, and the
least number of neighbours that they go by: the nearest few are of one capability as a rule."""
MOST = 2
"""Adapters that act together in sets which are there for comparison."""
FIRST_COLUMNS = ("task", "kind")
NAMES: dict[type[ShareRouter], str] = {RetrievalRouter: "retrieval", ClassifierRouter: "classifier"}
"""Columns of the routers whose shares are found once for all columns."""


@dataclass(frozen=True)
class RoutingEvidence:
    """Evidence of the run so far that routers may use.

    Args:
        targets: capability -> its environment, in the order of their ranks; those alone that have an adapter.
        pairs: "a+b" -> the environment that demands both.
        calibration: capability -> rollouts of the base in its environment.
        rollouts: of the base, on the discovery split.
        descriptions: capability -> what it is.
    """

    targets: Mapping[str, Target]
    pairs: Mapping[str, Target]
    calibration: Mapping[str, Sequence[Rollout]]
    rollouts: Sequence[Rollout]
    descriptions: Mapping[str, str] = field(default_factory=dict)

    def limited_to(self, names: Sequence[str]) -> "RoutingEvidence":
        """Narrow the evidence to these capabilities."""
        return replace(
            self,
            targets={name: target for name, target in self.targets.items() if name in names},
            pairs={pair: target for pair, target in self.pairs.items() if members(pair) <= {*names}},
            calibration={name: rollouts for name, rollouts in self.calibration.items() if name in names},
        )

    @property
    def environments(self) -> dict[str, Target]:
        """Capability, or pair "a+b", -> its environment."""
        return {**self.targets, **self.pairs}

    def examples(self, router: Router) -> list[Example]:
        """List the examples that a router learns from, with descriptions and solutions where it shows them."""
        detailed = isinstance(router, ClassifierRouter) and router.detailed
        return examples(self.environments, OPENINGS, self.rollouts, self.descriptions if detailed else None)


@dataclass(frozen=True)
class Routes:
    """Routes and what they rest on.

    table: task, kind, a column for each router, `chosen`, and a column "control:..." for each router that knows
    nothing; the values are names of arms.
    gains: see `captrain.routing.gains`, and `routed`: whether the adapter may be routed to.
    turns: the router that is asked before every turn; None where there are no two adapters to choose between.
    """

    table: pd.DataFrame
    gains: pd.DataFrame
    turns: TurnRouter | None

    @property
    def compositions(self) -> dict[str, dict[str, float]]:
        """Arm -> weight of each capability, for every arm in the table that is made of adapters and is none itself."""
        return composition_weights(map(str, self.table.drop(columns=[*FIRST_COLUMNS]).to_numpy().ravel()))


def route_all(spec: Spec, base: Path, results: Path, artifacts: Path) -> Routes:
    """Route the test split, from what the stages before have left.

    Raises:
        UserError: an input is missing or damaged, or adapters of environments and others lie side by side.
    """
    evidence, gains = routing_evidence(spec, results, artifacts)
    benchmark = load_benchmark(spec.benchmark, spec.machine)
    tasks = evaluation_tasks(benchmark, spec.evaluation)
    seed = spec.seed if spec.controls.run else None
    return route_tasks(spec.router, AskedModel.of(spec, base), evidence, gains, benchmark, tasks, seed)


def routing_evidence(spec: Spec, results: Path, artifacts: Path) -> tuple[RoutingEvidence, pd.DataFrame]:
    """Read the evidence that the stages before have left, and what each adapter has gained (see `adapter_gains`).

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


def _targets(folder: Path, machine: Machine) -> dict[str, Target]:
    return {name: load_environment(folder, passport, machine) for name, passport in read_passports(folder).items()}


def route_tasks(
    component: Component,
    model: AskedModel,
    evidence: RoutingEvidence,
    gains: pd.DataFrame,
    benchmark: Target,
    tasks: Sequence[Task],
    controls: int | None = None,
) -> Routes:
    """Route every task by each router.

    Args:
        component: the configured router, whose choices are the column `chosen`.
        model: the base.
        evidence: what routers may know.
        gains: see `captrain.routing.gains.adapter_gains`; its rows are the adapters that there are.
        benchmark: where the tasks are from.
        tasks: to be routed.
        controls: seed of the routers that know nothing; None leaves them out, and the one without the base.

    Raises:
        UserError: an adapter of no environment is not the only one.
    """
    router = build(component, Router, model=model)
    adapters = routable(gains, router.gate)
    table = pd.DataFrame({"task": [task.id for task in tasks], "kind": [task.data.get("kind", "") for task in tasks]})
    turns, texts, solved = None, list[str](), list[Example]()
    if foreign := [name for name in adapters if name not in evidence.targets]:
        if len(adapters) > 1:
            raise UserError(
                f"adapter {foreign[0]} belongs to no environment, and {len(adapters) - 1} others lie beside it",
                "run `dvc repro -f adapters`: one trainer leaves all adapters of a run",
            )
        table["chosen"] = foreign[0]
    else:
        evidence = evidence.limited_to(adapters)
        texts, solved = openings(benchmark, tasks), evidence.examples(router)
        for name, routes in _columns(router, model, solved, texts, len(adapters)).items():
            table[name] = routes
        turns = _turn_router(evidence)
    if controls is not None:
        table["control:random_router"] = random_routes(tasks, [BASE, *adapters], controls)
        if len(adapters) > 1:
            table["control:placebo"] = placebo(table["chosen"].tolist(), adapters)
        if adapters and not foreign:
            table["control:no_base"] = without_base(router, solved, texts)
    return Routes(table, gains.assign(routed=[name in adapters for name in gains["capability"]]), turns)


def _columns(
    router: Router, model: AskedModel, solved: Sequence[Example], texts: Sequence[str], adapters: int
) -> dict[str, list[str]]:
    """Route all texts by each router, with the configured one's settings; that one's choices are the column `chosen`.

    Without a model that could be asked there is no column of the classifier.
    """
    neighbours = getattr(router, "neighbours", NEIGHBOURS)
    p: float | None = getattr(router, "p", None)
    # Asking the base takes far longer than all else here, so that its shares are found once for all columns.
    shares: dict[type[ShareRouter], list[dict[str, float]]] = {}
    shares[RetrievalRouter] = RetrievalRouter(neighbours=neighbours).shares(solved, texts)
    if isinstance(router, ClassifierRouter) or model.answers:
        classifier = router if isinstance(router, ClassifierRouter) else ClassifierRouter(model, neighbours=neighbours)
        shares[ClassifierRouter] = classifier.shares(solved, texts)
    columns = {NAMES[kind]: [route_of_shares(row, None) for row in rows] for kind, rows in shares.items()}
    if adapters > 1:
        columns["sets"] = SetRouter(most=getattr(router, "most", MOST)).route(solved, texts)
        embedding: Embedding = getattr(router, "embedding", EMBEDDING)
        floor: float = getattr(router, "floor", FLOOR)
        columns["gate"] = GateRouter(model, embedding=embedding, floor=floor).route(solved, texts)
        columns["top_p"] = RetrievalRouter(neighbours=max(neighbours, WIDE), p=p or TOP_P).route(solved, texts)
    if isinstance(router, ShareRouter) and type(router) in shares:
        return columns | {"chosen": [route_of_shares(row, p) for row in shares[type(router)]]}
    return columns | {"chosen": router.route(solved, texts)}


def _turn_router(evidence: RoutingEvidence) -> TurnRouter | None:
    if len(evidence.targets) < 2:
        return None
    return TurnRouter.fit(evidence.environments, evidence.calibration, evidence.rollouts)


def publish_routes(routes: Routes, folder: Path) -> None:
    """Write routes.csv, compositions.json, gains.csv and, where there is a choice, turns.json."""
    publish_text(folder / "routes.csv", routes.table.to_csv(index=False))
    publish_json(folder / "compositions.json", routes.compositions)
    publish_text(folder / "gains.csv", routes.gains.to_csv(index=False, float_format="%.6f"))
    if routes.turns is not None:
        routes.turns.write(folder / "turns.json")
