"""Baseline: GRPO on the target itself, with as many rollouts as TRACE spends in all.

A baseline is as strong as its settings, so these are its own and not the adapters': `scripts/tune_grpo.py` has searched
them. What the trainer's settings give is the row `grpo_untuned`.
"""

from captrain.comparison.baselines.training import GRPOBaseline

BASELINE = GRPOBaseline(name="grpo_target", label="GRPO on target", order=1, curve=True, target_share=lambda spec: 1.0)
