"""Arms of the evaluation: the base model and everything that the stages trained. They play the same test tasks.

An arm acts with the base, an adapter or lines of guidance. A composition of adapters acts only on tasks routed to it.
All arms play with the same randomness, so comparisons are paired. Every router and every bound is computed from one
table of outcomes, without further rollouts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from captrain.agents import LIBRARIES, SHARDS, check_ranks, collect, floor_scores, load_policy
from captrain.benchmarks import evaluation_tasks, load_benchmark
from captrain.comparison.baselines.baseline import SOLUTIONS_ADAPTER, TRACE_ROUTES
from captrain.comparison.baselines.registry import baselines
from captrain.comparison.rows import ADAPTERS, BASE, IDLE, TRACE, partial_stages
from captrain.contract import CheckedEnvironment, Policy
from captrain.errors import UserError
from captrain.models import Adapter, compose, parse_composition, require_trained
from captrain.records import Record, Rollout, read_index, read_json, read_table
from captrain.run import Component, Spec, alternatives, launch, takes

COMPOSITIONS = Path(".cache/compositions")
COMPOSITION_BATCHES = 4
"""Number of batches that all compositions are played in. There are many compositions with few tasks each."""
COMPOSED, CONTROLS = "compositions", "controls"
"""Stage of arms that are compositions of adapters, and stage of the controls (TRACE with other capabilities)."""


@dataclass(frozen=True)
class Arm:
    """One player of the evaluation.

    Args:
        name: name of the arm in outcomes and tables.
        stage: the stage that trained the arm; "" for the base.
        adapter: the adapter; None for the base model alone.
        guidance: lines added at the end of the system prompt.
        tasks: ids of the tasks that the arm plays; None for all.
    """

    name: str
    stage: str = ""
    adapter: Adapter | None = None
    guidance: tuple[str, ...] = ()
    tasks: frozenset[str] | None = None

    def identity(self) -> tuple[object, ...]:
        """Return the fields, other than the policy, that decide the arm's behaviour."""
        digest = self.adapter.digest if self.adapter else ""
        return digest, self.guidance, sorted(self.tasks or ())


class Outcome(Record):
    """Outcome of one rollout of the evaluation; `reward` is None if it was not scored."""

    task: str
    kind: str
    arm: str
    stage: str
    trial: int
    outcome: str
    reward: float | None


@dataclass(frozen=True)
class ArmBatch:
    """Arms that one process plays. It plays part `number` of the `parts` that their tasks are divided into."""

    arms: tuple[Arm, ...]
    base: Path
    spec: Spec
    number: int = 0
    parts: int = 1

    @property
    def name(self) -> str:
        """Name of the batch in `captrain jobs`."""
        arms = self.arms[0].name if len(self.arms) == 1 else f"{len(self.arms)} compositions"
        return arms if self.parts == 1 else f"{arms} {self.number + 1} of {self.parts}"

    def identity(self) -> tuple[object, ...]:
        """Return the fields that decide the batch's rollouts."""
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
            self.number,
            self.parts,
        )


def row_arms(spec: Spec, results: Path, row: str) -> list[Arm]:
    """List the arms that a row of the evaluation plays, compositions last (see `evaluation_rows`).

    Raises:
        UserError: an adapter is missing, or differs from its entry in the index.
    """
    if row == BASE:
        return [Arm(BASE)]
    alternatives = spec.evaluation.alternatives
    if row == TRACE:
        return _trace_arms(results / "routes", alternatives)
    arms, path = [*_arms_in(results / row, row)], results / row / "routes.csv"
    if row == CONTROLS and not path.exists():
        return []
    routes = _routes(path) if path.exists() else pd.DataFrame(columns=["task", "kind"])
    if row != CONTROLS:
        return [_limited_to_routes(arm, routes, alternatives) for arm in arms]
    # Controls also route tasks to TRACE's adapters. Tasks that such an arm plays for TRACE are not played again.
    trace = results / row / TRACE_ROUTES
    arms += _arms_in(trace, ADAPTERS)
    arms += composition_arms(results / row, {arm.name: arm for arm in arms}, routes)
    played, further = {arm.name: arm.tasks for arm in _trace_arms(trace, alternatives)}, list[Arm]()
    for arm in arms:
        tasks, before = routed_tasks(arm.name, routes), played.get(arm.name, frozenset())
        further.append(replace(arm, tasks=frozenset() if before is None else tasks - before))
    return [arm for arm in further if arm.tasks]


