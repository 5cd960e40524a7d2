"""Controls: TRACE with other capabilities and otherwise the same settings.

- `random` draws the capabilities.
- `failures` ranks them by coverage, that is by failed rollouts without the contrast to passed ones.
- `lowest` takes those with the smallest gap.

Each control has as many capabilities as TRACE has adapters. It goes down its ranking and skips capabilities without an
environment. It reuses TRACE's adapters; other capabilities get an environment, the same calibration, an adapter of the
same budget and the same router. Passports of controls have all checks, but no bounds on the base's rewards: the base
may be good at a rejected capability, and a control should show that.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import pandas as pd

from captrain.agents import PolicySource
from captrain.benchmarks import evaluation_tasks, load_benchmark
from captrain.capabilities import SelectionAccount, read_selection
from captrain.comparison.baselines.baseline import TRACE_ROUTES
from captrain.contract import CheckedEnvironment, Policy
from captrain.environments import (
    NoTemplate,
    Standard,
    SynthesisResult,
    Synthesizer,
    load_environment,
    make_brief,
    make_standard,
    publish_environments,
    read_passports,
    synthesize,
)
from captrain.ledger import LedgerEntry
from captrain.records import (
    Capability,
    Passport,
    Rollout,
    Task,
    load,
    publish_json,
    publish_text,
    read_index,
    read_table,
    read_text,
)
from captrain.routing import (
    AskedModel,
    Router,
    RoutingEvidence,
    adapter_gains,
    composition_weights,
    openings,
    routable,
)
from captrain.run import Component, Machine, Spec, build, launch
from captrain.training import LIBRARIES, Trained, capability_jobs, publish_adapters, train

STAGE = "controls"
NAMES = ("random", "failures", "lowest")


def rankings(report: SelectionAccount, seed: int) -> dict[str, list[str]]:
    """Rank all candidates for each control. Ties are in order of ids, undefined numbers come last.

    Args:
        report: of `captrain.capabilities.selection.select`.
        seed: seed of the run; decides the random ranking.
    """
    rows = {row["id"]: row for row in report["candidates"]}
    shuffled = sorted(rows)
    random.Random(f"controls-{seed}").shuffle(shuffled)

    def by(key: str, sign: int) -> list[str]:
        return sorted(rows, key=lambda name: (rows[name][key] is None, sign * (rows[name][key] or 0.0), name))

    return dict(zip(NAMES, (shuffled, by("coverage", -1), by("gap", 1)), strict=True))


def choices(report: SelectionAccount, candidates: Callable[[str], bool], count: int, seed: int) -> dict[str, list[str]]:
    """Choose the capabilities of each control.

    They are in the order of TRACE's ranking, so equal choices are routed equally.

    Args:
        report: of `captrain.capabilities.selection.select`.
        candidates: returns whether a capability has an environment; called only as often as needed.
        count: of capabilities: the number of TRACE's adapters.
        seed: seed of the run.
    """
    place = {row["id"]: rank for rank, row in enumerate(report["candidates"])}
    return {
        control: sorted(islice(filter(candidates, ranking), count), key=place.__getitem__)
        for control, ranking in rankings(report, seed).items()
    }


@dataclass(frozen=True)
class Workshop:
    """Environments for capabilities without an adapter of TRACE, synthesized on first demand.

    Args:
        trained: capabilities with an adapter of TRACE.
        pool: all candidates, by id.
        rollouts: rollouts of the diagnosis.
        synthesizer: writes the environments.
        policy: the base.
        against: the target, its test tasks and the bounds. The bounds on the base's rewards are lifted.
        machine: sets the sandbox for text of other synthesizers.
        seed: seed of the run.
        benchmark: the target's component, from which environments may be derived.
        syntheses: results so far.
        lacking: capabilities without an environment, and why.
    """

    trained: Collection[str]
    pool: Mapping[str, Capability]
    rollouts: Sequence[Rollout]
    synthesizer: Synthesizer
    policy: PolicySource | Policy
    against: Standard
    machine: Machine
    seed: int
    benchmark: Component | None = None
    syntheses: dict[str, SynthesisResult] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Return whether the capability has an environment. The first call synthesizes it.

        Raises:
            UserError: the synthesizer cannot be asked, or the sandbox is weaker than the setting demands.
        """
        if name not in self.trained and name not in self.syntheses and name not in self.lacking:
            brief = make_brief(self.pool[name], self.against.tools, self.rollouts, self.benchmark)
            unbounded = {"mean_reward": (0.0, 1.0), "success": (0.0, 1.0), "constant_groups": 1.0}
            against = replace(self.against, bounds=self.against.bounds.model_copy(update=unbounded))
            try:
                result = synthesize(brief, self.synthesizer, self.policy, against, self.machine, self.seed)
                self.syntheses[name] = result
                if not result.passed:
                    self.lacking[name] = result.best.passport.complaints()
            except NoTemplate as lack:
                self.lacking[name] = lack.problem
        return name not in self.lacking

    @property
    def ledger(self) -> list[LedgerEntry]:
        """The calibration rollouts, charged to the controls."""
        entries = [entry for name in sorted(self.syntheses) for entry in self.syntheses[name].ledger]
        return [entry.model_copy(update={"stage": STAGE, "method": STAGE}) for entry in entries]


