"""Arms of the evaluation: the base and everything that the stages trained, on the same test tasks.

An arm acts with the base, an adapter or lines of guidance. A composition of adapters acts only on tasks routed to it.
All arms play with the same randomness, so comparisons are paired. Every router and every bound is computed from one
table of outcomes, without further rollouts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from captrain.agents import LIBRARIES, check_ranks, collect, floor_scores, load_policy
from captrain.benchmarks import evaluation_tasks, load_benchmark
from captrain.comparison.baselines.registry import acting_stages
from captrain.comparison.rows import BASE, IDLE, partial_stages
from captrain.contract import CheckedEnvironment, Policy
from captrain.ledger import LedgerEntry, ledger_entry
from captrain.models import Adapter, compose, parse_composition, require_trained
from captrain.records import Rollout, read_index, read_json, read_table
from captrain.run import Component, Spec, launch, takes

COMPOSITIONS = Path(".cache/compositions")
COMPOSITION_BATCHES = 4
"""Compositions are many and act on few tasks each, so they are played in this many batches."""
OUTCOME_COLUMNS = ["task", "kind", "arm", "stage", "trial", "outcome", "reward"]


@dataclass(frozen=True)
class Arm:
    """Player of an evaluation.

    Args:
        name: of the arm.
        stage: that trained it; "" for the base.
        adapter: None for the base model alone.
        guidance: lines at the end of the system prompt.
        tasks: ids of the tasks it plays; None for all.
    """

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
    """Arms that one process plays."""

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
        All rollouts; a table of `OUTCOME_COLUMNS` with one row per rollout and rows of the arm "idle", which does
        nothing and costs no rollouts; ledger entries.

    Raises:
        UserError: an adapter is missing or differs from its index, or the servers take no adapter of its rank.
    """
    routes = all_routes(results, spec.evaluation.alternatives)
    stage_arms = [arm for stage in acting_stages() for arm in _stage_arms(results, stage)]
    limited = [_limited_to_routes(arm, routes, spec.evaluation.alternatives) for arm in stage_arms]
    whole = [Arm(BASE), *limited]
    compositions = list(composition_arms(results, {arm.name: arm for arm in stage_arms}, routes))
    parts = [tuple(compositions[offset::COMPOSITION_BATCHES]) for offset in range(COMPOSITION_BATCHES)]
    if takes(spec.policy, "machine"):
        acting = [Path(arm.adapter.folder) for arm in (*whole, *compositions) if arm.adapter is not None]
        check_ranks(acting, spec.machine.vllm)
    batches = [ArmBatch(arms, base, spec) for arms in [*((arm,) for arm in whole), *filter(None, parts)]]
    played = launch.run(play_batch, batches, spec.machine, "evaluation", LIBRARIES)
    arm_rollouts = [pair for pairs in played for pair in pairs]
    rows = _floor(arm_rollouts[0][1], load_benchmark(spec.benchmark, spec.machine)) + [
        (*_place(play), arm.name, arm.stage, play.trial, play.outcome, play.score.reward if play.score else None)
        for arm, rollouts in arm_rollouts
        for play in rollouts
    ]
    ledger = [
        ledger_entry(rollouts, stage="evaluation", method="evaluation", item=arm.name) for arm, rollouts in arm_rollouts
    ]
    rollouts = [rollout for _, part in arm_rollouts for rollout in part]
    return rollouts, pd.DataFrame(rows, columns=OUTCOME_COLUMNS), ledger


def all_routes(results: Path, alternatives: bool = True) -> pd.DataFrame:
    """Join the routes of all stages.

    Returns:
        task, kind, and one column of arms per router, per control and for the row `solutions`. Without alternatives,
        routers beside the configured one are left out.
    """
    routes = _routes(results / "routes/routes.csv")
    if not alternatives:
        routes = routes.filter(regex="^(task|kind|chosen|control:.*)$")
    for stage in ("solutions", "controls"):
        path = results / stage / "routes.csv"
        if path.exists():
            further = _routes(path)
            routes = routes.merge(further, on="task") if len(further.columns) > 1 else routes
    return routes


