"""Baseline: GRPO on the target with the trainer's settings, untuned.

Beside `grpo_target` it shows what the search for that row's settings was worth.
"""

from collections.abc import Sequence
from pathlib import Path

from captrain.comparison.baselines.training import GRPOBaseline, baseline_job
from captrain.config import Spec
from captrain.ledger import LedgerEntry, budget
from captrain.training import Job, TrainingEnvironment


def untuned_jobs(spec: Spec, project: Path, trace: Sequence[LedgerEntry]) -> list[Job]:
    """Make the one job, with as many rollouts as TRACE spends in all.

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.
        trace: every ledger entry on TRACE's side: diagnosis and calibration count as much as training.
    """
    settings = spec.baselines.grpo_untuned.differences()
    target = TrainingEnvironment("target", spec.benchmark)
    return [baseline_job("grpo_untuned", spec, project, [target], budget(trace), settings)]


BASELINE = GRPOBaseline(
    name="grpo_untuned",
    label="GRPO on target, untuned",
    order=1,
    jobs=untuned_jobs,
    compared_with=("grpo_target",),
    target_share=lambda spec: 1.0,
)
