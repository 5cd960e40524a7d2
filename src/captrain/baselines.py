"""What TRACE is compared with: GRPO on the target itself, with as many rollouts as TRACE spends in all."""

from collections.abc import Sequence
from pathlib import Path

from captrain.adapters import Job
from captrain.records import LedgerEntry
from captrain.spec import Component, Spec


def grpo_target(spec: Spec, base: Path, trace: Sequence[LedgerEntry]) -> Job:
    """The job of the baseline.

    Args:
        spec: the whole specification.
        base: folder of the base model.
        trace: every ledger entry on TRACE's side: diagnosis and calibration count as much as training.
    """
    total = sum(entry.rollouts for entry in trace if entry.method == "trace")
    settings = {**spec.trainer.settings(), "learning_rate": spec.baselines.grpo_target.learning_rate}
    return Job(
        name="grpo_target",
        base=base,
        policy=spec.exploring(),
        trainer=Component.model_validate({"_target_": spec.trainer.target, **settings}),
        environment=spec.benchmark,
        rollouts=total,
        skip=0,
        seed=spec.seed,
        machine=spec.machine,
    )
