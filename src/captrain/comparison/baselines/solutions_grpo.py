"""The adapter that the environments' solutions have taught, trained on by GRPO on the target.

The warm start of the row `solutions`, then every rollout that TRACE has left after what that row has cost. So its
total is TRACE's, and beside `solutions` it shows what reinforcement adds; beside `warm_grpo`, what targeting does.
"""

from collections.abc import Sequence
from pathlib import Path

from captrain.comparison.baselines.baseline import CALIBRATION, DIAGNOSIS
from captrain.comparison.baselines.training import GRPOBaseline, adapter_of, baseline_job, training_budget
from captrain.config import Spec
from captrain.ledger import LedgerEntry
from captrain.records import load
from captrain.training import Job, TrainingEnvironment

LEDGER = "results/solutions/ledger.jsonl"


def continued_jobs(spec: Spec, project: Path, trace: Sequence[LedgerEntry]) -> list[Job]:
    """Make the one job; none without an adapter to go on from.

    Args:
        spec: the whole specification.
        project: folder of artifacts/ and results/.
        trace: every ledger entry on TRACE's side; its diagnosis and calibration are spent, and so is what `solutions`
            has played.
    """
    settings, target = spec.baselines.solutions_grpo.differences(), TrainingEnvironment("target", spec.benchmark)
    start = adapter_of("solutions", project)
    rollouts = training_budget(trace) - sum(entry.rollouts for entry in load(project / LEDGER, LedgerEntry))
    return [baseline_job("solutions_grpo", spec, project, [target], rollouts, settings, start)] if start else []


BASELINE = GRPOBaseline(
    name="solutions_grpo",
    label="TRACE, solutions, then GRPO on target",
    order=8,
    jobs=continued_jobs,
    continues="solutions",
    rests_on=(DIAGNOSIS, CALIBRATION, "solutions"),
    compared_with=("grpo_target", "rejection_sft", "solutions", "warm_grpo"),
    target_share=lambda spec: 1.0,
)
