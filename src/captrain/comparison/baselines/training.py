"""Baselines that train an adapter: by GRPO with TRACE's trainer and budget, or on demonstrations without a rollout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from captrain.comparison.baselines.baseline import CALIBRATION, DIAGNOSIS, Baseline, trace_ledger
from captrain.config import Spec, repro
from captrain.errors import UserError
from captrain.execution import launch
from captrain.ledger import LedgerEntry, budget
from captrain.models import Adapter
from captrain.records import JsonObject, read_index
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

JobFactory = Callable[[Spec, Path, Sequence[LedgerEntry]], Sequence[Job]]
"""The jobs of a row, from the specification, the folder of artifacts/ and results/, and TRACE's ledger; none where
there is nothing to train in."""


@dataclass(frozen=True, kw_only=True)
class GRPOBaseline(Baseline):
    """A row that trains with rewards. `jobs` makes what is to be trained; adapters are named by their jobs.

    Args:
        continues: the row whose adapter it trains on, which has learnt from demonstrations; "" for none.
    """

    jobs: JobFactory
    continues: str = ""

    @property
    def learns_from(self) -> Literal["rewards", "demonstrations and rewards"]:
        """See `Baseline.learns_from`."""
        return "demonstrations and rewards" if self.continues else "rewards"

    @property
    def trains_by_grpo(self) -> bool:
        """See `Baseline.trains_by_grpo`."""
        return True

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


def training_budget(trace: Sequence[LedgerEntry]) -> int:
    """Return TRACE's rollouts less those of diagnosis and calibration."""
    return budget(trace) - budget([entry for entry in trace if entry.stage in (DIAGNOSIS, CALIBRATION)])
