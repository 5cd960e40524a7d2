"""Baseline: GRPO on the target itself, with as many rollouts as TRACE spends in all.

A baseline is as strong as its settings, so these are its own and not the adapters': `scripts/tune_grpo.py` has searched
them. What the trainer's settings give is the row `grpo_untuned`.
"""

from collections.abc import Sequence
from pathlib import Path

from captrain.comparison.baselines.training import GRPOBaseline, baseline_job
from captrain.config import Spec
from captrain.ledger import LedgerEntry, budget
from captrain.training import Job, TrainingEnvironment


def target_jobs(spec: Spec, project: Path, trace: Sequence[LedgerEntry]) -> list[Job]:
    """Make the one job. After errors on TRACE's side its last step may be smaller (see `captrain.training`).

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.
        trace: every ledger entry on TRACE's side: diagnosis and calibration count as much as training.
    """
    settings = spec.baselines.grpo_target.differences()
    target = TrainingEnvironment("target", spec.benchmark)
    points = spec.curve.points
    return [baseline_job("grpo_target", spec, project, [target], budget(trace), settings, points=points)]


BASELINE = GRPOBaseline(
    name="grpo_target", label="GRPO on target", order=1, jobs=target_jobs, target_share=lambda spec: 1.0
)
