"""Baseline: GRPO on the target with the trainer's settings, untuned.

Beside `grpo_target` it shows what the search for that row's settings was worth.
"""

from captrain.comparison.baselines.training import GRPOBaseline

BASELINE = GRPOBaseline(
    name="grpo_untuned",
    label="GRPO on target, untuned",
    order=1,
    compared_with=("grpo_target",),
    target_share=lambda spec: 1.0,
)
