"""Baseline: a generic warm start, then GRPO on the target.

The adapter of the row `adp`, fine-tuned on demonstrations that no diagnosis asked for, is trained on by GRPO with as
many rollouts as TRACE spends in all. It shows what demonstrations are worth before rewards when they are not targeted.
"""

from captrain.comparison.baselines.training import GRPOBaseline

BASELINE = GRPOBaseline(
    name="warm_grpo",
    label="ADP, then GRPO on target",
    order=3,
    continues="adp",
    compared_with=("grpo_target", "adp"),
    target_share=lambda spec: 1.0,
)
