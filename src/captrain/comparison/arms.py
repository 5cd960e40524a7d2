"""The arms of the evaluation: the base and all that the stages before have left, on the same test tasks.

An arm acts with the base, with an adapter or with lines of guidance; a composition of adapters acts on those tasks
alone that are routed to it. Every arm is played with the same randomness, so that comparisons are paired, and every
router and every bound is computed from one table of outcomes without a further rollout.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from captrain.agents import LIBRARIES, check_ranks, collect, floor_scores, load_policy
from captrain.benchmarks import evaluation_tasks, load_benchmark
from captrain.comparison.baselines.registry import acting_stages
from captrain.comparison.rows import BASE, partial_stages
from captrain.contract import CheckedEnvironment, Policy
from captrain.ledger import LedgerEntry, ledger_entry
from captrain.models import Adapter, compose, parse_composition, require_trained
from captrain.records import Rollout, read_index, read_json, read_table
from captrain.run import Component, Spec, launch, takes

COMPOSITIONS = Path(".cache/compositions")
COMPOSITION_BATCHES = 4
"""Compositions are many and act on few tasks each: they are played in so many portions."""


@dataclass(frozen=True)
class Arm:
    """Player of an evaluation: its name, the stage that it comes from ("" for the base), its adapter (None for none),
    its lines of guidance, and the ids of its tasks (None for all)."""

    name: str
    stage: str = ""
    adapter: Adapter | None = None
    guidance: tuple[str, ...] = ()
    tasks: frozenset[str] | None = None

    def identity(self) -> tuple[object, ...]:
        """Return the fields that decide its behaviour, beside the policy."""
        digest = self.adapter.digest if self.adapter else ""
        return digest, self.guidance, sorted(self.tasks or ())


@dataclass(frozen=True)
class ArmBatch:
    """Arms that are played together, in one process."""

    arms: tuple[Arm, ...]
    base: Path
    spec: Spec

    @property
    def name(self) -> str:
        """Name in `captrain jobs`."""
        return self.arms[0].name if len(self.arms) == 1 else f"{len(self.arms)} compositions"

    def identity(self) -> tuple[object, ...]:
        """Return the fields that decide its rollouts."""
        arms = [arm.identity() for arm in self.arms]
        spec, settings = self.spec, self.spec.evaluation
        return (
            arms,
            self.base,
            spec.seed,
            spec.benchmark,
            spec.policy,
            settings.tasks,
            settings.splits,
            settings.trials,
            spec.rollouts.retries,
        )


def play_arms(spec: Spec, base: Path, results: Path) -> tuple[list[Rollout], pd.DataFrame, list[LedgerEntry]]:
    """Play all arms on the test split.

    Returns:
        All rollouts; outcomes (task, kind, arm, stage, trial, outcome, reward), one row a rollout, and rows of the arm
        "idle", which does nothing and costs no rollout; ledger entries.

    Raises:
        UserError: an adapter is missing, or is not the one the index names, or servers do not take one of its rank.
    """
    routes = all_routes(results, spec.evaluation.alternatives)
    stage_arms = [arm for stage in acting_stages() for arm in _stage_arms(results, stage)]
    arms_by_name = {arm.name: arm for arm in stage_arms}
    whole = [
        Arm("base"),
        *(_limited_to_routes(arm, routes, spec.evaluation.alternatives) for arm in stage_arms),
    ]
    compositions = list(composition_arms(results, arms_by_name, routes))
    portions = [
        tuple(compositions[offset::COMPOSITION_BATCHES])
        for offset in range(min(COMPOSITION_BATCHES, len(compositions)))
    ]
    if takes(spec.policy, "machine"):
        acting = [Path(arm.adapter.folder) for arm in (*whole, *compositions) if arm.adapter is not None]
        check_ranks(acting, spec.machine.vllm)
    batches = [ArmBatch(arms, base, spec) for arms in [*((arm,) for arm in whole), *portions]]
    arm_rollouts = [
        pair for pairs in launch.run(play_batch, batches, spec.machine, "evaluation", LIBRARIES) for pair in pairs
    ]
    rows = _floor(arm_rollouts[0][1], load_benchmark(spec.benchmark, spec.machine)) + [
        (*_place(play), arm.name, arm.stage, play.trial, play.outcome, play.score.reward if play.score else None)
        for arm, rollouts in arm_rollouts
        for play in rollouts
    ]
    outcomes = pd.DataFrame(rows, columns=["task", "kind", "arm", "stage", "trial", "outcome", "reward"])
    ledger = [
        ledger_entry(rollouts, stage="evaluation", method="evaluation", item=arm.name) for arm, rollouts in arm_rollouts
    ]
    return [rollout for _, rollouts in arm_rollouts for rollout in rollouts], outcomes, ledger


def all_routes(results: Path, alternatives: bool = True) -> pd.DataFrame:
    """Join all routes: columns task, kind, and one for each router, each control and the adapters of solutions, with
    the arm that it chooses for the task; without alternatives none for the routers beside the configured one."""
    routes = _routes(results / "routes/routes.csv")
    if not alternatives:
        routes = routes.filter(regex="^(task|kind|chosen|control:.*)$")
    for stage in ("solutions", "controls"):
        path = results / stage / "routes.csv"
        further = _routes(path) if path.exists() else routes[["task"]]
        if len(further.columns) > 1:
            routes = routes.merge(further, on="task")
    return routes


def _routes(path: Path) -> pd.DataFrame:
    # A task may be called 007, its kind NA, or nothing.
    return read_table(path, words=True, kinds=str, columns=["task"]).fillna("")


def _stage_arms(results: Path, stage: str) -> Iterator[Arm]:
    """Yield the arms that a stage has left: its adapters, and its lines of guidance."""
    path = results / stage / "index.json"
    for name, row in read_index(path).items() if path.exists() else ():
        guidance = tuple(row.guidance)
        if not row.path:
            yield Arm(name, stage, guidance=guidance)
            continue
        yield Arm(name, stage, require_trained(Adapter(row.path, row.digest), stage), guidance)


def _limited_to_routes(arm: Arm, routes: pd.DataFrame, alternatives: bool) -> Arm:
    """Limit the arm of a control, and without alternatives that of a capability, to the tasks that are routed to it."""
    limited = partial_stages(alternatives)
    return replace(arm, tasks=routed_tasks(arm.name, routes)) if arm.stage in limited and arm.name != arm.stage else arm


def routed_tasks(name: str, routes: pd.DataFrame) -> frozenset[str]:
    """Collect the tasks that any of the routers gives to an arm."""
    is_routed = routes.drop(columns=["task", "kind"]).eq(name).any(axis=1)
    return frozenset(routes["task"][is_routed])


def _adapter(weights: Mapping[str, float], arms_by_name: dict[str, Arm]) -> Adapter:
    members = {name: adapter for name in weights if (adapter := arms_by_name[name].adapter) is not None}
    return compose(members, weights, COMPOSITIONS)


def adapter_of_route(root: Path, route: str) -> Path | None:
    """Return the folder of the adapter that acts on a route, a composition's made if it is not there; None: the base.

    Raises:
        UserError: an adapter is missing or damaged.
    """
    if route == BASE:
        return None
    stage = root / "results/adapters/index.json"
    weights, index = parse_composition(route), read_index(stage)
    members = {name: Adapter(str(root / index[name].path), index[name].digest) for name in weights}
    for member in members.values():
        require_trained(member, "adapters")
    return Path(compose(members, weights, root / COMPOSITIONS).folder)


def composition_arms(results: Path, arms_by_name: dict[str, Arm], routes: pd.DataFrame) -> Iterator[Arm]:
    """Yield every composition that some task is routed to, as one adapter."""
    paths = [results / stage / "compositions.json" for stage in ("routes", "controls")]
    compositions = {
        name: weights
        for path in paths
        if path.exists()
        for name, weights in read_json(path, dict[str, dict[str, float]]).items()
    }
    for name, weights in compositions.items():
        yield Arm(name, "compositions", _adapter(weights, arms_by_name), tasks=routed_tasks(name, routes))


def _place(rollout: Rollout) -> tuple[str, str]:
    return rollout.task.id, str(rollout.task.data.get("kind", ""))


def _floor(rollouts: Sequence[Rollout], target: CheckedEnvironment) -> list[tuple[object, ...]]:
    """Tabulate outcomes of doing nothing on the tasks and trials of these rollouts."""
    scores = floor_scores(target, [*{r.task.id: r.task for r in rollouts}.values()])
    rows = []
    for rollout in rollouts:
        score = scores[rollout.task.id]
        outcome = "error" if score is None else "passed" if score.success else "failed"
        rows.append((*_place(rollout), "idle", "", rollout.trial, outcome, None if score is None else score.reward))
    return rows


def play_batch(batch: ArmBatch) -> list[tuple[Arm, list[Rollout]]]:
    """Play all trials of each arm on its tasks of the test split; an arm without tasks is left out."""
    spec = batch.spec
    target = load_benchmark(spec.benchmark, spec.machine)
    tasks = evaluation_tasks(target, spec.evaluation)
    arm_rollouts, policies = [], dict[tuple[str, ...], Policy]()
    for arm in batch.arms:
        arm_tasks = [task for task in tasks if arm.tasks is None or task.id in arm.tasks]
        if arm_tasks:
            if arm.guidance not in policies:
                component = guided(spec.policy, arm.guidance)
                policies[arm.guidance] = load_policy(component, batch.base, spec.machine, batch=spec.machine.batch)
            rollouts = collect(
                policies[arm.guidance],
                target,
                arm_tasks,
                purpose="evaluation",
                seed=spec.seed,
                trials=spec.evaluation.trials,
                adapter=arm.adapter,
                retries=spec.rollouts.retries,
                quiet=True,
            )
            arm_rollouts.append((arm, rollouts))
    return arm_rollouts


def guided(policy: Component, lines: Sequence[str]) -> Component:
    """Add further lines of guidance to a policy."""
    if not lines:
        return policy
    return policy.model_copy(update={"guidance": [*policy.settings().get("guidance", []), *lines]})