def _trace_arms(folder: Path, alternatives: bool) -> list[Arm]:
    """List TRACE's adapters, and the compositions of its routers, from the results of the stage `routes`."""
    arms, routes = [*_arms_in(folder, ADAPTERS)], _trace_routes(folder, alternatives)
    limited = [_limited_to_routes(arm, routes, alternatives) for arm in arms]
    return [*limited, *composition_arms(folder, {arm.name: arm for arm in arms}, routes)]


def play_arms(spec: Spec, base: Path, arms: Sequence[Arm]) -> list[tuple[Arm, list[Rollout]]]:
    """Play arms on their tasks. Arms without tasks are left out.

    Raises:
        UserError: the rank of an adapter is too large for the servers.
    """
    if takes(spec.policy, "machine"):
        check_ranks([Path(arm.adapter.folder) for arm in arms if arm.adapter is not None], spec.machine.vllm)
    whole = [arm for arm in arms if arm.stage != COMPOSED]
    compositions = [arm for arm in arms if arm.stage == COMPOSED]
    batches = [batch for arm in whole for batch in split_batch(ArmBatch((arm,), base, spec), len(whole))]
    parts = [tuple(compositions[offset::COMPOSITION_BATCHES]) for offset in range(COMPOSITION_BATCHES)]
    batches += [ArmBatch(part, base, spec) for part in parts if part]
    played: dict[str, tuple[Arm, list[Rollout]]] = {}
    for pairs in launch.run(play_batch, batches, spec.machine, "evaluation", LIBRARIES):
        for arm, rollouts in pairs:
            played.setdefault(arm.name, (arm, []))[1].extend(rollouts)
    return [*played.values()]


