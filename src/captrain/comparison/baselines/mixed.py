"""Baseline: one adapter over all of TRACE's environments.

It shows what an adapter for each capability adds to the environments.
"""

from captrain.comparison.baselines.baseline import CALIBRATION, DIAGNOSIS
from captrain.comparison.baselines.training import GRPOBaseline
from captrain.training import training_environments

BASELINE = GRPOBaseline(
    name="mixed",
    label="mixed environments",
    order=6,
    environments=lambda spec, project: training_environments(project / "results/environments"),
    rests_on=(DIAGNOSIS, CALIBRATION),
)
