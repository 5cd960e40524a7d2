"""The adapter that the environments' solutions have taught, trained on by GRPO on the target.

The warm start of the row `solutions`, then every rollout that TRACE has left after what that row has cost. So its
total is TRACE's, and beside `solutions` it shows what reinforcement adds; beside `warm_grpo`, what targeting does.
"""

from captrain.comparison.baselines.baseline import CALIBRATION, DIAGNOSIS
from captrain.comparison.baselines.training import GRPOBaseline

BASELINE = GRPOBaseline(
    name="solutions_grpo",
    label="TRACE, solutions, then GRPO on target",
    order=8,
    continues="solutions",
    rests_on=(DIAGNOSIS, CALIBRATION, "solutions"),
    compared_with=("grpo_target", "rejection_sft", "solutions", "warm_grpo"),
    target_share=lambda spec: 1.0,
)
