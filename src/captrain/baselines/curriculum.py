"""What TRACE is compared with: one adapter on a curriculum from targeted environments to the target itself."""

from collections.abc import Sequence
from pathlib import Path

from captrain.baselines.baseline import CALIBRATION, DIAGNOSIS
from captrain.baselines.training import GRPOBaseline, training_budget
from captrain.config import Spec
from captrain.ledger import LedgerEntry
from captrain.training import Job, curriculum_job, derived_trainer, training_environments


def curriculum_jobs(spec: Spec, project: Path, trace: Sequence[LedgerEntry]) -> list[Job]:
    """One job with what TRACE has spent on training; none without an environment.

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.
        trace: every ledger entry on TRACE's side.
    """
    if not training_environments(project / "results/environments"):
        return []
    settings = spec.baselines.curriculum.model_dump(exclude={"run"})
    trainer = derived_trainer(spec.trainer, "captrain.training.curriculum.Curriculum", **settings)
    return [curriculum_job(spec, project, trainer, training_budget(trace))]


def target_share(spec: Spec) -> float:
    """The mean over the training of the probability that a group is drawn from the target."""
    settings = spec.baselines.curriculum
    return min(1.0, settings.start + settings.slope / 2)


BASELINE = GRPOBaseline(
    name="curriculum",
    label="TRACE, curriculum",
    order=7,
    jobs=curriculum_jobs,
    rests_on=(DIAGNOSIS, CALIBRATION),
    compared_with=("grpo_target",),
    target_share=target_share,
)
