"""What a diagnosis makes of rollouts in which a fault was planted."""

from collections.abc import Sequence

from captrain.config import Selection
from captrain.diagnosis.diagnosis import diagnose
from captrain.interop import logs_of_rollouts
from captrain.records import Rollout


def selected_causes(rollouts: Sequence[Rollout]) -> list[str]:
    """The causes that a diagnosis of rollouts selects, by the default's thresholds."""
    rule = Selection(delta=0.2, coverage=0.1, agreement=8, confidence=0.95, floor=0.0, resamples=100, ranking="product")
    report = diagnose(logs_of_rollouts(rollouts), rule, runs=10, count=4, seed=0).report
    assert report is not None
    return [candidate["id"] for candidate in report["candidates"] if candidate["selected"]]
