"""The table of routes: every test task, and the arm that each router chooses for it.

The configured router's choice is `chosen`; what other routers and routers that know nothing would have chosen stands
beside it, so that the evaluation compares them on the same outcomes. An adapter of no environment (one trained on a
ramp) is the only one there is, acts on every task, and leaves a router nothing to choose.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from captrain.benchmarks import load_benchmark
from captrain.config import Component, Machine, Spec, build
from captrain.contract import Target
from captrain.environments import load as load_environment
from captrain.environments import passports
from captrain.errors import UserError
from captrain.models import weights_of
from captrain.records import Capability, Rollout, Task, load, publish_json, publish_text
from captrain.routing.bounds import placebo, random_routes
from captrain.routing.gains import able, gains
from captrain.routing.nearest import ClassifierRouter, RetrievalRouter, arm
from captrain.routing.router import BASE, EXAMPLES, Example, Router, examples, members, openings
from captrain.routing.sets import SetRouter
from captrain.routing.turns import TurnRouter

NEIGHBOURS = 5
"""Of routers that are there for comparison, where the configured one has no such setting."""
TOP_P, WIDE = 0.9, 20
"""Share that compositions reach which are there for comparison, where the configured router composes none, and the
least number of neighbours that they go by: the nearest few are of one capability as a rule."""
MOST = 2
"""Adapters that act together in sets which are there for comparison."""
FIRST_COLUMNS = ("task", "kind")


@dataclass(frozen=True)
class Known:
    """What routers may know of the run so far.

    Args:
        targets: capability -> its environment, in the order of their ranks; those alone that have an adapter.
        pairs: "a+b" -> the environment that demands both.
        calibration: capability -> rollouts of the base in its environment.
        rollouts: of the base, on the discovery split.
    """

    targets: Mapping[str, Target]
    pairs: Mapping[str, Target]
    calibration: Mapping[str, Sequence[Rollout]]
    rollouts: Sequence[Rollout]

    def narrowed(self, names: Sequence[str]) -> "Known":
        """What is left where these capabilities alone may be routed to."""
        return replace(
            self,
            targets={name: target for name, target in self.targets.items() if name in names},
            pairs={pair: target for pair, target in self.pairs.items() if members(pair) <= {*names}},
            calibration={name: some for name, some in self.calibration.items() if name in names},
        )


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
        """Arm -> weight of each capability, for every arm in the table of more than one."""
        arms = sorted({str(arm) for arm in self.table.drop(columns=[*FIRST_COLUMNS]).to_numpy().ravel()})
        return {arm: weights_of(arm) for arm in arms if weights_of(arm) != {arm: 1.0}}


def route_all(spec: Spec, base: Path, results: Path, artifacts: Path) -> Routes:
    """Routes of the test split, from what the stages before have left.

    Raises:
        UserError: an input is missing or damaged, or adapters of environments and others lie side by side.
    """
    index = json.loads((results / "adapters/index.json").read_text())
    earned = passports(results / "environments")
    ranked = [one.id for one in load(results / "capabilities/capabilities.jsonl", Capability) if one.id in earned]
    adapters = [name for name in ranked if name in index] + sorted(set(index) - set(ranked))
    targets = _targets(results / "environments", spec.machine)
    played = load(artifacts / "environments/calibration.jsonl", Rollout)
    known = Known(
        targets={name: targets[name] for name in ranked},
        pairs=_targets(results / "pairs", spec.machine),
        calibration={name: [one for one in played if one.environment == targets[name].name] for name in ranked},
        rollouts=load(artifacts / "rollouts/discovery.jsonl", Rollout),
    )
    found = gains(adapters, known.calibration, pd.read_csv(results / "adapters/history.csv"))
    benchmark = load_benchmark(spec.benchmark, spec.machine)
    tasks = benchmark.tasks("test", spec.evaluation.tasks)
    seed = spec.seed if spec.controls.run else None
    return route_tasks(spec.router, base, known, found, benchmark, tasks, seed)


def _targets(folder: Path, machine: Machine) -> dict[str, Target]:
    return {name: load_environment(folder, passport, machine) for name, passport in passports(folder).items()}


def route_tasks(
    component: Component, model: Path, known: Known, gained: pd.DataFrame, benchmark: Target, tasks: Sequence[Task],
    controls: int | None = None,
) -> Routes:  # fmt: skip
    """The route of every task by each router.

    Args:
        component: the configured router, whose choices are the column `chosen`.
        model: folder of the base model.
        known: what routers may know.
        gained: see `captrain.routing.gains.gains`; its rows are the adapters that there are.
        benchmark: where the tasks are from.
        tasks: to be routed.
        controls: seed of the routers that know nothing; None leaves them out.

    Raises:
        UserError: an adapter of no environment is not the only one.
    """
    chosen = build(component, Router, model=model)
    adapters = able(gained, chosen.gate)
    table = pd.DataFrame({"task": [task.id for task in tasks], "kind": [task.data.get("kind", "") for task in tasks]})
    routed = gained.assign(routed=[name in adapters for name in gained["capability"]])
    if others := [name for name in adapters if name not in known.targets]:
        if len(adapters) > 1:
            raise UserError(
                f"adapter {others[0]} belongs to no environment, and {len(adapters) - 1} others lie beside it",
                "run `dvc repro -f adapters`: one trainer leaves all adapters of a run",
            )
        table["chosen"], turns = others[0], None
    else:
        known = known.narrowed(adapters)
        texts = openings(benchmark, tasks)
        openers = examples({**known.targets, **known.pairs}, EXAMPLES, known.rollouts)
        for name, routes in _compared(chosen, model, openers, texts, len(adapters)).items():
            table[name] = routes
        turns = _turns(known)
    if controls is not None:
        table["control:random_router"] = random_routes(tasks, [BASE, *adapters], controls)
        if len(adapters) > 1:
            table["control:placebo"] = placebo(table["chosen"].tolist(), adapters)
    return Routes(table, routed, turns)


def _compared(
    chosen: Router, model: Path, known: Sequence[Example], texts: Sequence[str], adapters: int
) -> dict[str, list[str]]:  # fmt: skip
    """What each router would choose, with the configured one's settings; that one's own choices are `chosen`."""
    neighbours = getattr(chosen, "neighbours", NEIGHBOURS)
    p: float | None = getattr(chosen, "p", None)
    # Asking the base takes far longer than all else here, so that its shares are found once for all columns.
    shares: dict[type, list[dict[str, float]]] = {
        kind: kind(model, neighbours=neighbours).shares(known, texts) for kind in (RetrievalRouter, ClassifierRouter)
    }
    found = {
        "retrieval": [arm(one, None) for one in shares[RetrievalRouter]],
        "classifier": [arm(one, None) for one in shares[ClassifierRouter]],
    }
    if adapters > 1:
        found["sets"] = SetRouter(most=getattr(chosen, "most", MOST)).route(known, texts)
        found["top_p"] = RetrievalRouter(neighbours=max(neighbours, WIDE), p=p or TOP_P).route(known, texts)
    if type(chosen) in shares:
        return found | {"chosen": [arm(one, p) for one in shares[type(chosen)]]}
    return found | {"chosen": chosen.route(known, texts)}


def _turns(known: Known) -> TurnRouter | None:
    if len(known.targets) < 2:
        return None
    return TurnRouter.fitted({**known.targets, **known.pairs}, known.calibration, known.rollouts)


def publish_routes(routes: Routes, folder: Path) -> None:
    """Write routes.csv, compositions.json, gains.csv and, where there is a choice, turns.json."""
    publish_text(folder / "routes.csv", routes.table.to_csv(index=False))
    publish_json(folder / "compositions.json", routes.compositions)
    publish_text(folder / "gains.csv", routes.gains.to_csv(index=False, float_format="%.6f"))
    if routes.turns is not None:
        routes.turns.write(folder / "turns.json")
