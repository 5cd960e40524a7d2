"""Rows `mixture` and `solutions_mixture`: trained gates over TRACE's adapters, instead of a router.

The paper's revised abstract uses a mixture of experts over the capability adapters. Version 1 uses a router. The gates
are trained in two steps:

1. Supervised, on prompts. The prompts of an environment should open its adapter, those of a pair two adapters, and
   those of tasks that the base passed in the diagnosis none. This costs no rollouts (`captrain.training.gate_lessons`).
2. GRPO on training tasks of the target.

Both rows spend the same total of rollouts as TRACE. `mixture` trains its own adapters with fewer rollouts: the gates
get the share `share` of the training rollouts. `solutions_mixture` uses the specialists of the row `solutions`, and
spends the rollouts that this row has left. With `controls`, the same adapters are also evaluated with equal gates, with
random gates, and with gates that were trained by only one of the two steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from captrain.benchmarks import load_benchmark
from captrain.comparison.baselines.baseline import (
    CALIBRATION,
    DIAGNOSIS,
    SOLUTIONS_ADAPTER,
    TRACE_STAGES,
    Baseline,
    specialist_name,
    trace_ledger,
)
from captrain.errors import UserError
from captrain.ledger import LedgerEntry, budget
from captrain.models import Adapter, MixtureParts
from captrain.records import Rollout, counted, load, publish_text, read_index
from captrain.run import GateSettings, MixtureSettings, Spec, launch
from captrain.training import (
    LIBRARIES,
    GateJob,
    GateLesson,
    Prompts,
    Trained,
    TrainingEnvironment,
    capability_jobs,
    derived_trainer,
    opened_gates,
    publish_adapters,
    teach_gates,
    train,
    training_environments,
    untrained_gates,
)

UNIFORM, RANDOM, SUPERVISED, GRPO = VARIANTS = ("uniform", "random", "supervised", "grpo")
GATE_COLUMNS = ["mixture", "place", "prompts", "layer", "adapter", "weight"]
"""Columns of gates.csv. A row is the mean weight of an adapter or the base, in one layer, over the prompts of a place.

