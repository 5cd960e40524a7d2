"""Rows that train one adapter by GRPO, with TRACE's trainer and TRACE's total of rollouts.

Each row is one entry. Rows differ in where they train, which adapter they start from, and which stages they are charged
for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from captrain.comparison.baselines.baseline import CALIBRATION, DIAGNOSIS, TRACE_STAGES, Baseline, trace_ledger
from captrain.comparison.baselines.untargeted import untargeted_environments
from captrain.errors import UserError
from captrain.ledger import LedgerEntry, budget
from captrain.models import Adapter
from captrain.records import Capability, JsonObject, counted, load, read_index
from captrain.run import GrpoSettings, Spec, launch, repro
from captrain.training import (
    LIBRARIES,
    Job,
    TrainingEnvironment,
    derived_trainer,
    publish_adapters,
    train,
    training_environments,
)


@dataclass(frozen=True, kw_only=True)
class GRPOBaseline(Baseline):
    """A row that trains one adapter with rewards.

    Args:
        environments: returns the training environments, from the specification and the project's folder. None: the
            target itself.
        continues: the row whose adapter it starts from; "" for a new adapter.
        curve: its checkpoints are evaluated, too (`curve.points`).
    """

    environments: Callable[[Spec, Path], Sequence[TrainingEnvironment]] | None = None
    continues: str = ""
    curve: bool = False
    trains_by_grpo: bool = True

    def jobs(self, spec: Spec, project: Path, trace: Sequence[LedgerEntry]) -> list[Job]:
        """Make the one job; none without environments, or without the adapter to start from.

        After errors on TRACE's side the last step may be smaller (see `captrain.training`).

        Args:
            spec: the whole specification.
            project: folder of artifacts/ and results/.
            trace: TRACE's ledger entries, which give the total.

        Raises:
            UserError: no rollouts are left to train with, or the stage of the continued row has not run.
        """
        environments: Sequence[TrainingEnvironment] = [TrainingEnvironment("target", spec.benchmark)]
        if self.environments is not None:
            environments = self.environments(spec, project)
        start = None
        if self.continues:
            path = project / f"results/{self.continues}/index.json"
            entry = read_index(path, f"run `{repro(self.continues, project)}` to make it").get(self.continues)
            start = Adapter(str(project / entry.path), entry.digest) if entry else None
        if not environments or (self.continues and start is None):
            return []
        further = [project / f"results/{stage}/ledger.jsonl" for stage in self.rests_on if stage not in TRACE_STAGES]
        entries = [*trace, *(entry for path in further for entry in load(path, LedgerEntry))]
        ranked = [environment.name for environment in environments]
        charges = [entry for entry in entries if entry.stage in self.rests_on and self.charged(entry, ranked)]
        rollouts = budget(trace) - sum(entry.rollouts for entry in charges)
        section = self.section(spec)
        settings = section.differences() if isinstance(section, GrpoSettings) else {}
        points = spec.curve.points if self.curve else 0
        return [baseline_job(self.name, spec, project, environments, rollouts, settings, start, points)]

    def compute(self, spec: Spec) -> str:
        """See `Baseline.compute`."""
        jobs = self.jobs(spec, Path(), trace_ledger())
        publish_adapters(launch.run(train, jobs, spec.machine, self.name, LIBRARIES), self.name, self.name)
        return counted(sum(job.rollouts for job in jobs), "rollout")

    def publish_nothing(self) -> None:
        """See `Baseline.publish_nothing`."""
        publish_adapters([], self.name, self.name)


def baseline_job(
    name: str,
    spec: Spec,
    project: Path,
    environments: Sequence[TrainingEnvironment],
    rollouts: int,
    settings: JsonObject | None = None,
    start: Adapter | None = None,
    points: int = 0,
) -> Job:
    """Make the job of one adapter by GRPO, with TRACE's trainer.

    Args:
        name: name of the row.
        spec: the whole specification.
        project: folder of artifacts/ and results/.
        environments: where to train.
        rollouts: left to train with.
        settings: settings of the trainer, if the row has its own.
        start: the adapter to start from; None for a new one.
        points: see `Job`.

    Raises:
        UserError: no rollouts are left.
    """
    if rollouts < 1:
        raise UserError(
            f"baselines.{name}: no rollouts are left to train with after diagnosis and calibration ({rollouts})",
            "raise adapters.rollouts",
        )
    return Job(
        name=name,
        base=project / "artifacts/base",
        policy=spec.exploring(),
        trainer=derived_trainer(spec.trainer, **(settings or {})),
        environments=tuple(environments),
        rollouts=rollouts,
        seed=spec.seed,
        machine=spec.machine,
        start=start,
        points=points,
    )


def first_environment(spec: Spec, project: Path) -> Sequence[TrainingEnvironment]:
    """Return the environment of the highest-ranked capability that has one, or none."""
    environments = {place.name: place for place in training_environments(project / "results/environments")}
    ranked = load(project / "results/capabilities/capabilities.jsonl", Capability)
    return [environments[capability.id] for capability in ranked if capability.id in environments][:1]


GRPO_TARGET = GRPOBaseline(name="grpo_target", label="GRPO on target", order=1, curve=True, on_target=True)
"""GRPO on the target itself, with TRACE's total.

A baseline is only as strong as its settings, so this row has its own, found by `scripts/tune_grpo.py`. The row
`grpo_untuned` has the trainer's settings.
"""
GRPO_UNTUNED = GRPOBaseline(
    name="grpo_untuned",
    label="GRPO on target, untuned",
    order=1,
    compared_with=("grpo_target",),
    on_target=True,
)
"""`grpo_target` with the settings of the section `trainer`. It shows what tuning `grpo_target` was worth."""
WARM_GRPO = GRPOBaseline(
    name="warm_grpo",
    label="ADP, then GRPO on target",
    order=3,
    continues="adp",
    compared_with=("grpo_target", "adp"),
    on_target=True,
    learns_from="demonstrations and rewards",
)
"""The adapter of the row `adp`, trained further by GRPO on the target: shows what untargeted demonstrations are worth
before rewards."""
AWM = GRPOBaseline(
    name="awm",
    label="AWM",
    order=4,
    environments=lambda spec, project: untargeted_environments(spec, spec.baselines.awm, project / "results/awm"),
)
"""GRPO in untargeted synthetic environments. It needs no diagnosis and no calibration, so it trains with TRACE's whole
total."""
SINGLE = GRPOBaseline(
    name="single",
    label="single capability",
    order=5,
    environments=first_environment,
    rests_on=(DIAGNOSIS, CALIBRATION),
    first_capability=True,
)
"""TRACE's whole budget on the first capability: shows what this capability alone is worth."""
MIXED = GRPOBaseline(
    name="mixed",
    label="mixed environments",
    order=6,
    environments=lambda spec, project: training_environments(project / "results/environments"),
    rests_on=(DIAGNOSIS, CALIBRATION),
)
"""One adapter over all of TRACE's environments: shows what one adapter per capability adds."""
SOLUTIONS_GRPO = GRPOBaseline(
    name="solutions_grpo",
    label="TRACE, solutions, then GRPO on target",
    order=8,
    continues="solutions",
    rests_on=(DIAGNOSIS, CALIBRATION, "solutions"),
    compared_with=("grpo_target", "rejection_sft", "solutions", "warm_grpo"),
    on_target=True,
    learns_from="demonstrations and rewards",
)
"""The adapter of the row `solutions`, trained further by GRPO on the target with the rest of TRACE's total. Beside
`solutions` it shows what reinforcement adds; beside `warm_grpo`, what targeting adds."""
