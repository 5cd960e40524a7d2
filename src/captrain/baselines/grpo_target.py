"""What TRACE is compared with: GRPO on the target itself, with as many rollouts as TRACE spends in all."""

from collections.abc import Sequence
from pathlib import Path

from captrain.baselines.training import GRPOBaseline
from captrain.config import Spec
from captrain.ledger import LedgerEntry, budget
from captrain.training import Job, TrainingEnvironment, derived_trainer


def target_jobs(spec: Spec, project: Path, trace: Sequence[LedgerEntry]) -> list[Job]:
    """The one job. After errors on TRACE's side its last step may be smaller (see `captrain.training`).

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.
        trace: every ledger entry on TRACE's side: diagnosis and calibration count as much as training.
    """
    return [
        Job(
            name="grpo_target",
            base=project / "artifacts/base",
            policy=spec.exploring(),
            trainer=derived_trainer(spec.trainer, learning_rate=spec.baselines.grpo_target.learning_rate),
            environments=(TrainingEnvironment("target", spec.benchmark),),
            rollouts=budget(trace),
            seed=spec.seed,
            machine=spec.machine,
        )
    ]


BASELINE = GRPOBaseline(
    name="grpo_target", label="GRPO on target", order=1, jobs=target_jobs, target_share=lambda spec: 1.0
)