def run_controls(spec: Spec, base: Path, results: Path, artifacts: Path) -> list[str]:
    """Choose capabilities, make the missing environments and adapters, route, and publish.

    Args:
        spec: the whole specification.
        base: folder of the base model.
        results: folder of TRACE's results; controls are written to its folder `controls`.
        artifacts: folder of TRACE's rollouts; likewise.

    Returns:
        Lines to print: skipped candidates and why, or why there are no controls.

    Raises:
        UserError: an output of an earlier stage is missing, or the synthesizer cannot be asked.
    """
    folder, index = results / STAGE, read_index(results / "adapters/index.json")
    passports = {name: passport for name, passport in read_passports(results / "environments").items() if name in index}
    if not passports:
        publish_controls({}, [], [], folder)
        return ["no controls: TRACE has no adapter of a single capability"]
    benchmark = load_benchmark(spec.benchmark, spec.machine)
    rollouts = load(artifacts / "rollouts/discovery.jsonl", Rollout)
    workshop = Workshop(
        passports,
        {candidate.id: candidate for candidate in load(results / "labels/candidates.jsonl", Capability)},
        rollouts,
        build(spec.synthesizer, Synthesizer, access=spec.machine.asking),
        PolicySource(spec.exploring(), base, spec.machine),
        make_standard(benchmark, spec.evaluation.tasks, spec.environments),
        spec.machine,
        spec.seed,
        spec.benchmark,
    )
    report = read_selection(results)
    selections = choices(report, workshop.has, len(passports), spec.seed)
    syntheses = [workshop.syntheses[name] for name in sorted(workshop.syntheses)]
    publish_environments(syntheses, folder, artifacts / STAGE, required=False)
    further = {result.capability.id: result.best.passport for result in syntheses if result.passed}
    jobs = [job for job in capability_jobs(spec, base, folder) if job.name in further]
    publish_controls(selections, workshop.ledger, launch.run(train, jobs, spec.machine, STAGE, LIBRARIES), folder)
    places = {name: (results / "environments", passport) for name, passport in passports.items()}
    places |= {name: (folder, passport) for name, passport in further.items()}
    evidence = _routing_evidence(report, places, results, artifacts, rollouts, spec.machine)
    history = pd.concat([read_table(results / stage / "history.csv") for stage in ("adapters", STAGE)])
    gains = adapter_gains([*evidence.targets], evidence.calibration, history)
    tasks = evaluation_tasks(benchmark, spec.evaluation)
    publish_routes(
        control_routes(spec.router, AskedModel.of(spec, base), evidence, gains, selections, benchmark, tasks),
        gains,
        folder,
    )
    # Controls act with TRACE's adapters, too, on tasks that TRACE does not play with them.
    for name in ("index.json", "routes.csv", "compositions.json"):
        publish_text(folder / TRACE_ROUTES / name, read_text(results / "routes" / name))
    return [f"no control takes {name}: {reason}" for name, reason in workshop.lacking.items()]


def _routing_evidence(
    report: SelectionAccount,
    places: Mapping[str, tuple[Path, Passport]],
    results: Path,
    artifacts: Path,
    rollouts: Sequence[Rollout],
    machine: Machine,
) -> RoutingEvidence:
    """Gather the routers' evidence on all adapters of TRACE and the controls, in the order of TRACE's ranking."""
    ranked = [row["id"] for row in report["candidates"] if row["id"] in places]
    targets = {name: load_environment(*places[name], machine) for name in ranked}
    pairs = read_passports(results / "pairs")
    calibration = [
        rollout
        for stage in ("environments", STAGE)
        for rollout in load(artifacts / stage / "calibration.jsonl", Rollout)
    ]
    return RoutingEvidence(
        targets=targets,
        pairs={name: load_environment(results / "pairs", passport, machine) for name, passport in pairs.items()},
        calibration={
            name: [rollout for rollout in calibration if rollout.environment == targets[name].name] for name in ranked
        },
        rollouts=rollouts,
    )


def publish_controls(
    selections: Mapping[str, Sequence[str]],
    calibration: Sequence[LedgerEntry],
    trained: Sequence[Trained],
    folder: Path,
) -> None:
    """Write the new adapters, the ledger of calibration and training, and the choices."""
    publish_adapters(trained, STAGE, STAGE, calibration=calibration)
    publish_json(folder / "choices.json", selections)


def control_routes(
    component: Component,
    model: AskedModel,
    evidence: RoutingEvidence,
    gains: pd.DataFrame,
    selections: Mapping[str, Sequence[str]],
    benchmark: CheckedEnvironment,
    tasks: Sequence[Task],
) -> pd.DataFrame:
    """Route every task to one of each control's capabilities, with TRACE's router.

    Args:
        component: the router.
        model: the base.
        evidence: on all adapters.
        gains: of the adapters (see `captrain.routing.gains.adapter_gains`).
        selections: control -> its capabilities.
        benchmark: the benchmark that the tasks belong to.
        tasks: to route.

    Returns:
        task, and one column "control:<name>" of arms per control; one row per task.
    """
    router = build(component, Router, model=model)
    texts = openings(benchmark, tasks)
    table = pd.DataFrame({"task": [task.id for task in tasks]})
    for control, names in selections.items():
        limited = evidence.limited_to([name for name in routable(gains, router.gate) if name in names])
        table[f"control:{control}"] = router.route(limited.examples(router), texts)
    return table


def publish_routes(table: pd.DataFrame, gains: pd.DataFrame, folder: Path) -> None:
    """Write routes.csv, compositions.json and gains.csv, in the form of `captrain.routing.routes`."""
    publish_text(folder / "routes.csv", table.to_csv(index=False))
    publish_json(
        folder / "compositions.json", composition_weights(map(str, table.drop(columns="task").to_numpy().ravel()))
    )
    publish_text(folder / "gains.csv", gains.to_csv(index=False, float_format="%.6f"))
