"""Baseline: all of TRACE's budget on the first capability, which shows what that alone is worth."""

from collections.abc import Sequence
from pathlib import Path

from captrain.comparison.baselines.baseline import CALIBRATION, DIAGNOSIS
from captrain.comparison.baselines.training import GRPOBaseline
from captrain.config import Spec
from captrain.records import Capability, load
from captrain.training import TrainingEnvironment, training_environments


def first_environment(spec: Spec, project: Path) -> Sequence[TrainingEnvironment]:
    """Find the environment of the first capability that has one; none where no capability has."""
    environments = {place.name: place for place in training_environments(project / "results/environments")}
    ranked = load(project / "results/capabilities/capabilities.jsonl", Capability)
    return [environments[capability.id] for capability in ranked if capability.id in environments][:1]


BASELINE = GRPOBaseline(
    name="single",
    label="single capability",
    order=5,
    environments=first_environment,
    rests_on=(DIAGNOSIS, CALIBRATION),
    first_capability=True,
)
