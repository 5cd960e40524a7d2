"""Baseline: a generic warm start, then GRPO on the target.

The adapter of the row `adp`, fine-tuned on demonstrations that no diagnosis asked for, is trained on by GRPO with as
many rollouts as TRACE spends in all. It shows what demonstrations are worth before rewards when they are not targeted.
"""

from collections.abc import Sequence
from pathlib import Path

from captrain.comparison.baselines.training import GRPOBaseline, adapter_of, baseline_job
from captrain.config import Spec
from captrain.ledger import LedgerEntry, budget
from captrain.training import Job, TrainingEnvironment


def warm_jobs(spec: Spec, project: Path, trace: Sequence[LedgerEntry]) -> list[Job]:
    """Make the one job; none without an adapter to go on from.

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.
        trace: every ledger entry on TRACE's side: diagnosis and calibration count as much as training.
    """
    settings, target = spec.baselines.warm_grpo.differences(), TrainingEnvironment("target", spec.benchmark)
    start = adapter_of("adp", project)
    return [baseline_job("warm_grpo", spec, project, [target], budget(trace), settings, start)] if start else []


BASELINE = GRPOBaseline(
    name="warm_grpo",
    label="ADP, then GRPO on target",
    order=3,
    jobs=warm_jobs,
    continues="adp",
    compared_with=("grpo_target", "adp"),
    target_share=lambda spec: 1.0,
)