def _routes(path: Path) -> pd.DataFrame:
    # Read as words, because a task may be called 007 and its kind NA.
    return read_table(path, words=True, kinds=str, columns=["task"]).fillna("")


def _stage_arms(results: Path, stage: str) -> Iterator[Arm]:
    """Yield the arms of a stage: its adapters and its lines of guidance."""
    path = results / stage / "index.json"
    if not path.exists():
        return
    for name, row in read_index(path).items():
        adapter = require_trained(Adapter(row.path, row.digest), stage) if row.path else None
        yield Arm(name, stage, adapter, tuple(row.guidance))


def _limited_to_routes(arm: Arm, routes: pd.DataFrame, alternatives: bool) -> Arm:
    """Limit an arm that plays only routed tasks to these (see `partial_stages`)."""
    limited = partial_stages(alternatives)
    return replace(arm, tasks=routed_tasks(arm.name, routes)) if arm.stage in limited and arm.name != arm.stage else arm


def routed_tasks(name: str, routes: pd.DataFrame) -> frozenset[str]:
    """Collect the tasks that any router routes to an arm."""
    is_routed = routes.drop(columns=["task", "kind"]).eq(name).any(axis=1)
    return frozenset(routes["task"][is_routed])


def adapter_of_route(root: Path, route: str) -> Path | None:
    """Return the folder of a route's adapter, and make a composition on first use; None for the base.

    Raises:
        UserError: an adapter is missing or damaged.
    """
    if route == BASE:
        return None
    weights, index = parse_composition(route), read_index(root / "results/adapters/index.json")
    members = {name: Adapter(str(root / index[name].path), index[name].digest) for name in weights}
    for member in members.values():
        require_trained(member, "adapters")
    return Path(compose(members, weights, root / COMPOSITIONS).folder)


def composition_arms(results: Path, arms_by_name: Mapping[str, Arm], routes: pd.DataFrame) -> Iterator[Arm]:
    """Yield every composition that a task is routed to, as one adapter."""
    compositions: dict[str, dict[str, float]] = {}
    for path in (results / stage / "compositions.json" for stage in ("routes", "controls")):
        if path.exists():
            compositions |= read_json(path, dict[str, dict[str, float]])
    for name, weights in compositions.items():
        members = {member: adapter for member in weights if (adapter := arms_by_name[member].adapter) is not None}
        composed = compose(members, weights, COMPOSITIONS)
        yield Arm(name, "compositions", composed, tasks=routed_tasks(name, routes))


def _place(rollout: Rollout) -> tuple[str, str]:
    return rollout.task.id, str(rollout.task.data.get("kind", ""))


def _floor(rollouts: Sequence[Rollout], target: CheckedEnvironment) -> list[tuple[object, ...]]:
    """Return rows of doing nothing, on the tasks and trials of these rollouts."""
    scores = floor_scores(target, [*{r.task.id: r.task for r in rollouts}.values()])
    rows = []
    for rollout in rollouts:
        score = scores[rollout.task.id]
        outcome = "error" if score is None else "passed" if score.success else "failed"
        rows.append((*_place(rollout), IDLE, "", rollout.trial, outcome, None if score is None else score.reward))
    return rows


def play_batch(batch: ArmBatch) -> list[tuple[Arm, list[Rollout]]]:
    """Play all trials of each arm on its tasks; arms without tasks are left out."""
    spec = batch.spec
    target = load_benchmark(spec.benchmark, spec.machine)
    tasks = evaluation_tasks(target, spec.evaluation)
    arm_rollouts, policies = [], dict[tuple[str, ...], Policy]()
    for arm in batch.arms:
        arm_tasks = [task for task in tasks if arm.tasks is None or task.id in arm.tasks]
        if not arm_tasks:
            continue
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
    """Return the policy with further lines of guidance."""
    if not lines:
        return policy
    return policy.model_copy(update={"guidance": [*policy.settings().get("guidance", []), *lines]})
