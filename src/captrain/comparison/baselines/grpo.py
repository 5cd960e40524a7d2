"""Rows that train one adapter by GRPO, with TRACE's trainer and what TRACE's rollouts leave after what they rest on.

A row is an entry; what differs is where it trains, from which adapter it goes on, and what it is charged for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from captrain.comparison.baselines.baseline import CALIBRATION, DIAGNOSIS, TRACE_STAGES, Baseline, trace_ledger
from captrain.comparison.baselines.untargeted import untargeted_environments
from captrain.errors import UserError
from captrain.ledger import LedgerEntry, budget
from captrain.models import Adapter
from captrain.records import Capability, JsonObject, load, read_index
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
        environments: where it trains, from the specification and the folder of artifacts/ and results/; none where
            there is nothing to train in. By default the target itself.
        continues: the row whose adapter it trains on, which has learnt from demonstrations; "" for none.
        curve: whether its adapter is evaluated as it was on the way, too (`curve.points`).
    """

    environments: Callable[[Spec, Path], Sequence[TrainingEnvironment]] | None = None
    continues: str = ""
    curve: bool = False
    trains_by_grpo: bool = True

    def jobs(self, spec: Spec, project: Path, trace: Sequence[LedgerEntry]) -> list[Job]:
        """Make the one job; none without a place to train in, or without an adapter to go on from. After errors on
        TRACE's side its last step may be smaller (see `captrain.training`).

        Args:
            spec: the whole specification.
            project: folder of artifacts/ and results/.
            trace: every ledger entry on TRACE's side: diagnosis and calibration count as much as training.

        Raises:
            UserError: nothing is left to train with, or the stage of the row that it continues has not run.
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
        return f"{sum(job.rollouts for job in jobs)} rollouts"

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
    """Make the job of one adapter by GRPO as TRACE trains its own; only where, and how long, differs, and what the row
    says itself.

    Args:
        name: of the row.
        spec: the whole specification.
        project: folder of artifacts/ and results/.
        environments: where to train.
        rollouts: what is left to train with.
        settings: of the trainer, where the row has its own.
        start: the adapter that is trained on; None: a new one.
        points: see `Job`.

    Raises:
        UserError: nothing is left.
    """
    if rollouts < 1:
        raise UserError(
            f"baselines.{name}: after diagnosis and calibration {rollouts} rollouts are left to train with",
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
    """Find the environment of the first capability that has one; none where no capability has."""
    environments = {place.name: place for place in training_environments(project / "results/environments")}
    ranked = load(project / "results/capabilities/capabilities.jsonl", Capability)
    return [environments[capability.id] for capability in ranked if capability.id in environments][:1]


GRPO_TARGET = GRPOBaseline(name="grpo_target", label="GRPO on target", order=1, curve=True, on_target=True)
"""GRPO on the target itself, with as many rollouts as TRACE spends in all.

A baseline is as strong as its settings, so these are its own and not the adapters': `scripts/tune_grpo.py` has searched
them. What the trainer's settings give is the row `grpo_untuned`.
"""
GRPO_UNTUNED = GRPOBaseline(
    name="grpo_untuned",
    label="GRPO on target, untuned",
    order=1,
    compared_with=("grpo_target",),
    on_target=True,
)
"""The same with the trainer's settings: what the search for `grpo_target`'s was worth."""
WARM_GRPO = GRPOBaseline(
    name="warm_grpo",
    label="ADP, then GRPO on target",
    order=3,
    continues="adp",
    compared_with=("grpo_target", "adp"),
    on_target=True,
    learns_from="demonstrations and rewards",
)
"""The adapter of the row `adp`, fine-tuned on demonstrations that no diagnosis asked for, trained on by GRPO on the
target with TRACE's total: what demonstrations are worth before rewards when they are not targeted."""
AWM = GRPOBaseline(
    name="awm",
    label="AWM",
    order=4,
    environments=lambda spec, project: untargeted_environments(spec, spec.baselines.awm, project / "results/awm"),
)
"""GRPO in synthetic environments that no diagnosis asked for: nothing is diagnosed or calibrated, and all of TRACE's
total is training."""
SINGLE = GRPOBaseline(
    name="single",
    label="single capability",
    order=5,
    environments=first_environment,
    rests_on=(DIAGNOSIS, CALIBRATION),
    first_capability=True,
)
"""All of TRACE's budget on the first capability, which shows what that alone is worth."""
MIXED = GRPOBaseline(
    name="mixed",
    label="mixed environments",
    order=6,
    environments=lambda spec, project: training_environments(project / "results/environments"),
    rests_on=(DIAGNOSIS, CALIBRATION),
)
"""One adapter over all of TRACE's environments: what an adapter for each capability adds to them."""
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
"""The adapter that the environments' solutions have taught, trained on by GRPO on the target with every rollout that
TRACE has left after what that row has cost. Beside `solutions` it shows what reinforcement adds; beside `warm_grpo`,
what targeting does."""
