"""Baselines that train an adapter: by GRPO with TRACE's trainer and budget, or on demonstrations without a rollout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from captrain.comparison.baselines.baseline import TRACE_STAGES, Baseline, trace_ledger
from captrain.config import GrpoSettings, Spec, repro
from captrain.errors import UserError
from captrain.execution import launch
from captrain.ledger import LedgerEntry, budget
from captrain.models import Adapter
from captrain.records import JsonObject, load, read_index
from captrain.training import (
    LIBRARIES,
    SFT_COLUMNS,
    FineTuned,
    Job,
    TrainingEnvironment,
    derived_trainer,
    publish_adapters,
    train,
)


def on_target(spec: Spec, project: Path) -> Sequence[TrainingEnvironment]:
    """Return the target itself as the only place to train."""
    return [TrainingEnvironment("target", spec.benchmark)]


@dataclass(frozen=True, kw_only=True)
class GRPOBaseline(Baseline):
    """A row that trains one adapter with rewards: as TRACE trains its own, with what is left of TRACE's rollouts after
    what the row rests on.

    Args:
        environments: where it trains, from the specification and the folder of artifacts/ and results/; none where
            there is nothing to train in.
        continues: the row whose adapter it trains on, which has learnt from demonstrations; "" for none.
        curve: whether its adapter is evaluated as it was on the way, too (`curve.points`).
    """

    environments: Callable[[Spec, Path], Sequence[TrainingEnvironment]] = on_target
    continues: str = ""
    curve: bool = False

    @property
    def learns_from(self) -> Literal["rewards", "demonstrations and rewards"]:
        """See `Baseline.learns_from`."""
        return "demonstrations and rewards" if self.continues else "rewards"

    @property
    def trains_by_grpo(self) -> bool:
        """See `Baseline.trains_by_grpo`."""
        return True

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
        environments = self.environments(spec, project)
        start = adapter_of(self.continues, project) if self.continues else None
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


class SFTSection(Protocol):
    """Settings of a row that is fine-tuned."""

    @property
    def run(self) -> bool:
        """True if the row is part of the experiment."""
        ...

    @property
    def demonstrations(self) -> int:
        """Number of demonstrations at most."""
        ...

    @property
    def epochs(self) -> int:
        """Passes over them."""
        ...


class Lesson(Protocol):
    """Job of training a row: a task of `captrain.execution.launch`."""

    @property
    def name(self) -> str:
        """Name in `captrain jobs`."""
        ...


@dataclass(frozen=True, kw_only=True)
class SFTBaseline(Baseline):
    """A row that is fine-tuned on demonstrations. `lessons` says on which, in the project's folder; `teach` trains on
    one of them."""

    lessons: Callable[[Spec, Path], Sequence[Lesson]]
    teach: Callable[..., FineTuned]

    @property
    def learns_from(self) -> Literal["demonstrations"]:
        """See `Baseline.learns_from`."""
        return "demonstrations"

    def demonstrations(self, spec: Spec) -> tuple[int, int]:
        """See `Baseline.demonstrations`."""
        section: SFTSection = getattr(spec.baselines, self.name)
        return (section.demonstrations, section.epochs) if section.run else (0, 0)

    def compute(self, spec: Spec) -> str:
        """See `Baseline.compute`."""
        self.publish_nothing()
        adapters = launch.run(self.teach, self.lessons(spec, Path()), spec.machine, self.name, LIBRARIES)
        if adapters:
            publish_adapters(adapters, self.name, columns=SFT_COLUMNS)
        count = sum(adapter.demonstrations for adapter in adapters)
        discarded = sum(sum(adapter.left_out.values()) for adapter in adapters)
        return f"{count} demonstrations, left out {discarded}"

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


def adapter_of(row: str, project: Path) -> Adapter | None:
    """Find the adapter that another row has left, by its name; None where that row had nothing to train on.

    Args:
        row: whose.
        project: folder of artifacts/ and results/.

    Raises:
        UserError: the stage of that row has not run.
    """
    path = project / f"results/{row}/index.json"
    entry = read_index(path, f"run `{repro(row, project)}` to make it").get(row)
    return Adapter(str(project / entry.path), entry.digest) if entry else None
