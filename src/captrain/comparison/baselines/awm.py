"""Baseline: GRPO in synthetic environments that no diagnosis asked for, at equal rollouts.

Nothing is diagnosed or calibrated, and all of TRACE's total is training.
"""

from captrain.comparison.baselines.training import GRPOBaseline
from captrain.comparison.baselines.untargeted import untargeted_environments

BASELINE = GRPOBaseline(
    name="awm",
    label="AWM",
    order=4,
    environments=lambda spec, project: untargeted_environments(spec, spec.baselines.awm, project / "results/awm"),
)