def split_batch(batch: ArmBatch, beside: int) -> list[ArmBatch]:
    """Split a batch by tasks if this machine can play more batches at once than there are (`beside`)."""
    machine = batch.spec.machine
    at_once = SHARDS if machine.launcher == "slurm" else 1 if machine.vllm.python else launch.cores(machine)
    parts = -(-at_once // max(1, beside))
    return [replace(batch, number=number, parts=parts) for number in range(parts)]


def outcomes_of(arm: Arm, rollouts: Sequence[Rollout]) -> list[Outcome]:
    """Return the outcome of each rollout of an arm."""
    return [
        Outcome(
            task=rollout.task.id,
            kind=_kind(rollout),
            arm=arm.name,
            stage=arm.stage,
            trial=rollout.trial,
            outcome=rollout.outcome,
            reward=rollout.score.reward if rollout.score else None,
        )
        for rollout in rollouts
    ]


def idle_outcomes(rollouts: Sequence[Rollout], target: CheckedEnvironment) -> list[Outcome]:
    """Return the outcomes of an idle agent on the tasks and trials of these rollouts. This costs no rollouts."""
    scores = floor_scores(target, [*{r.task.id: r.task for r in rollouts}.values()])
    outcomes = []
    for rollout in rollouts:
        score = scores[rollout.task.id]
        outcome = "error" if score is None else "passed" if score.success else "failed"
        place = {"task": rollout.task.id, "kind": _kind(rollout), "trial": rollout.trial}
        reward = None if score is None else score.reward
        outcomes.append(Outcome(**place, arm=IDLE, stage="", outcome=outcome, reward=reward))
    return outcomes


def _kind(rollout: Rollout) -> str:
    return str(rollout.task.data.get("kind", ""))


def all_routes(
    results: Path, alternatives: bool = True, stages: Sequence[str] = (SOLUTIONS_ADAPTER, CONTROLS)
) -> pd.DataFrame:
    """Join the routes of TRACE and of further stages.

    Returns:
        task, kind, and one column of arms per router, per control and for the row `solutions`. Without alternatives,
        routers beside the configured one are left out.
    """
    routes = _trace_routes(results / "routes", alternatives)
    for path in (results / stage / "routes.csv" for stage in stages):
        if path.exists():
            further = _routes(path)
            routes = routes.merge(further, on="task") if len(further.columns) > 1 else routes
    return routes


def _trace_routes(folder: Path, alternatives: bool) -> pd.DataFrame:
    """Read the routes of the stage `routes`."""
    routes = _routes(folder / "routes.csv")
    return routes if alternatives else routes.filter(regex="^(task|kind|chosen|control:.*)$")


def _routes(path: Path) -> pd.DataFrame:
    # Read as words, because a task may be called 007 and its kind NA.
    return read_table(path, words=True, kinds=str, columns=["task"]).fillna("")


def _arms_in(folder: Path, stage: str) -> Iterator[Arm]:
    """Yield the arms of a stage from the index in a folder: adapters and lines of guidance."""
    for name, row in read_index(folder / "index.json").items():
        adapter = require_trained(Adapter(row.path, row.digest), stage) if row.path else None
        yield Arm(name, stage, adapter, tuple(row.guidance))


def _limited_to_routes(arm: Arm, routes: pd.DataFrame, alternatives: bool) -> Arm:
    """Limit an arm to the tasks routed to it, if its stage is one of `partial_stages`."""
    limited = partial_stages(alternatives)
    return replace(arm, tasks=routed_tasks(arm.name, routes)) if arm.stage in limited and arm.name != arm.stage else arm


def routed_tasks(name: str, routes: pd.DataFrame) -> frozenset[str]:
    """Collect the tasks that any router routes to an arm."""
    is_routed = routes.drop(columns=["task", "kind"], errors="ignore").eq(name).any(axis=1)
    return frozenset(routes["task"][is_routed])


def adapter_of_route(root: Path, route: str) -> Path | None:
    """Return the folder of a route's adapter; None for the base. A composition is created on first use.

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


def adapter_of_row(root: Path, row: str) -> Path:
    """Return the folder of the adapter, or of the mixture, that plays all tasks of a row.

    Raises:
        UserError: there is no such row, this run has no adapter for it, or the adapter was altered.
    """
    if row not in baselines():
        raise UserError(f"no row {row} has one adapter", alternatives(row, [TRACE, *baselines()]))
    entry = read_index(root / f"results/{row}/index.json").get(row)
    if entry is None or not entry.path:
        raise UserError(
            f"this run has no single adapter for row {row}", f"run the pipeline with baselines.{row}.run=true"
        )
    adapter = Adapter(str(root / entry.path), entry.digest)
    return Path(require_trained(adapter, row).folder)


def composition_arms(folder: Path, arms_by_name: Mapping[str, Arm], routes: pd.DataFrame) -> Iterator[Arm]:
    """Yield the compositions in the results of a stage, each as one adapter, with the tasks that are routed to it."""
    path = folder / "compositions.json"
    compositions = read_json(path, dict[str, dict[str, float]]) if path.exists() else {}
    for name, weights in compositions.items():
        members = {member: adapter for member in weights if (adapter := arms_by_name[member].adapter) is not None}
        yield Arm(name, COMPOSED, compose(members, weights, COMPOSITIONS), tasks=routed_tasks(name, routes))


def play_batch(batch: ArmBatch) -> list[tuple[Arm, list[Rollout]]]:
    """Play all trials of each arm on the batch's part of the arm's tasks. Arms without tasks are left out."""
    spec = batch.spec
    target = load_benchmark(spec.benchmark, spec.machine)
    tasks = evaluation_tasks(target, spec.evaluation)
    arm_rollouts, policies = [], dict[tuple[str, ...], Policy]()
    for arm in batch.arms:
        arm_tasks = [task for task in tasks if arm.tasks is None or task.id in arm.tasks]
        size = -(-len(arm_tasks) // batch.parts)
        arm_tasks = arm_tasks[batch.number * size : (batch.number + 1) * size]
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