A place is a training environment, or a kind of task of the target.
"""
PROMPTS = 50
"""Training tasks per environment whose gate weights are averaged for gates.csv."""
DISCOVERY = Path("artifacts/rollouts/discovery.jsonl")
TARGET_PROMPTS = 400
"""Training tasks of the target whose gate weights are averaged, by kind of task, for gates.csv."""


@dataclass(frozen=True, kw_only=True)
class MixtureBaseline(Baseline):
    """A row of gates over adapters.

    Args:
        from_solutions: whether the adapters are the specialists of the row `solutions`.
    """

    from_solutions: bool = False
    on_target: bool = True
    trains_by_grpo: bool = True
    variants: tuple[str, ...] = VARIANTS

    def target_share(self, spec: Spec) -> float:
        """See `Baseline.target_share`."""
        section = self.section(spec)
        return section.share if isinstance(section, MixtureSettings) else 1.0

    def arms(self, spec: Spec, capabilities: int) -> int:
        """See `Baseline.arms`. The row has one arm, and one more for each control."""
        return 1 + len(self.variants) * self.section(spec).controls

    def compute(self, spec: Spec) -> str:
        """See `Baseline.compute`."""
        project, section = Path(), self.section(spec)
        self.publish_nothing()
        adapters = self.specialists(project) if self.from_solutions else self.trained_adapters(spec, project)
        if not adapters:
            return "there are no adapters"
        parts = MixtureParts(
            {adapter.name: Adapter(str(adapter.folder), adapter.digest) for adapter in adapters},
            section.scope,
            section.decide,
            section.activation,
        )
        entries = [entry for a in adapters if (entry := a.ledger(self.name, self.name)).rollouts]
        rollouts = self.rollouts_left(project) - sum(entry.rollouts for entry in entries)
        mixtures = self.train_gates(spec, project, parts, rollouts)
        publish_adapters(mixtures, self.name, self.name, calibration=entries)
        gates = [row for mixture in mixtures for row in self.gate_rows(spec, project, mixture)]
        table = pd.DataFrame(gates, columns=GATE_COLUMNS)
        publish_text(Path("results", self.name, "gates.csv"), table.to_csv(index=False, float_format="%.6f"))
        return f"{counted(len(adapters), 'adapter')}, {counted(rollouts, 'rollout')} for the gates"

    def publish_nothing(self) -> None:
        """See `Baseline.publish_nothing`."""
        publish_adapters([], self.name, self.name)
        publish_text(Path("results", self.name, "gates.csv"), ",".join(GATE_COLUMNS) + "\n")

    def trained_adapters(self, spec: Spec, project: Path) -> list[Trained]:
        """Train TRACE's adapters with the rollouts that are not reserved for the gates."""
        rollouts = round(spec.adapters.rollouts * (1 - spec.baselines.mixture.share))
        jobs = capability_jobs(spec, project / "artifacts/base", project / "results/environments")
        return launch.run(
            train, [replace(job, rollouts=rollouts, points=0) for job in jobs], spec.machine, self.name, LIBRARIES
        )

    def specialists(self, project: Path) -> list[Trained]:
        """Return the specialists of the row `solutions`. They are already trained."""
        index = read_index(project / f"results/{SOLUTIONS_ADAPTER}/index.json")
        beginning = specialist_name("")
        return [
            Trained(name.removeprefix(beginning), entry.digest, project / entry.path)
            for name, entry in index.items()
            if name.startswith(beginning)
        ]

    def rollouts_left(self, project: Path) -> int:
        """Return TRACE's total minus the rollouts that this row is already charged for."""
        trace = trace_ledger(project / "results")
        further = [stage for stage in self.rests_on if stage not in TRACE_STAGES]
        entries = [e for stage in further for e in load(project / f"results/{stage}/ledger.jsonl", LedgerEntry)]
        charges = [entry for entry in (*trace, *entries) if entry.stage in self.rests_on]
        return budget(trace) - sum(entry.rollouts for entry in charges)

    def train_gates(self, spec: Spec, project: Path, parts: MixtureParts, rollouts: int) -> list[Trained]:
        """Train the row's gates and, with `controls`, the gates of its variants.

        Raises:
            UserError: no rollouts are left for the gates.
        """
        section: GateSettings = self.section(spec)
        if rollouts < 1:
            raise UserError(f"baselines.{self.name}: no rollout is left for the gates", "raise adapters.rollouts")
        base = project / "artifacts/base"
        job = GateJob(
            name=self.name,
            base=base,
            policy=spec.exploring(),
            trainer=derived_trainer(spec.trainer, **section.differences()),
            environments=(TrainingEnvironment("target", spec.benchmark),),
            rollouts=rollouts,
            seed=spec.seed,
            machine=spec.machine,
            parts=parts,
        )
        taught = list[Trained]()
        if section.start:
            lesson = GateLesson(
                name=f"{self.name}:{SUPERVISED}",
                row=self.name,
                spec=spec,
                base=base,
                parts=parts,
                tasks=section.start,
                environments=teachers(project),
                passed=tuple(r.task for r in load(project / DISCOVERY, Rollout) if r.outcome == "passed"),
            )
            taught = launch.run(teach_gates, [lesson], spec.machine, self.name, LIBRARIES)
        start = Adapter(str(taught[0].folder), taught[0].digest) if taught else None
        jobs = [replace(job, start=start)]
        if section.controls and start:
            jobs.append(replace(job, name=f"{self.name}:{GRPO}"))
        trained = launch.run(train, jobs, spec.machine, self.name, LIBRARIES)
        if not section.controls:
            return trained
        blank = [untrained_gates(f"{self.name}:{UNIFORM}", base, spec, parts, None)]
        blank.append(untrained_gates(f"{self.name}:{RANDOM}", base, spec, parts, spec.seed))
        return [*trained, *taught, *blank]

    def gate_rows(self, spec: Spec, project: Path, mixture: Trained) -> Iterator[tuple[object, ...]]:
        """Yield the rows of gates.csv, for the training environments and for each kind of task of the target."""
        places = dict[str, Prompts]()
        for environment in teachers(project):
            target = environment.target(spec.machine)
            tasks = target.tasks("training", environment.skip + PROMPTS, fewer=True)[environment.skip :]
            places[environment.name] = Prompts(target, tasks)
        benchmark = load_benchmark(spec.benchmark, spec.machine)
        for task in benchmark.tasks("training", TARGET_PROMPTS, fewer=True):
            kind = f"target: {task.data.get('kind', 'all')}"
            places.setdefault(kind, Prompts(benchmark, [])).tasks.append(task)
        base = project / "artifacts/base"
        for place, decisions in opened_gates(spec, base, Path(mixture.folder), places).items():
            for layer, weights in enumerate(decisions.weights):
                for adapter, weight in zip(decisions.slots, weights, strict=True):
                    yield mixture.name, place, decisions.prompts, layer, adapter, weight


def teachers(project: Path) -> tuple[TrainingEnvironment, ...]:
    """List the environments whose prompts train the gates: the single and the pair environments."""
    return tuple(
        training_environments(project / "results/environments") + training_environments(project / "results/pairs")
    )


MIXTURE = MixtureBaseline(
    name="mixture",
    label="TRACE, mixture",
    order=7,
    rests_on=(DIAGNOSIS, CALIBRATION),
    compared_with=("grpo_target", "rejection_sft"),
)
"""Gates over adapters that were trained on rewards."""
SOLUTIONS_MIXTURE = MixtureBaseline(
    name="solutions_mixture",
    label="TRACE, solutions, mixture",
    order=8,
    rests_on=(DIAGNOSIS, CALIBRATION, "solutions"),
    compared_with=("grpo_target", "rejection_sft", "solutions", "mixture"),
    learns_from="demonstrations and rewards",
    from_solutions=True,
)
"""Gates over the specialists of the row `solutions`."""
